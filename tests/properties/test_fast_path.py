"""The fast path of blocking calls: what it must look at, however often a call comes again."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from support.spmd import meet, run

import fsdpcore as fc
from fsdpcore.collectives.state import state_of
from fsdpcore.comm.backend import Backend

waits = pytest.mark.side_by_side(3)
ROWS = 16 * 1024  # 64 KiB of float32: more than is staged as a whole


def _all_go_fast(backend: Backend) -> bool:
    found = [spec for spec in state_of(backend).specs.values() if spec.collective]
    return bool(found) and all(call.fast_path is not None for call in found)


def _shapes_that_differ(backend: Backend) -> str:
    few, more = np.ones(4), np.ones(5)
    for _ in range(3):
        fc.all_reduce(few, backend)
        fc.all_reduce(more, backend)
    assert _all_go_fast(backend)
    try:
        fc.all_reduce(more if backend.rank == 0 else few, backend)
    except fc.MismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("transport", ["sim", "zmq"])
def test_small_calls_that_both_ranks_know_are_compared(transport: str) -> None:
    told = run(_shapes_that_differ, transport=transport, world_size=2)
    assert all("(5,)" in words and "(4,)" in words for words in told), told


def _two_outs(backend: Backend) -> None:
    source = backend.empty(ROWS)
    outs = [backend.empty(ROWS), backend.empty(ROWS)]
    for turn in range(12):
        source[:] = turn + backend.rank
        for out in outs:
            out[:] = -1
        backend.barrier()
        # Ranks change to the other one at different times.
        taken = (turn // (1 + backend.rank)) % 2
        fc.all_reduce(source, backend, out=outs[taken])
        assert (outs[taken] == 2 * turn + 1).all()
        assert (outs[1 - taken] == -1).all()
        backend.barrier()
    assert _all_go_fast(backend)


def test_the_same_input_with_one_out_and_another() -> None:
    run(_two_outs, transport="zmq", world_size=2, shm="on")


def _small_behind_large(backend: Backend) -> None:
    large, small = np.ones(1 << 20, np.float32), np.ones(2)
    fc.all_reduce(large, backend)
    for turn in range(20):
        fc.all_reduce(small, backend)
        work = fc.all_reduce(large, backend, async_op=True)
        result = fc.all_reduce(small + turn, backend)
        assert work.done()  # it was called first
        assert (result == 2 * (1 + turn)).all()
        assert (work.wait() == 2).all()
    assert _all_go_fast(backend)


@pytest.mark.parametrize("transport", ["sim", "zmq"])
def test_a_small_call_waits_for_an_asynchronous_one(transport: str) -> None:
    run(_small_behind_large, transport=transport, world_size=2)


def _slow_to_combine(backend: Backend) -> None:
    naps: list[float] = []

    def add(left: Any, right: Any) -> Any:
        if naps:
            time.sleep(naps.pop())
        return left + right

    op = fc.ReduceOp.create("slow_sum", add)
    source, out = backend.empty(ROWS), backend.empty(ROWS)
    source[:] = 1
    for _ in range(3):
        fc.all_reduce(source, backend, op=op, out=out)
    assert _all_go_fast(backend)
    time.sleep(1.2 * backend.timeout)
    if backend.rank == 0:
        time.sleep(0.2)  # it comes last: it has to wait for the end of the call alone
    else:
        naps.append(0.5)
    fc.all_reduce(source, backend, op=op, out=out)
    assert (out == 2).all()


@waits
def test_a_rank_that_waits_at_the_end_of_a_call_has_its_whole_deadline() -> None:
    run(_slow_to_combine, transport="zmq", world_size=2, shm="on", op_timeout=2)


def _closed(backend: Backend) -> None:
    pair = backend.sub([0, 1])
    for _ in range(3):
        fc.all_reduce(np.ones(3), pair)
    assert _all_go_fast(pair)
    pair.close()
    with pytest.raises(fc.ClosedError, match="closed this group"):
        fc.all_reduce(np.ones(3), pair)
    assert (fc.all_reduce(np.ones(3), backend) == 2).all()


@pytest.mark.parametrize("transport", ["sim", "zmq"])
def test_a_closed_group_is_noticed(transport: str) -> None:
    run(_closed, transport=transport, world_size=2)


def _threads_that_call_the_same(backend: Backend, options: dict[str, Any]) -> None:
    wrong: list[Any] = []

    def call() -> None:
        try:
            for _ in range(60):
                found = fc.all_reduce(np.ones(ROWS), backend, **options)
                if not (found == backend.world_size).all():
                    wrong.append(found)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]


@pytest.mark.parametrize("options", [{}, {"timeout": 60}], ids=["fast", "ordinary"])
@pytest.mark.parametrize("transport", ["sim", "zmq"])
def test_calls_of_several_threads_take_turns(transport: str, options: dict[str, Any]) -> None:
    run(_threads_that_call_the_same, transport=transport, world_size=2, args=(options,))


def _interrupted_before_it_runs(backend: Backend, options: dict[str, Any]) -> None:
    recorder, armed = backend.root.recorder, False
    record = recorder.begin

    def begin(*args: Any) -> Any:
        if armed:
            raise KeyboardInterrupt
        return record(*args)

    recorder.begin = begin  # type: ignore[method-assign]
    for _ in range(3):
        fc.all_reduce(np.ones(3), backend)
    assert _all_go_fast(backend)
    meet()  # or a rank that still waits in the third call would hear of the failure there
    armed = backend.rank == 1
    with pytest.raises(KeyboardInterrupt if armed else fc.PeerFailedError):
        fc.all_reduce(np.ones(3), backend, **options)
    # It is the first cause on both, before the rank that was interrupted has left.
    assert "all_reduce #4 was left on rank 1: KeyboardInterrupt" in str(backend.root.failure)


@pytest.mark.parametrize("options", [{}, {"timeout": 60}], ids=["fast", "ordinary"])
@pytest.mark.parametrize("transport", ["sim", "zmq"])
def test_a_call_that_has_a_number_and_never_runs(transport: str, options: dict[str, Any]) -> None:
    """Nobody but the order of the group knows yet that it has begun."""
    run(_interrupted_before_it_runs, transport=transport, world_size=2, args=(options,))


def _barriers(backend: Backend) -> None:
    for _ in range(2):
        backend.barrier()
    (spec,) = state_of(backend).specs.values()
    assert spec.fast_path is not None
    for late in range(backend.world_size):
        if backend.rank == late:
            time.sleep(0.02)
        came = time.monotonic()
        backend.barrier()
        left = time.monotonic()
        assert left >= fc.all_reduce(came, backend, op="max")
    if backend.rank:
        work = fc.barrier(backend, async_op=True)
        assert not work.done()  # rank 0 waits for the array
        backend.send(np.ones(1), 0)
        work.wait()
    else:
        for rank in range(1, backend.world_size):
            backend.recv(np.empty(1), rank)
        backend.barrier()
    time.sleep(1.2 * backend.timeout)
    if backend.rank == 0:
        time.sleep(0.2)  # the others have the whole deadline of this call
    backend.barrier()


@waits
@pytest.mark.parametrize("transport", ["sim", "zmq"])
def test_a_barrier_that_comes_again(transport: str) -> None:
    """Is left when all have come; it may be a work; and its deadline is its own."""
    run(_barriers, transport=transport, world_size=3, op_timeout=2)
