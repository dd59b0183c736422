"""Units in a window of the host: no rank reads what is being written, whatever the ranks' pace."""

from __future__ import annotations

import logging
import threading
import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.fsdp_programs import Player, down, engine_of, everything, play, trained
from support.spmd import RanksFailed, run, run_on
from support.windows import RefusedWindow, WithoutWindow, WithWindow

import fsdpcore as fc
from fsdpcore.fsdp.units.storages import SharedWindowStorage

KINDS = [WithWindow, WithoutWindow]
PROCESSES = [("sim", {}), ("zmq", {}), ("zmq", {"shm": "off"}), ("mpi", {})]
# What waits for something that must not happen waits this long in vain; what waits for something
# that must happen is given all the time in the world.
IN_VAIN, FOR_SURE = 0.2, 60.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("seed", range(2))
def test_what_a_rank_reads_is_never_being_written(kind, world_size, seed):
    windowed = run_on(kind, play, world_size=world_size, args=(seed,), max_delay=5e-4, seed=seed)
    assert windowed == [kind is WithWindow] * world_size


@pytest.mark.parametrize(("transport", "options"), PROCESSES)
@pytest.mark.parametrize("world_size", [3])
def test_nor_on_any_transport(transport, options, world_size):
    """By its own means, whatever they are."""
    windowed = run(play, transport=transport, world_size=world_size, args=(world_size,), **options)
    assert len(set(windowed)) == 1


# The two hazards, one at a time. The rank that might do harm waits for the other in vain, unless
# the protocol is taken away: then it is seen to do harm.


def by_hand(unit, _):
    with unit.writing() as shard:
        shard[:] = 1


def by_update(unit, _):
    unit.update(step=1, lr=None, grad_scale=1.0)


def by_step(_, step):
    step.update()


def go_through(engine, step):
    for unit in engine.units:
        with step.forward(unit):
            pass
    for unit in reversed(engine.units):
        with step.backward(unit) as (params, grads):
            grads.update({name: np.full_like(array, -1) for name, array in params.items()})


def reads_while_a_peer_changes(backend, change, patience, changed):
    """Rank 1 goes on reading, while rank 0 would like to change the unit."""
    engine = engine_of(backend, 2)
    unit = engine.units[0]
    with engine.step() as step:
        go_through(engine, step)
        unit.unshard()
        unit.reduce_gradients({})  # adds zeros, and is no sign that the ranks have stopped reading
        passed, seen = None, None
        if backend.rank == 1:
            passed = changed.wait(patience)
            seen = everything(unit).copy()
        unit.reshard()
        change(unit, step)
        changed.set()
        if change is not by_step:
            step.update()
    return passed, seen


def reads_alone(backend, change, patience, changed):
    """Rank 1 reads what rank 0 does not, after a reduction; then both write by hand."""
    engine, passed, seen = engine_of(backend, 2), None, None
    unit = engine.units[0]
    with engine.step() as step:
        go_through(engine, step)
        if backend.rank == 1:
            unit.unshard()
            passed = changed.wait(patience)
            seen = everything(unit).copy()
            unit.reshard()
        change(unit, step)
        changed.set()
        step.update()
    return passed, seen


def alone(unit, other):
    return unit.writing()


@contextmanager
def while_others_meet(unit, other):
    with unit.writing() as shard:
        other.unshard()
        other.reshard()
        yield shard


@contextmanager
def before_others_meet_in_the_background(unit, other):
    with unit.writing() as shard:
        yield shard
    other.unshard(async_op=True)


def reads_before_a_peer_has_written(backend, writing, patience, read):
    """Rank 1 would like to read what rank 0 is about to write."""
    unit, other, *_ = engine_of(backend).units
    passed = None
    with writing(unit, other) as shard:
        if backend.rank == 0:
            passed = read.wait(patience)
        shard[:] = 1
    unit.unshard()
    seen = everything(unit).copy()
    read.set()
    return passed, seen


CHANGES = [by_hand, by_update, by_step]


