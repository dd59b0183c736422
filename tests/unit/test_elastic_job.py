"""Elastic jobs of threads, whose agent is the test: whoever comes or goes, the bits stay."""

from __future__ import annotations

import functools
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.elastic_burned import Training as Burned
from support.elastic_threads import Rank, ThreadJob

import fsdpcore as fc
from fsdpcore.elastic.buddies import holders
from fsdpcore.elastic.pace import Pace
from fsdpcore.elastic.versions import UNDER_WAY, Versions


class Training:
    """The training, and what all ranks have been through.

    Attributes:
        restored: of each generation, how many commits it began with.
        reached: of each generation, the last step that it has made.
        hook: called before each commit.
    """

    def __init__(self, steps: int = 6, strategy: str = "full_shard", folder: str = "") -> None:
        self.steps = steps
        self.restored: dict[int, int] = {}
        self.reached: dict[int, int] = {}
        self.hook: Any = None
        self._training = Burned(steps, strategy, saves=int(bool(folder)), folder=folder)
        self.checkpoints = self._training.checkpoints

    def __call__(self, job: fc.elastic.Job) -> Any:
        def tell(what: str, *, commits: int) -> None:
            if what == "begin":
                self.restored[job.generation] = commits
            elif what == "step":
                self.reached[job.generation] = commits
                if self.hook is not None:
                    self.hook(job, commits)

        return self._training.run(job, tell)


@functools.cache
def quiet(steps: int) -> Any:
    """What the training returns on one rank that nothing happens to."""
    return fc.elastic.run(Training(steps))()


def check(job: ThreadJob, training: Training, results: list[Any]) -> None:
    """All that were there at the end have the bits of the quiet run, and used the same rows."""
    assert len(results) == len(job.members)
    assert results == [quiet(training.steps)] * len(results)
    for rank in job.ranks.values():
        assert rank.error is None or isinstance(rank.error, SystemExit) or rank.killed, rank.error


def once(actions: dict[int, Any]) -> Any:
    """A hook of a training that does something the first time that a step is made, on rank 0."""
    done: set[int] = set()

    def hook(job: fc.elastic.Job, number: int) -> None:
        if job.rank == 0 and number in actions and number not in done:
            done.add(number)
            actions[number](job)

    return hook


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_ranks_come_and_go(strategy: str) -> None:
    training = Training(10, strategy)

    def some_leave(_: fc.elastic.Job) -> None:
        for number in job.members[:3]:  # rank 0 with them, and two that keep each other's parts
            job.ranks[number].seat.leave("there is other work")

    training.hook = once(
        {
            2: lambda _: job.ranks[0].kill(),  # 4 -> 3
            4: lambda _: [job.add(2), job.add(0)],  # -> 5
            7: some_leave,  # -> 2
        }
    )
    job = ThreadJob(fc.elastic.run(training), (0, 0, 1, 1))
    check(job, training, job.run())
    sizes = [len(generation.seats) for generation in job.generations]
    assert [sizes[0], sizes[1], sizes[-1]] == [4, 3, 2]
    assert 5 in sizes
    # In order nothing is computed again, after a loss one commit at most.
    assert training.restored[2] in (1, 2)
    for number in [each.number for each in job.generations if each.orderly]:
        assert training.restored[number] == training.reached[number - 1] + 1
    left = [rank for rank in job.ranks.values() if isinstance(rank.error, SystemExit)]
    assert [rank.error.code for rank in left if isinstance(rank.error, SystemExit)] == [0] * 3


@pytest.mark.parametrize("seed", range(6))
def test_a_rank_may_die_at_any_moment(seed: int) -> None:
    chance = random.Random(seed)
    crash = {1: {chance.randrange(4): chance.randrange(150, 600)}}
    if seed % 3:
        crash[2] = {chance.randrange(3): chance.randrange(400)}
    training = Training(4)
    job = ThreadJob(fc.elastic.run(training), (0, 0, 1, 1), crash=crash)
    check(job, training, job.run())
    # The version of the commit before the last one has long been on two hosts.
    if len(job.generations) > 1 and 2 in training.restored:
        assert training.restored[2] >= training.reached[1] - 1


