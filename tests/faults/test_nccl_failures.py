"""What goes wrong on GPUs of the stand-in: all ranks get an error in time, and streams go on."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import fake_cuda
from support import gpu_failures as bodies
from support.fake_cuda import Machine
from support.nccl_ranks import (
    SOON,
    config,
    expect,
    ones,
    run,
    run_ranks,
    settled,
    until_broken,
    wait_for_end,
)
from support.zmq_ranks import Outcome, run_joined

import fsdpcore as fc
from fsdpcore.comm.place import RankPlace

# The bodies that run on GPUs, too.


@pytest.mark.parametrize(
    "body",
    [
        bodies.missing_from_new_call,
        bodies.differing_in_known_calls,
        bodies.differing_in_new_calls,
        bodies.raising,
    ],
)
def test_errors_reach_all_ranks(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "DEADLINE", 0.5)
    run(body, 2, moved=False)


def test_a_rank_that_does_not_come_is_named(machine: Machine) -> None:
    ready = threading.Event()

    def body(backend: Any) -> None:
        x = settled(backend)
        if backend.rank == 1:
            assert ready.wait(SOON)  # it is there, but elsewhere
        else:
            fc.all_reduce(x, backend, op="mean", out=x, timeout=0.3)
            try:
                until_broken(backend)
            finally:
                ready.set()

    outcomes = run_ranks(body, 3)
    assert [outcome.error for outcome in outcomes[::2]] == ["CommTimeoutError"] * 2 or (
        {outcomes[0].error, outcomes[2].error} == {"CommTimeoutError", "PeerFailedError"}
    ), outcomes
    assert any("all_reduce #3" in o.text and "rank 1 is missing" in o.text for o in outcomes)
    assert machine.calls("nccl.abort")


def test_a_batch_where_others_make_a_call_that_is_known(machine: Machine) -> None:
    """One waits on the host for the others, who do not wait for it there."""

    def body(backend: Any) -> None:
        x = settled(backend)
        if backend.rank == 1:
            with fc.coalesce(backend) as batch:
                batch.all_reduce(x)
        else:
            fc.all_reduce(x, backend, op="mean")
            until_broken(backend)

    expect(run_ranks(body, 3), *["MismatchError"] * 3, words=("rank 1: coalesce", "all_reduce("))


def test_work_that_waits_in_a_stream_has_a_deadline_too(machine: Machine) -> None:
    """The collective itself does not begin, since what is before it does not end."""

    def body(backend: Any) -> None:
        x = settled(backend)
        if backend.rank == 0:
            machine.freeze(0)
        fc.all_reduce(x, backend, op="mean", out=x, timeout=0.2)
        try:
            until_broken(backend)
        finally:
            if backend.rank == 0:
                machine.thaw(0)

    outcomes = run_ranks(body, 2)
    assert {outcome.error for outcome in outcomes} <= {"CommTimeoutError", "PeerFailedError"}
    assert any("every rank has begun it" in outcome.text for outcome in outcomes), outcomes


def test_arrays_of_the_host_where_others_have_them_on_gpus(machine: Machine) -> None:
    """These are collectives of their own, so a rank waits in each; what it waits for is told."""
    met = threading.Barrier(2)

    def body(backend: Any) -> None:
        x = settled(backend)
        if backend.rank == 1:
            met.wait(SOON)
            fc.all_reduce(np.ones(100, np.float32), backend, op="mean", timeout=0.3)
        else:
            fc.all_reduce(x, backend, op="mean")
            met.wait(SOON)
            until_broken(backend)

    expect(
        run_ranks(body, 2),
        "PeerFailedError",
        "CommTimeoutError",
        words=("all_reduce #1", "rank 0 is missing: ", "#3 of group [0, 1] 'GPU arrays'"),
    )


def test_groups_whose_calls_cross_have_a_deadline_and_are_told_why() -> None:
    """Each GPU waits in one of the groups for the other, and everything was enqueued."""

    def body(backend: Any) -> None:
        groups = [backend.sub(range(2)) for _ in range(2)]
        for group in groups:
            settled(group)
        arrays = [ones(backend), ones(backend)]
        for number in (0, 1) if backend.rank else (1, 0):
            fc.all_reduce(arrays[number], groups[number], op="mean", timeout=0.3)
        until_broken(backend)

    with fake_cuda.installed(2, check=False):
        outcomes = run_ranks(body, 2)
    assert {outcome.error for outcome in outcomes} <= {"CommTimeoutError", "PeerFailedError"}
    assert all("several groups in different orders" in outcome.text for outcome in outcomes)


def test_a_thread_that_does_not_come_back_from_nccl(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where NCCL connects two GPUs at their first call, and one of them does not call."""
    from support.fake_cuda.nccl import NcclCommunicator

    all_reduce, abort = NcclCommunicator.allReduce, NcclCommunicator.abort
    aborted = threading.Event()

    def waits(self: Any, *args: Any) -> None:
        if self.rank_id() == 0 and args[2] == 7:
            assert aborted.wait(SOON)
            raise fake_cuda.NcclError(3)
        all_reduce(self, *args)

    def aborts(self: Any) -> None:
        if self.rank_id() == 0:  # that of another rank does not wake a thread of this one
            aborted.set()
        abort(self)

    monkeypatch.setattr(NcclCommunicator, "allReduce", waits)
    monkeypatch.setattr(NcclCommunicator, "abort", aborts)

    def body(backend: Any) -> None:
        settled(backend)
        fc.all_reduce(ones(backend, 7), backend, timeout=0.2)
        until_broken(backend)

    outcomes = run_ranks(body, 2)
    assert {outcome.error for outcome in outcomes} <= {"CommTimeoutError", "PeerFailedError"}
    assert all("all_reduce #3" in outcome.text for outcome in outcomes), outcomes


