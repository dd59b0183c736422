"""What ``scan`` must do: programs for every rank."""

from __future__ import annotations

import numpy as np
import pytest
from support import oracle
from support.arrays import arrays_of, check_same

import fsdpcore as fc


def combinations(backend: fc.Backend) -> None:
    """Every dtype and op: the bits of an all_reduce of the ranks up to each one."""
    me = backend.rank
    for dtype, op in oracle.COMBINATIONS:
        parts = arrays_of(backend.world_size, (7, 3), dtype)
        expected = oracle.reduced(parts[: me + 1], op)
        check_same(fc.scan(parts[me], backend, op=op), expected, f"scan {op} of {dtype}")


def shapes(backend: fc.Backend) -> None:
    """Any shape and layout, in short and long arrays; twice, for what is remembered."""
    me = backend.rank
    for shape in ((), (0,), (1,), (3, 0, 2), (5, 4), (40_000,), (300, 301)):
        for _ in range(2):
            parts = arrays_of(backend.world_size, shape, np.float32)
            expected = oracle.reduced(parts[: me + 1], "sum")
            check_same(fc.scan(parts[me], backend), expected, f"shape {shape}")
    parts = arrays_of(backend.world_size, (6, 8), np.int32)
    found = fc.scan(parts[me].T[::2], backend, op="max")
    check_same(found, oracle.reduced([part.T[::2] for part in parts[: me + 1]], "max"), "strides")


def where_results_go(backend: fc.Backend) -> None:
    """``out`` may be the input, overlap it, or have gaps; works give the result."""
    me = backend.rank
    parts = arrays_of(backend.world_size, (50,), np.float64)
    expected = oracle.reduced(parts[: me + 1], "sum")
    mine = parts[me].copy()
    assert fc.scan(mine, backend, out=mine) is mine
    check_same(mine, expected, "in place")
    room = np.zeros(60)
    room[:50] = parts[me]
    fc.scan(room[:50], backend, out=room[10:])
    check_same(room[10:], expected, "overlapping")
    gaps = np.zeros((50, 2))
    fc.scan(parts[me], backend, out=gaps[:, 1])
    check_same(gaps[:, 1].copy(), expected, "with gaps")
    work = fc.scan(parts[me], backend, algorithm="doubling", async_op=True, label="later")
    check_same(work.wait(), expected, "later")
    with pytest.raises(fc.ArgumentError, match="no algorithm 'ring'"):
        fc.scan(parts[me], backend, algorithm="ring")


def _latest(left: np.ndarray, right: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    return np.where(right != 0, right, left)


def own_reductions(backend: fc.Backend) -> None:
    """A function that does not commute gets the ranks in order."""
    p, me = backend.world_size, backend.rank
    op = fc.ReduceOp.create("latest", _latest)
    mine = np.where(np.arange(3 * p) % p == me, me + 1, 0)
    expected = np.zeros_like(mine)
    for rank in range(me + 1):
        expected = _latest(expected, np.where(np.arange(3 * p) % p == rank, rank + 1, 0))
    check_same(fc.scan(mine, backend, op=op), expected, "latest")


def exclusive(backend: fc.Backend) -> None:
    """Every dtype and op: the bits of an all_reduce of the ranks before each one."""
    me = backend.rank
    for dtype, op in oracle.COMBINATIONS:
        parts = arrays_of(backend.world_size, (7, 3), dtype)
        if op == "mean":
            with pytest.raises(fc.ArgumentError, match="mean of nothing"):
                fc.exscan(parts[me], backend, op=op)
            continue
        found = fc.exscan(parts[me], backend, op=op)
        if me:
            check_same(found, oracle.reduced(parts[:me], op), f"exscan {op} of {dtype}")
            continue
        # What rank 0 gets changes nothing that it is combined with.
        if dtype not in oracle.COMPLEXES:  # an infinite one times 1 is none
            np.testing.assert_array_equal(oracle.reduced([found, parts[0]], op), parts[0])


def exclusive_of_nothing(backend: fc.Backend) -> None:
    """Rank 0's result, in place, and where none is known."""
    one = np.ones(4, np.int16)
    for op, value in (("sum", 0), ("prod", 1), ("min", 2**15 - 1), ("max", -(2**15))):
        mine = one.copy()
        fc.exscan(mine, backend, op=op, out=mine)
        if backend.rank == 0:
            assert mine.tolist() == [value] * 4
    assert fc.exscan(len("seven"), backend) == 5 * backend.rank
    with pytest.raises(fc.ArgumentError, match="latest of nothing"):
        fc.exscan(one, backend, op=fc.ReduceOp.create("latest", _latest))


def mismatched(backend: fc.Backend) -> None:
    """Ranks that call another reduction are told so."""
    op = "max" if backend.rank else "min"
    with pytest.raises(fc.MismatchError, match="scan"):
        fc.scan(np.zeros(3), backend, op=op)