def test_two_that_keep_each_others_parts_are_lost(tmp_path: Path) -> None:
    for folder in ("", str(tmp_path)):
        training = Training(6, folder=folder)

        def both(_: fc.elastic.Job, job: list[ThreadJob]) -> None:
            job[0].ranks[1].kill()
            job[0].ranks[3].kill()

        holder: list[ThreadJob] = []
        training.hook = once({4: functools.partial(both, job=holder)})
        program = fc.elastic.run(checkpoints=training.checkpoints)(training)
        job = ThreadJob(program, (0, 0, 1, 1))
        holder.append(job)
        assert holders((0, 0, 1, 1)) == (2, 3, 0, 1)
        check(job, training, job.run())
        last = job.generations[-1].number
        assert training.restored[last] == (4 if folder else 0)


def test_no_version_counts_before_all_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = Versions.complete

    def late(versions: Versions) -> int:
        return UNDER_WAY if versions._backend.rank == 1 else complete(versions)

    monkeypatch.setattr(Versions, "complete", late)

    def program(job: fc.elastic.Job) -> Any:
        job.restore({"x": np.zeros(3)})
        assert job._seat is not None
        kept = [sorted(job._seat.vault.parts)]
        for _ in range(3):
            job.commit()
            kept.append(sorted(job._seat.vault.parts))
        return kept

    # What the job begins with is on two hosts before ``restore`` returns, and stays.
    assert (
        ThreadJob(fc.elastic.run(program), (0, 1)).run() == [[[((1, 0), 0), ((1, 0), 1)]] * 4] * 2
    )


def test_what_had_come_when_a_rank_was_lost_counts() -> None:
    """The copies of the last commit, and in the next generation those that make up for the loss."""
    training = Training(6)
    # Of a generation: who is lost in the step after the third commit, and who notices at once.
    losses = {1: (2, 0), 2: (0, 1)}

    def lose(job: fc.elastic.Job, number: int) -> None:
        lost, notices = losses.get(job.generation, (-1, -1))
        if number == 3 and job.rank == notices:
            time.sleep(0.1)  # as a step takes; copies come meanwhile
            threads.ranks[lost].kill()
            job.backend.recv(np.empty(1), lost)

    training.hook = lose
    threads = ThreadJob(fc.elastic.run(training), (0, 1, 2))
    check(threads, training, threads.run())
    assert training.restored == {1: 0, 2: 3, 3: 3}