def test_an_error_that_nccl_meets_later(machine: Machine) -> None:
    met = threading.Barrier(2)

    def body(backend: Any) -> None:
        x = settled(backend)
        met.wait(SOON)
        if backend.rank == 0:
            fc.all_reduce(x, backend, op="mean", out=x)
            machine.fail_async(0, status=6)
        until_broken(backend)

    expect(run_ranks(body, 2), "CommunicationError", "PeerFailedError", words=("REMOTE_ERROR",))


def test_the_result_of_a_broken_collective_is_not_handed_out(machine: Machine) -> None:
    """Reading an array waits for the GPU, and then the host knows what has happened."""

    def body(backend: Any) -> None:
        x = settled(backend)
        if backend.rank == 1:
            backend.abort("enough")
            return
        y = fc.all_reduce(x, backend, op="mean", timeout=SOON)
        backend.device.to_host(y)

    outcomes = run_ranks(body, 2)
    assert outcomes[0].error == "PeerFailedError", outcomes
    assert "enough" in outcomes[0].text


def test_arrays_of_asynchronous_calls_live_until_they_have_ended(machine: Machine) -> None:
    def body(backend: Any) -> list[float]:
        import cupy

        results = []
        for round_ in range(6):
            x = backend.device.zeros(64, np.float32) + np.float32(round_)
            work = fc.all_reduce(x, backend, async_op=True)
            del x  # whoever allocates next on this stream would get it
            other = cupy.full(64, -1, np.float32)
            results.append(float(work.wait()[3]))
            assert float(other[0]) == -1
        return results

    outcomes = run_ranks(body, 2)
    assert [o.result for o in outcomes] == [[2.0 * n for n in range(6)]] * 2, outcomes


def test_arrays_of_a_broken_job_live_until_the_gpu_has_done_with_them(machine: Machine) -> None:
    """NCCL is aborted, but what is before it on the stream has not ended; once it has, they go."""
    ended = threading.Barrier(2)

    def body(backend: Any) -> tuple[bool, bool]:
        settled(backend)
        background = backend.device.stream
        machine.freeze(background)
        x = ones(backend)
        kept = weakref.ref(x)
        fc.all_reduce(x, backend, async_op=True)
        del x
        ended.wait(SOON)
        if backend.rank == 0:
            backend.abort("enough")
        with pytest.raises(fc.CommunicationError):
            until_broken(backend)
        assert backend.communicators.join(SOON)
        time.sleep(0.1)  # the supervisor has looked again and again
        gc.collect()
        before = kept() is not None
        machine.thaw(background)
        end = time.monotonic() + SOON
        while kept() is not None and time.monotonic() < end:
            time.sleep(0.005)
        return before, kept() is None

    outcomes = run_ranks(body, 2)
    assert [outcome.result for outcome in outcomes] == [(True, True)] * 2, outcomes


def test_work_that_has_ended_stays_so(machine: Machine) -> None:
    """Its event is its own for good; those of blocking calls are used again."""

    def body(backend: Any) -> bool:
        x = settled(backend)
        work = fc.all_reduce(x, backend, async_op=True)
        work.wait()
        backend.device.synchronize()
        assert backend.supervisor.finish(SOON)
        with machine.frozen(None):  # what is enqueued from now on does not end
            for _ in range(8):
                fc.all_reduce(x, backend, op="mean", out=x)
            return bool(work.done())

    outcomes = run_ranks(body, 2)
    assert [outcome.result for outcome in outcomes] == [True, True], outcomes


# Starting.


def expect_one_gpu_too_few(outcomes: list[Outcome], *words: str) -> None:
    """Check that all say so; a rank finds it out itself if it does not hear of it first."""
    assert "RendezvousError" in {outcome.error for outcome in outcomes}, outcomes
    for word in ("every rank needs a GPU of its own", *words):
        assert all(word in outcome.text for outcome in outcomes), outcomes


def test_two_ranks_on_one_gpu(machine: Machine) -> None:
    machine.faults.same_gpu(0, 2)
    outcomes = run_ranks(lambda backend: None, 3)
    expect_one_gpu_too_few(outcomes, "ranks 0, 2", "GPU-", "share_gpu=true")
    assert not machine.calls("nccl.init")


