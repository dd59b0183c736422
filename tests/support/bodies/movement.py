"""Bodies: the collectives that move arrays without changing them, also ragged ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from support import oracle
from support.arrays import Array, array_of, arrays_of, check_same
from support.bodies.reductions import CANONICAL, expect_refusal

import fsdpcore as fc

ALGORITHMS = {
    "all_gather": ["auto", "star", "direct", "doubling", "bruck", "hierarchical", "ring"],
    "broadcast": ["auto", "star", "tree", "scatter_gather", "direct", "hierarchical"],
    "gather": ["auto", "star", "tree"],
    "scatter": ["auto", "star", "tree"],
    "all_to_all": ["auto", "direct", "bruck"],
}


def check_movements(backend: fc.Backend, parts: Sequence[Array], root: int = 0) -> None:
    """Do every movement with every algorithm, and compare with the oracle."""
    me, p = backend.rank, backend.world_size
    mine = parts[me].copy()
    for name in ALGORITHMS["all_gather"]:
        result = fc.all_gather(mine, backend, algorithm=name)
        check_same(result, oracle.joined(parts), f"all_gather, {name}, {mine.shape}")
    for name in ALGORITHMS["gather"]:
        result = fc.gather(mine, backend, root=root, algorithm=name)
        _check_at_root(me == root, result, oracle.joined(parts), f"gather, {name}, {mine.shape}")
    for name in ALGORITHMS["broadcast"]:
        result = fc.broadcast(mine, backend, root=root, algorithm=name)
        check_same(result, parts[root], f"broadcast from {root}, {name}, {mine.shape}")
    if mine.ndim:
        own = oracle.pieces(parts[root], p)[me]
        for name in ALGORITHMS["scatter"]:
            source = mine if me == root else None
            result = fc.scatter(source, backend, root=root, algorithm=name)
            check_same(result, own, f"scatter from {root}, {name}, {mine.shape}")
        arriving = oracle.joined([oracle.pieces(part, p)[me] for part in parts])
        for name in ALGORITHMS["all_to_all"]:
            result = fc.all_to_all(mine, backend, algorithm=name)
            check_same(result, arriving, f"all_to_all, {name}, {mine.shape}")
    check_same(mine, parts[me], "the input")


def _check_at_root(is_root: bool, result: Any, expected: Array, what: str) -> None:
    if is_root:
        check_same(result, expected, what)
    else:
        assert result is None, f"{what}: returned something on a rank that is not the root"


def every_dtype(backend: fc.Backend) -> None:
    """All dtypes travel."""
    p = backend.world_size
    for number, dtype in enumerate(oracle.DTYPES):
        check_movements(backend, arrays_of(p, (p + number % 3, 2), dtype), root=number % p)


def every_shape(backend: fc.Backend) -> None:
    """0-d, empty, single, odd and uneven arrays."""
    p = backend.world_size
    shapes: list[tuple[int, ...]] = [(), (0,), (1,), (p - 1,), (p,), (2 * p + 1, 2)]
    shapes += [(0, 3), (3, 0), (2, 3, 5)]
    for number, shape in enumerate(shapes):
        check_movements(backend, arrays_of(p, shape), root=number % p)


def large_arrays(backend: fc.Backend, elements: int) -> None:
    """Arrays that no buffer or segment of any transport holds at once."""
    p = backend.world_size
    check_movements(backend, arrays_of(p, (elements + 1,)), root=p - 1)


def barriers(backend: fc.Backend) -> None:
    """Both spellings, many times."""
    for _ in range(20):
        backend.barrier()
        fc.barrier(backend)


def python_values(backend: fc.Backend) -> None:
    """Lists and numbers are arrays, too."""
    p = backend.world_size
    check_same(fc.all_reduce([1.0, 2.0], backend), np.array([1.0, 2.0]) * p, "a list")
    check_same(np.asarray(fc.all_reduce(2.5, backend)), np.array(2.5 * p), "a number")
    check_same(fc.all_gather(True, backend), np.ones(p, bool), "a truth value")


# Ragged.


def _rows_of(size: int, salt: int) -> list[int]:
    """Rows of every rank: zero among them."""
    return [(3 * rank + salt) % 4 for rank in range(size)]


def ragged_gather(backend: fc.Backend) -> None:
    """all_gather_v with every algorithm, and with ranks that have nothing."""
    me, p = backend.rank, backend.world_size
    for salt in range(4):
        for dtype in (np.float32, oracle.HALVES[1], np.bool_):
            sizes = _rows_of(p, salt)
            parts = [array_of(rank, (rows, 3), dtype) for rank, rows in enumerate(sizes)]
            for name in ALGORITHMS["all_gather"]:
                for known in (None, sizes):
                    result = fc.all_gather_v(parts[me], backend, counts=known, algorithm=name)
                    check_same(result, oracle.joined(parts), f"all_gather_v, {name}, {sizes}")
    nothing = fc.all_gather_v(np.empty((0, 2)), backend)
    assert nothing.shape == (0, 2)
    room = np.empty((p * (p + 1) // 2,), np.int16)
    result = fc.all_gather_v(np.full(me + 1, me, np.int16), backend, out=room)
    assert result is room
    check_same(room, np.repeat(np.arange(p), range(1, p + 1)).astype(np.int16), "into out")
    expect_refusal(fc.all_gather_v, np.zeros(3), backend, counts=[2] * p)


def ragged_rooted(backend: fc.Backend) -> None:
    """gather_v and scatter_v with every root and algorithm, and with ranks that have nothing."""
    me, p = backend.rank, backend.world_size
    for root in range(p):
        sizes = _rows_of(p, root)
        parts = [array_of(rank, (rows, 2), oracle.HALVES[0]) for rank, rows in enumerate(sizes)]
        whole = oracle.joined(parts)
        for name in ALGORITHMS["gather"]:
            result = fc.gather_v(parts[me], backend, root=root, algorithm=name)
            _check_at_root(me == root, result, whole, f"gather_v, {name}, {sizes}")
        for name in ALGORITHMS["scatter"]:
            array, counts = (whole, sizes) if me == root else (None, None)
            result = fc.scatter_v(array, backend, counts, root=root, algorithm=name)
            check_same(result, parts[me], f"scatter_v, {name}, {sizes}")
    expect_refusal(fc.scatter_v, np.zeros(3), backend, root=me)
    expect_refusal(fc.scatter_v, np.zeros(p + 1), backend, [1] * p, root=me)
    expect_refusal(fc.gather_v, np.float32(1), backend)


def ragged_reduction(backend: fc.Backend) -> None:
    """reduce_scatter_v with every algorithm, and with ranks that get nothing."""
    me, p = backend.rank, backend.world_size
    for salt in range(4):
        counts = _rows_of(p, salt)
        ends = np.cumsum([0, *counts])
        for dtype, op in ((np.float32, "sum"), (np.float16, "mean"), (np.int8, "prod")):
            parts = arrays_of(p, (sum(counts), 2), dtype)
            own = oracle.reduced(parts, op)[ends[me] : ends[me + 1]]
            for name in CANONICAL["reduce_scatter"]:
                result = fc.reduce_scatter_v(parts[me], backend, counts, op=op, algorithm=name)
                check_same(result, own, f"reduce_scatter_v, {name}, {counts}")


def ragged_exchange(backend: fc.Backend) -> None:
    """all_to_all_v, with and without the counts that are expected."""
    me, p = backend.rank, backend.world_size
    for salt in range(3):
        counts = [[(s * s + 2 * r + salt) % 4 for r in range(p)] for s in range(p)]
        sources = [array_of(rank, (sum(counts[rank]), 2)) for rank in range(p)]
        arriving = oracle.exchanged(sources, counts, me)
        incoming = [counts[rank][me] for rank in range(p)]
        result = fc.all_to_all_v(sources[me], backend, counts[me])
        check_same(result, arriving, f"all_to_all_v {counts}")
        room = np.empty_like(arriving)
        result = fc.all_to_all_v(
            sources[me], backend, counts[me], recv_counts=incoming, out=room, algorithm="direct"
        )
        assert result is room
        check_same(room, arriving, f"all_to_all_v with recv_counts {counts}")
    nothing = fc.all_to_all_v(np.empty((0, 2), np.int32), backend, [0] * p)
    check_same(nothing, np.empty((0, 2), np.int32), "all_to_all_v of nothing")


def ragged_refusals(backend: fc.Backend) -> None:
    """Counts that cannot be are refused before anything is sent."""
    p, rows = backend.world_size, np.ones((backend.world_size, 2))
    for counts in ([1] * (p + 1), [2] * p, [*[1] * (p - 1), -1], ["one"] * p, [0.5] * p):
        expect_refusal(fc.reduce_scatter_v, rows, backend, counts)
        expect_refusal(fc.all_to_all_v, rows, backend, counts)
    expect_refusal(fc.all_to_all_v, rows, backend, [1] * p, recv_counts=[1] * (p + 1))
    expect_refusal(fc.all_to_all_v, rows, backend, [1] * p, algorithm="star")
    for function in (fc.all_gather_v, fc.all_to_all, fc.reduce_scatter):
        expect_refusal(function, np.float64(1), backend)
    expect_refusal(fc.all_gather_v, rows, backend, out=np.ones(3))
    expect_refusal(fc.all_gather_v, rows, backend, out=np.ones((p, 2), np.float32))
    if backend.rank == 0:
        expect_refusal(fc.scatter, None, backend, root=0)
        expect_refusal(fc.scatter, np.float64(1), backend, root=0)
    backend.barrier()
