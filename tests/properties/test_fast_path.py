"""The fast path of blocking calls: what it must look at, however often a call comes again."""

from __future__ import annotations

import numpy as np
import pytest
from support.spmd import run

import fsdpcore as fc
from fsdpcore.collectives.state import state_of
from fsdpcore.comm.backend import Backend

ROWS = 16 * 1024  # 64 KiB of float32: more than is staged as a whole


def _all_go_fast(backend: Backend) -> bool:
    found = [call for call in state_of(backend).calls.values() if call.collective]
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