def test_gpus_are_told_apart_by_what_is_known_of_them(machine: Machine) -> None:
    """CuPy cuts off a UUID at its first zero byte: then the host and the bus tell, too."""
    from fsdpcore.transports.nccl.gpus import Gpu

    full, other, cut = bytes(range(1, 17)), bytes(range(2, 18)), b"\1"
    found = [
        Gpu.unpack(Gpu(uuid, bus).pack()).place(host)
        for uuid, bus, host in [
            (full, "0000:01:00.0", 0),
            (full, "0000:02:00.0", 1),  # as another container sees it
            (other, "0000:01:00.0", 0),
            (cut, "0000:01:00.0", 0),
            (cut, "0000:01:00.0", 1),
            (cut, "0000:02:00.0", 0),
        ]
    ]
    assert found[0] == found[1]
    assert len(set(found)) == 5


def test_ranks_that_may_share_a_gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    machine.faults.same_gpu(0, 1)
    machine.faults.shared_gpu = True
    outcomes = run_ranks(lambda backend: float(settled(backend)[0]), 2, share_gpu=True)
    assert [outcome.result for outcome in outcomes] == [1.0, 1.0], outcomes


def test_fewer_gpus_than_ranks(machine: Machine) -> None:
    machine.faults.devices = 2
    outcomes = run_ranks(lambda backend: None, 3)
    expect(outcomes, "PeerFailedError", "PeerFailedError", "ConfigError", words=("2 GPUs",))


def test_ranks_find_their_number_on_a_host_where_no_launcher_says_it(machine: Machine) -> None:
    from fsdpcore.transports.nccl.backend import NcclBackend

    machine.faults.shared_gpu = True

    def join(here: RankPlace) -> NcclBackend:
        options = config(host_id="abbaa"[here.rank], share_gpu=True)
        joined = NcclBackend.join(replace(here, local_known=False), options)
        assert isinstance(joined, NcclBackend)
        return joined

    outcomes = run_joined(join, lambda backend: backend.device.ordinal, 5)
    assert [outcome.result for outcome in outcomes] == [0, 0, 1, 1, 2], outcomes


def test_one_gpu_in_sight_of_each_rank(machine: Machine) -> None:
    """As launchers have it that hide the GPUs of others."""
    machine.faults.devices = 1
    expect_one_gpu_too_few(run_ranks(lambda backend: backend.device.name, 2))


def test_no_driver(machine: Machine) -> None:
    machine.faults.driver = False
    outcomes = run_ranks(lambda backend: None, 2)
    assert "MissingDependencyError" in {outcome.error for outcome in outcomes}
    assert all("driver" in outcome.text for outcome in outcomes), outcomes


def test_a_communicator_that_is_never_ready(machine: Machine) -> None:
    machine.faults.hang_init(rank=1)
    outcomes = run_ranks(lambda backend: None, 2, rendezvous_timeout=1.0)
    assert "RendezvousError" in {outcome.error for outcome in outcomes}, outcomes
    assert all("NCCL" in outcome.text for outcome in outcomes), outcomes
    machine.faults.release()
    wait_for_end(machine)


def test_a_communicator_that_is_refused(machine: Machine) -> None:
    machine.faults.refuse_init(status=2)
    outcomes = run_ranks(lambda backend: None, 2)
    assert {outcome.error for outcome in outcomes} <= {"CommunicationError", "PeerFailedError"}
    assert all("SYSTEM_ERROR" in outcome.text for outcome in outcomes), outcomes


# Threads.


def test_a_thread_with_another_current_gpu_is_told(machine: Machine) -> None:
    def body(backend: Any) -> list[str]:
        x, found = settled(backend), list[str]()

        def call() -> None:  # threads begin with the first GPU
            try:
                fc.all_reduce(x, backend, op="mean")
            except fc.StateError as error:
                found.append(str(error))

        if backend.rank == 1:
            in_threads(call)
        return found

    outcomes = run_ranks(body, 2)
    assert outcomes[0].result == []
    assert "cupy.cuda.Device(1).use()" in outcomes[1].result[0]
    assert len(machine.calls("nccl.allReduce", rank=1)) == 2


def in_threads(*calls: Callable[[], None]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)


def test_groups_are_used_from_several_threads(machine: Machine) -> None:
    def body(backend: Any) -> list[float]:
        import cupy

        groups = [backend.sub(range(backend.world_size)) for _ in range(3)]
        results = [0.0] * len(groups)

        def use(number: int) -> None:
            cupy.cuda.Device(backend.rank).use()
            with cupy.cuda.Stream(non_blocking=True):
                x = cupy.full(10, number + 1, np.float32)
                for _ in range(5):
                    x = fc.all_reduce(x, groups[number])
                results[number] = float(x[0])

        for number in range(3):  # in turn: NCCL wants the same order on all ranks
            in_threads(lambda n=number: use(n))
        return results

    outcomes = run_ranks(body, 2)
    assert [o.result for o in outcomes] == [[32.0, 64.0, 96.0]] * 2, outcomes