@pytest.mark.parametrize("change", CHANGES)
def test_nobody_writes_while_another_rank_reads(change):
    args = (change, IN_VAIN, threading.Event())
    _, (passed, seen) = run_on(WithWindow, reads_while_a_peer_changes, world_size=2, args=args)
    assert not passed
    assert_array_equal(seen, 0)


@pytest.mark.parametrize("change", [by_hand, by_update])
def test_nor_while_one_reads_that_should_not(change):
    args = (change, IN_VAIN, threading.Event())
    _, (passed, seen) = run_on(WithWindow, reads_alone, world_size=2, args=args)
    assert not passed
    assert_array_equal(seen, 0)


@pytest.mark.parametrize("change", [by_hand, by_update])  # a step agrees on its update, besides
def test_without_the_claim_a_reader_would_see_the_change(monkeypatch, change):
    monkeypatch.setattr(SharedWindowStorage, "claim", lambda self, *, agreed: None)
    args = (change, FOR_SURE, threading.Event())
    _, (passed, seen) = run_on(WithWindow, reads_while_a_peer_changes, world_size=2, args=args)
    assert passed
    assert seen[: seen.size // 2].any()


@pytest.mark.parametrize(
    "writing", [alone, while_others_meet, before_others_meet_in_the_background]
)
def test_nobody_reads_before_all_have_written(writing):
    args = (writing, IN_VAIN, threading.Event())
    (passed, ours), (_, theirs) = run_on(
        WithWindow, reads_before_a_peer_has_written, world_size=2, args=args
    )
    assert not passed
    assert_array_equal(ours, 1)
    assert_array_equal(theirs, 1)


def test_without_a_collective_in_unshard_a_reader_would_come_too_early(monkeypatch):
    monkeypatch.setattr(SharedWindowStorage, "gather", lambda self, what, *, async_op: None)
    args = (alone, FOR_SURE, threading.Event())
    (passed, _), (_, theirs) = run_on(
        WithWindow, reads_before_a_peer_has_written, world_size=2, args=args
    )
    assert passed
    assert not theirs.all()


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_must_agree_on_whether_reading_ends_before_the_reduction(kind):
    def body(backend):
        unit = engine_of(backend).units[0]
        unit.unshard()
        grads = down(unit)
        if backend.rank:
            unit.reshard()
        unit.reduce_gradients(grads)

    with pytest.raises(RanksFailed, match="for gradients of unit u0, before reshard") as caught:
        run_on(kind, body, world_size=2)
    assert "MismatchError" in str(caught.value)


def test_a_training_step_needs_no_claim(monkeypatch):
    """The reduction of the gradients tells the ranks that nobody reads any more."""
    claims = []

    def claim(self, *, agreed):
        claims.append(self.exposed or not agreed)

    monkeypatch.setattr(SharedWindowStorage, "claim", claim)

    def body(backend):
        player = Player(backend, 0)
        player.train(None)
        player.train(None)

    run_on(WithWindow, body, world_size=2)
    assert claims == [False] * 2 * 2 * 3  # ranks, steps, units


def test_the_ranks_meet_once_in_a_step_for_all_units(monkeypatch):
    met = []

    def meet(ranks, *, label, async_op=False):
        met.append(label)
        return fc.barrier(ranks, label=label, async_op=async_op)

    monkeypatch.setattr("fsdpcore.fsdp.units.window.barrier", meet)

    def body(backend):
        player = Player(backend, 0)
        player.train(None)
        player.train(None)

    run_on(WithWindow, body, world_size=2)
    assert met == ["forward of unit u0"] * 2 * 2  # ranks, steps


# What a window changes, and what it does not.


@pytest.mark.parametrize(
    ("world_size", "clip", "dtype"),
    [(1, 0.5, np.float32), (2, None, np.float64), (3, 0.5, np.float64), (5, None, np.float32)],
)
def test_training_gives_the_same_bits_with_and_without(world_size, clip, dtype):
    results = [run_on(k, trained, world_size=world_size, args=(clip, dtype)) for k in KINDS]
    with_window, without = results
    assert [result[2] for result in with_window] == [True] * world_size
    assert [result[2] for result in without] == [world_size == 1] * world_size
    for ours, theirs in zip(with_window, without, strict=True):
        assert ours[:2] == theirs[:2]


@pytest.mark.parametrize(("transport", "options"), PROCESSES)
def test_training_gives_the_same_bits_on_every_transport(transport, options):
    args = (0.5, np.float32)
    expected = run_on(WithoutWindow, trained, world_size=3, args=args)[0]
    for ours in run(
        trained, transport=transport, world_size=3, args=args, deterministic=True, **options
    ):
        assert ours[:2] == expected[:2]


def test_ranks_that_cannot_share_memory_go_without(caplog):
    caplog.set_level(logging.INFO, "fsdpcore")

    def body(backend):
        player = Player(backend, 0)
        player.train(None)
        player.read(player.engine.units[0])
        return player.engine.windowed

    assert run_on(RefusedWindow, body, world_size=3) == [False] * 3
    told = [r.getMessage() for r in caplog.records if "parameters are gathered" in r.getMessage()]
    assert [text.split(": ")[-1] for text in told] == ["these ranks cannot share memory"]
    assert run_on(WithWindow, body, world_size=3, hosts=2) == [False] * 3
    assert run_on(WithWindow, body, world_size=3) == [True] * 3


def test_a_window_holds_the_parameters_once():
    sizes = ({"w": (4000, 1000)}, {"b": (33,)})

    def body(backend):
        engine = engine_of(backend, 2, sizes)
        for unit in engine.units:
            unit.unshard()
        held = engine.held()
        assert held.buffers == held.spare == 0
        assert held.window == backend.window_bytes
        fc.barrier(backend)
        traced = tracemalloc.get_traced_memory()[0]
        fc.barrier(backend)
        return held.parameters, held.window, traced, engine.units[0].params["w"].ctypes.data

    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        results = run_on(WithWindow, body, world_size=4)
    finally:
        tracemalloc.stop()
    total = 4 * (4_000_000 + 36)  # the second unit has three elements of padding
    assert sum(parameters for parameters, *_ in results) == total
    assert {window for _, window, *_ in results} == {total + 48}  # the next multiple of 64
    assert len({address for *_, address in results}) == 1
    assert max(traced for _, _, traced, _ in results) - before < 1.5 * total


def test_views_are_read_only_for_good():
    def body(backend):
        unit = engine_of(backend).units[0]
        unit.unshard()
        for array in (unit.params["w"], unit.params["b"], unit.shard):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.flags.writeable = True
        unit.reshard()
        with unit.writing() as shard:
            assert shard.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            shard[...] = 1

    for kind in KINDS:
        run_on(kind, body, world_size=2)


@contextmanager
def in_forward(engine, step):
    with step.forward("u1"):
        yield


@contextmanager
def in_backward(engine, step):
    with step.forward("u1"):
        pass
    with step.backward("u1"):
        yield


@contextmanager
def in_writing(engine, step):
    with engine.units[1].writing():
        yield


@contextmanager
def fetching(engine, step):
    engine.units[2].unshard(async_op=True)
    yield


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [in_forward, in_backward, in_writing, fetching])
def test_a_rank_that_fails_leaves_nobody_waiting(kind, place):
    def body(backend):
        engine = engine_of(backend)
        with engine.step() as step:
            with step.forward("u0"):
                pass
            with place(engine, step):
                if backend.rank == 1:
                    raise ZeroDivisionError("in the middle")
            with step.backward("u0"):
                pass
            step.update()

    with pytest.raises(RanksFailed) as caught:
        run_on(kind, body, world_size=3)
    assert "failed on ranks [0, 1, 2] of 3" in str(caught.value)
    assert "rank 1: ZeroDivisionError" in str(caught.value)
    assert "Timeout" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_after_an_error_on_all_ranks_the_engine_goes_on(kind):
    def body(backend):
        player = Player(backend, 1)
        with pytest.raises(ZeroDivisionError), player.engine.step() as step:
            for unit in player.engine.units:
                with step.forward(unit):
                    pass
            with step.backward("u2") as (_, grads):
                grads["w"] = np.ones((5, 7), np.float32)
                raise ZeroDivisionError
        player.train(None)
        for unit in player.engine.units:
            player.read(unit)

    run_on(kind, body, world_size=3)
