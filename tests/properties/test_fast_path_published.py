"""Calls with the same published arrays again and again: the fast path and the ordinary way.

Each program runs among processes that share memory. What it returns is compared with NumPy; small
integers, so that every order of summation gives the same numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.spmd import run

import fsdpcore as fc
from fsdpcore.comm.backend import Backend

SIZES = (2, 3, 4)
ROWS = 12 * 1024  # divides by 2, 3 and 4; 48 KiB of float32


def _input(backend: Backend, turn: int, rank: int | None = None) -> np.ndarray[Any, Any]:
    rank = backend.rank if rank is None else rank
    return (np.arange(ROWS, dtype=np.float32) % 7 + 1) * (rank + 1) + turn


def _sum(backend: Backend, turn: int) -> np.ndarray[Any, Any]:
    total: np.ndarray[Any, Any] = sum(
        (_input(backend, turn, rank) for rank in range(backend.world_size)), np.zeros(ROWS)
    )
    return total


def _published(backend: Backend, size: int = ROWS) -> np.ndarray[Any, Any]:
    return backend.empty((size,), np.float32)


def _ways(backend: Backend) -> None:
    """Every rank takes another way in every turn: fast, with a deadline, asynchronous, private."""
    source, out = _published(backend), _published(backend)
    plain = np.empty(ROWS, np.float32)
    for turn in range(24):
        way = (turn + turn // 5 * backend.rank) % 5
        given = plain if way == 3 else source
        taken = plain if way == 4 else out
        given[:] = _input(backend, turn)
        if way == 1:
            fc.all_reduce(given, backend, out=taken, timeout=30.0)
        elif way == 2:
            fc.all_reduce(given, backend, out=taken, async_op=True).wait()
        else:
            fc.all_reduce(given, backend, out=taken)
        np.testing.assert_array_equal(taken, _sum(backend, turn))


def _operations(backend: Backend) -> None:
    """The four operations, in turn, out of place and in place, with means among the sums."""
    p, me = backend.world_size, backend.rank
    part = ROWS // p
    source, out, own, whole = (_published(backend, n) for n in (ROWS, ROWS, part, p * ROWS))
    for turn in range(6):
        source[:] = _input(backend, turn)
        fc.all_reduce(source, backend, out=out, op="mean")
        np.testing.assert_allclose(out, _sum(backend, turn) / p, rtol=1e-6)
        fc.reduce_scatter(source, backend, out=own)
        np.testing.assert_array_equal(own, _sum(backend, turn)[me * part : (me + 1) * part])
        every = np.concatenate([_input(backend, turn, rank) for rank in range(p)])
        fc.all_gather(source, backend, out=whole)
        np.testing.assert_array_equal(whole, every)
        whole[:] = -1
        whole[me * ROWS : (me + 1) * ROWS] = source
        fc.all_gather(whole[me * ROWS : (me + 1) * ROWS], backend, out=whole)
        np.testing.assert_array_equal(whole, every)
        fc.broadcast(source, backend, root=turn % p, out=out)
        np.testing.assert_array_equal(out, _input(backend, turn, turn % p))
        fc.all_reduce(source, backend, out=source)
        np.testing.assert_array_equal(source, _sum(backend, turn))


def _new_arrays(backend: Backend) -> None:
    """Arrays that come and go, so that memory is used again by others, and overlapping ones."""
    room = _published(backend, ROWS + 64)
    for turn in range(40):
        source = _published(backend, ROWS + turn % 3 * 1024)[turn % 3 * 1024 :]
        source[:] = _input(backend, turn)
        np.testing.assert_array_equal(fc.all_reduce(source, backend), _sum(backend, turn))
        room[:ROWS] = source
        fc.all_reduce(room[:ROWS], backend, out=room[64:])
        np.testing.assert_array_equal(room[64:], _sum(backend, turn))


def _disagree(backend: Backend) -> str:
    """After some calls that agree, rank 0 calls something else."""
    source, out = _published(backend), _published(backend)
    source[:] = 1
    for _ in range(3):
        fc.all_reduce(source, backend, out=out)
    op = "max" if backend.rank == 0 else "sum"
    try:
        fc.all_reduce(source, backend, out=out, op=op)
    except fc.MismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("program", [_ways, _operations, _new_arrays])
@pytest.mark.parametrize("size", SIZES)
def test_results_are_right_whatever_way_each_rank_takes(program: Any, size: int) -> None:
    run(program, transport="zmq", world_size=size, shm="on")


def test_ranks_that_disagree_are_told() -> None:
    told = run(_disagree, transport="zmq", world_size=2, shm="on")
    assert all("max" in words and "sum" in words for words in told)