@pytest.mark.parametrize(
    "strategy", ["full_shard", "no_shard", "shard_optimizer", fc.Strategy("hybrid_shard", True, 2)]
)
def test_a_version_is_as_large_as_the_plan_says(strategy: str | fc.Strategy) -> None:
    def program(job: fc.elastic.Job) -> tuple[int, int, int]:
        params = {"w": np.ones((300, 200), np.float32), "b": np.ones(300, np.float32)}
        engine = fc.FSDP(
            [fc.Unit("u", params, frozen="b")],
            job.backend,
            strategy=strategy,
            optimizer=fc.optim.AdamW(1e-3),
        )
        job.restore(engine)
        assert job._seat is not None
        parts = job._seat.vault.parts
        (own,) = [part for (_, rank), part in parts.items() if rank == job.rank]
        return engine.plan().version_bytes, own.file_bytes, len(parts)

    results = ThreadJob(fc.elastic.run(program), (0, 1, 2, 3)).run()
    planned, measured, parts = zip(*results, strict=True)
    assert parts == (2, 2, 2, 2)
    assert planned == pytest.approx([60_000 * 12 // 4 + 300] * 4, rel=0.01)
    assert sum(measured) == pytest.approx(sum(planned), rel=0.05)  # what is whole is not cut


@pytest.mark.parametrize("strategy", ["no_shard", fc.Strategy("hybrid_shard", True, 2)])
def test_replicas_keep_each_others_parts_and_send_none(strategy: str | fc.Strategy) -> None:
    received: list[list[int]] = []  # bytes of copies, of each rank
    kept: dict[tuple[int, int], list[bytes]] = {}  # by commit and part

    def program(job: fc.elastic.Job) -> int:
        units = [fc.Unit(name, {"w": np.ones((300, 100), np.float32)}) for name in "uv"]
        optimizer = fc.optim.AdamW(1e-3)
        engine = fc.FSDP(
            units, job.backend, strategy=strategy, optimizer=optimizer, virtual_ranks=4
        )
        state = job.restore({"engine": engine, "own": fc.checkpoint.PerRank(job.rank), "x": {}})
        for number in range(4):
            train(engine, number)
            if number == 2:
                state["x"] = {"y": np.ones(70_000)}  # the plan is another one from here on
            job.commit()
            assert job._versions is not None
            assert job._seat is not None
            job._versions.wait()
            for (version, part), each in job._seat.vault.parts.items():
                if version.commit == number + 1:
                    kept.setdefault((number, part), []).append(each.memory.tobytes())
            job.backend.barrier()
        calls = [each.call for each in job.backend.root.recorder.entries() if not each.sequence]
        received.append([call.nbytes for call in calls if call.operation == "recv"])
        return job.rank

    def train(engine: fc.FSDP, number: int) -> None:
        with engine.step() as step:
            for leaf in step.leaves():
                for name in "uv":
                    with step.forward(name):
                        pass
                for name in "vu":
                    with step.backward(name) as (params, grads):
                        for key, value in params.items():
                            grads[key] = value * (leaf + number + 1)
            step.update()

    assert ThreadJob(fc.elastic.run(program), (0, 0, 1, 1)).run() == [0, 1, 2, 3]
    for rank in range(4):
        for number in range(4):
            here, there = kept[number, rank]
            assert here == there
        assert kept[0, rank][0] != kept[1, rank][0] != kept[2, rank][0]
    assert sum(first for first, *_ in received) > 60_000 * 12
    for _, *later in received:
        assert later[0] == later[1] == later[3] == 1024  # the record


def test_a_commit_is_one_collective_unless_the_state_is_another() -> None:
    sent: list[int] = []  # by rank 0, collectives of each commit

    def program(job: fc.elastic.Job) -> Any:
        state = job.restore({"x": np.full(3, -1.0), "log": "", "more": {}})
        for number in range(job.commits, 8):
            state["x"] += 1
            if number == 3:
                state["log"] = 2000 * "a line of text "  # the record has no room for it
            if number == 5:
                state["more"] = {"y": np.arange(4)}
            assert job._versions is not None
            job._versions.wait()
            job.backend.barrier()
            if number == 7 and job.generation == 1:
                threads.ranks[1].kill()
            before = job.backend.root.recorder.entries()
            job.commit()
            new = job.backend.root.recorder.entries()[len(before) :]
            if job.rank == 0 and job.generation == 1:
                sent.append(sum(entry.sequence > 0 for entry in new))
        return job.generation, state["x"].tolist(), len(state["log"]), state["more"]

    threads = ThreadJob(fc.elastic.run(program), (0, 1, 2))
    for generation, x, log, more in threads.run():
        assert (generation, x, log) == (2, [7.0] * 3, 30_000)
        np.testing.assert_equal(more, {"y": np.arange(4)})
    assert [number for number, count in enumerate(sent) if count > 1] == [3, 5]


def test_a_program_may_end_by_exit() -> None:
    def program(job: fc.elastic.Job) -> None:
        job.restore({"x": np.zeros(3)})
        job.commit()
        sys.exit(0)

    job = ThreadJob(fc.elastic.run(program), (0, 1))
    job.run()
    for rank in job.ranks.values():
        assert isinstance(rank.error, SystemExit)
        assert rank.error.code == 0
    assert len(job.generations) == 1


def test_every_so_many_commits() -> None:
    training = Training(7)
    training.hook = once({5: lambda _: job.ranks[2].kill()})
    job = ThreadJob(fc.elastic.run(every=3)(training), (0, 1, 2))
    check(job, training, job.run())
    assert training.restored[2] == 3


def test_what_breaks_without_a_loss_is_tried_again_and_not_for_ever() -> None:
    broken: list[int] = []

    def program(job: fc.elastic.Job) -> int:
        job.restore({"x": np.zeros(3)})
        if job.rank == 1 and len(broken) < limit:
            broken.append(job.generation)
            raise fc.CommTimeoutError("it took too long")
        job.commit()
        return job.generation

    limit = 2
    job = ThreadJob(fc.elastic.run(program), (0, 1))
    assert job.run() == [3, 3]
    broken.clear()
    limit = 99
    job = ThreadJob(fc.elastic.run(program), (0, 1))
    job.run()  # the other one ends its program alone, or gives up, too
    assert isinstance(job.ranks[1].error, fc.CommTimeoutError)
    assert len(broken) <= 8  # four with both, four alone


def test_a_late_loss_is_none() -> None:
    def program(job: fc.elastic.Job) -> int:
        job.restore({"x": np.zeros(3)})
        job.commit()
        return job.rank

    def watch(job: ThreadJob, rank: Rank, message: dict[str, Any]) -> None:
        if message["kind"] == "finished" and not job.done:
            for each in job.ranks.values():
                if each is not rank:
                    each.channel.tell({"kind": "finished"})

    job = ThreadJob(fc.elastic.run(program), (0, 1, 2), watch=watch)
    job.run()
    assert [rank.result for rank in job.ranks.values()] == [0, 1, 2]
    assert len(job.generations) == 1


def test_an_error_of_the_program_goes_through() -> None:
    def program(job: fc.elastic.Job) -> int:
        job.restore({"x": np.zeros(3)})
        job.commit()
        if threading.current_thread() is job_.ranks[1].thread:
            raise ValueError("of the user")
        job.commit()
        return job.world_size

    job_ = ThreadJob(fc.elastic.run(program), (0, 1, 2))
    assert job_.run() == [2, 2]
    assert isinstance(job_.ranks[1].error, ValueError)
    assert (1, {"kind": "failed", "reason": "ValueError: of the user"}) in job_.log


def test_states_that_ranks_have_of_their_own() -> None:
    def program(job: fc.elastic.Job) -> Any:
        noise = np.random.default_rng(job.rank)
        state = job.restore({"rng": fc.checkpoint.PerRank(noise), "best": 0, "deep": {"a": (1, 2)}})
        for number in range(job.commits, 4):
            noise.standard_normal()
            state["best"] += job.world_size
            state["deep"]["a"] = (number, number)
            if number == 2 and job.generation == 1 and job.rank == 0:
                job_.ranks[1].kill()
            job.commit()
        return noise.standard_normal(), state["best"], state["deep"]

    job_ = ThreadJob(fc.elastic.run(program), (0, 1, 2))
    found = job_.run()
    expected = []
    for rank in (0, 2):
        rng = np.random.default_rng(rank)
        rng.standard_normal(4)
        expected.append(rng.standard_normal())
    # The third rank is the second one now, and goes on as that one would have.
    assert found[0][0] == expected[0]
    assert [each[2] for each in found] == [{"a": (3, 3)}] * 2
    assert found[0][1] == found[1][1]


def test_without_an_agent_it_is_a_job_like_others() -> None:
    def program(job: fc.elastic.Job, more: int = 0) -> Any:
        state = job.restore({"x": np.arange(3.0), "n": 1})
        job.commit()
        job.leave("it would like to")
        assert not job.elastic
        assert len(job.step_seconds) == job.world_size
        return job.rank, job.world_size, job.commits, state["n"] + more

    decorated = fc.elastic.run(program)
    assert decorated(more=2) == (0, 1, 1, 3)
    assert fc.launch(decorated, world_size=3, transport="sim", args=(1,)) == [
        (0, 3, 1, 2),
        (1, 3, 1, 2),
        (2, 3, 1, 2),
    ]

    @fc.elastic.run
    def fails(job: fc.elastic.Job) -> None:
        raise ValueError("of the user")

    with pytest.raises(fc.RankFailedError, match="of the user"):
        fails()
    for wrong in (0, -1, 1.5):
        with pytest.raises(fc.ArgumentError, match="every"):
            fc.elastic.run(every=wrong)  # type: ignore[call-overload]


def test_restore_is_called_once() -> None:
    @fc.elastic.run
    def twice(job: fc.elastic.Job) -> None:
        job.restore({"x": np.zeros(3)})
        job.restore({"x": np.zeros(3)})

    with pytest.raises(fc.RankFailedError, match="once, with all of the state"):
        twice()


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.data())
def test_who_keeps_whose_parts(sizes: list[int], data: st.DataObject) -> None:
    hosts = [host for host, size in enumerate(sizes) for _ in range(size)]
    count, most = len(hosts), max(sizes)
    found = holders(hosts)
    if count == 1:
        assert found == (None,)
        return
    assert sorted(each for each in found if each is not None) == list(range(count))
    assert all(keeper != rank for rank, keeper in enumerate(found))
    near = sum(keeper is not None and hosts[keeper] == hosts[r] for r, keeper in enumerate(found))
    assert near == (count if len(sizes) == 1 else max(0, 2 * most - count))
    leaving = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
    left = holders(hosts, leaving)
    assert not {*left} & leaving
    alone = len(leaving) == count - 1
    for rank, keeper in enumerate(left):
        assert keeper != rank
        assert (keeper is None) == (alone and rank not in leaving)


def test_what_is_no_commit_is_refused_before_anything_is_lost() -> None:
    def program(job: fc.elastic.Job) -> int:
        with pytest.raises(fc.StateError, match="call that first"):
            job.commit()
        again = fc.elastic.Job(job.backend, seat=job._seat, versions=job._versions)
        with pytest.raises(fc.MismatchError, match="not all ranks have 'of rank 0'"):
            again.restore({f"of rank {job.rank}": 1})
        unit = fc.Unit("u", {"w": np.zeros(3, np.float32)})
        engine = fc.FSDP([unit], job.backend, optimizer=fc.optim.SGD(lr=0.1))
        job.restore({"model": engine})
        with engine.step(), pytest.raises(fc.StateError, match="inside of a step"):
            job.commit()
        return job.commits

    assert ThreadJob(fc.elastic.run(program), (0, 1)).run() == [0, 0]


def test_a_spare_that_was_never_called_has_no_result() -> None:
    def program(job: fc.elastic.Job) -> int:
        return job.world_size

    done: list[Any] = []
    decorated = fc.elastic.run(program)
    job = fc.elastic.launch(
        functools.wraps(decorated)(lambda: done.append(decorated())), world_size=2
    )
    job.add(1)  # beyond the most: it waits
    job.wait()
    assert done == [2, 2]
    with pytest.raises(fc.StateError, match="has ended"):
        job.add(1)
    with pytest.raises(fc.ArgumentError, match=r"elastic\.run"):
        fc.elastic.launch(program, world_size=2)


def test_who_is_slow_is_named() -> None:
    @fc.elastic.run
    def program(job: fc.elastic.Job) -> int:
        units = [fc.Unit(f"u{n}", {"w": np.zeros(2000, np.float32)}) for n in range(3)]
        engine = fc.FSDP(units, job.backend, optimizer=fc.optim.SGD(lr=0.1))
        job.restore(engine)
        slowest = []
        for _ in range(6):
            with engine.step() as step:
                for unit in engine.units:
                    with step.forward(unit):
                        time.sleep(0.02 if job.rank == 1 else 0.001)
                for unit in reversed(engine.units):
                    with step.backward(unit) as (_, grads):
                        grads["w"] = np.ones(2000, np.float32)
                step.update()
            job.commit()
            assert job.step_seconds[1] >= 0.06
            slowest.append(job.slowest)
        return slowest.count(1)

    # It holds up the others: that all waited for it is not what they computed.
    for transport in ("sim", "sim://?shm=off"):
        assert min(fc.launch(program, world_size=3, transport=transport)) >= 4


def test_a_warning_about_who_is_slow_for_long(caplog: pytest.LogCaptureFixture) -> None:
    def warned(rows: list[list[float]], *, warn: bool = True) -> list[Any]:
        caplog.clear()
        pace = Pace()
        for row in rows:
            pace.note(row, warn=warn)
        assert pace.slowest == rows[-1].index(max(rows[-1]))
        return [record.args for record in caplog.records]

    slow, other, even = [0.1, 0.1, 0.16], [0.16, 0.1, 0.1], [0.1, 0.1, 0.14]
    assert [args[0] for args in warned([slow] * 10)] == [2]
    assert len(warned([slow] * 25)) == 1
    for rows in ([slow] * 9, [slow] * 9 + [other] + [slow] * 9, [slow] * 9 + [even] + [slow] * 9):
        assert not warned(rows)
    assert not warned([[0.1]] * 20)
    assert not warned([slow] * 10, warn=False)


def test_a_job_of_threads_to_try_programs_with() -> None:
    training = Training(8)
    begun = threading.Event()
    goes_on = threading.Event()

    def hook(job: fc.elastic.Job, number: int) -> None:
        if number == 2 and job.generation == 1:
            begun.set()
            goes_on.wait(20)

    training.hook = hook
    job = fc.elastic.launch(fc.elastic.run(training), world_size=(2, 3))
    assert begun.wait(20)
    with pytest.raises(TimeoutError):
        job.wait(0.01)
    with pytest.raises(fc.ArgumentError, match="no rank 7"):
        job.kill(7)
    job.kill(0)
    job.add(1)
    goes_on.set()
    assert job.wait(30) == [quiet(8)] * 3
    assert job.generation is not None
    assert len(job.generation.seats) == 3
    assert training.restored[2] in (1, 2)


def test_a_job_of_threads_that_cannot_go_on() -> None:
    @fc.elastic.run
    def program(job: fc.elastic.Job) -> None:
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        fc.elastic.launch(program, world_size=2).wait(30)
    with pytest.raises(fc.ConfigError, match="fsdpcore run --elastic -n 1:2"):
        fc.elastic.launch(program, world_size=2, transport="zmq")
