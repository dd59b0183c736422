"""Bodies: the collectives that combine arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from support import oracle
from support.arrays import Array, array_of, arrays_of, check_close, check_same

import fsdpcore as fc

# Every algorithm that must give the canonical bits.
CANONICAL = {
    "all_reduce": ["auto", "star", "direct", "doubling", "rabenseifner", "hierarchical"],
    "reduce_scatter": ["auto", "star", "direct", "doubling", "halving", "hierarchical"],
    "reduce": ["auto", "star", "tree"],
    "scan": ["auto", "doubling"],
    "exscan": ["auto", "doubling"],
}


def check_reductions(backend: fc.Backend, parts: Sequence[Array], op: str, root: int = 0) -> None:
    """Do all three reductions with all canonical algorithms, and compare with the oracle."""
    mine = parts[backend.rank].copy()
    total = oracle.reduced(parts, op)
    what = f"{op} of {mine.dtype} {mine.shape}"
    for algorithm in CANONICAL["all_reduce"]:
        result = fc.all_reduce(mine, backend, op=op, algorithm=algorithm)
        check_same(result, total, f"all_reduce, {algorithm}, {what}")
    for algorithm in CANONICAL["reduce"]:
        result = fc.reduce(mine, backend, op=op, root=root, algorithm=algorithm)
        if backend.rank == root:
            check_same(result, total, f"reduce to {root}, {algorithm}, {what}")
        else:
            assert result is None, f"reduce returned something on rank {backend.rank}"
    if mine.ndim:
        own = oracle.pieces(total, backend.world_size)[backend.rank]
        for algorithm in CANONICAL["reduce_scatter"]:
            result = fc.reduce_scatter(mine, backend, op=op, algorithm=algorithm)
            check_same(result, own, f"reduce_scatter, {algorithm}, {what}")
    check_same(mine, parts[backend.rank], f"the input of {what}")


def every_dtype_and_op(backend: fc.Backend, every: int = 1, first: int = 0) -> None:
    """All dtypes with all ops that they have; or every ``every``-th combination, from ``first``."""
    p = backend.world_size
    rows = [2 * p + 1, p, 1, 3 * p - 1]
    for number, (dtype, op) in enumerate(oracle.COMBINATIONS[first::every]):
        shape = (rows[number % len(rows)], 3)
        check_reductions(backend, arrays_of(p, shape, dtype), op, root=number % p)


def every_shape(backend: fc.Backend) -> None:
    """0-d, empty, single, odd and uneven arrays."""
    p = backend.world_size
    shapes: list[tuple[int, ...]] = [(), (0,), (1,), (p - 1,), (p,), (p + 1, 2), (0, 3), (3, 0)]
    shapes += [(2, 3, 5), (37,)]
    for number, shape in enumerate(shapes):
        check_reductions(backend, arrays_of(p, shape), "sum", root=(number + 1) % p)
    # A mean takes the same ways as a sum; of every kind of shape, one will do.
    for number, shape in enumerate([(), (p - 1,), (p + 1, 2), (0, 3), (2, 3, 5), (37,)]):
        check_reductions(backend, arrays_of(p, shape, np.float16), "mean", root=number % p)


def large_arrays(backend: fc.Backend, elements: int) -> None:
    """Arrays that no buffer, segment or block of any transport holds at once."""
    p = backend.world_size
    check_reductions(backend, arrays_of(p, (elements + 1,)), "sum", root=p - 1)
    check_reductions(backend, arrays_of(p, (elements - 1,), oracle.HALVES[1]), "mean")


def special_values(backend: fc.Backend) -> None:
    """NaN, infinities, zeros of both signs, overflow and wrap-around: right, and no warning.

    Where the body runs, warnings are errors.
    """
    p = backend.world_size
    floats = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 6e4, -6e4, 1e-7, 3e38])
    values = np.stack([np.roll(np.resize(floats, 41), 3 * rank) for rank in range(p)])
    for dtype in oracle.FLOATS:
        with np.errstate(all="ignore"):
            parts = list(values.astype(dtype))
        for op in ("sum", "mean", "prod"):
            check_reductions(backend, parts, op)
        for op in ("min", "max"):
            _check_extremes(backend, parts, op)
    for number in range(len(floats)):  # NumPy has loops of their own for single elements
        _check_totals(backend, list(values[:, number : number + 1].astype(np.float32)), "sum")
    with np.errstate(all="ignore"):
        mixed = (values + 1j * np.roll(values, 1, axis=1)).astype(np.complex64)
    check_reductions(backend, list(mixed), "sum")
    check_reductions(backend, list(mixed), "mean")
    check_reductions(backend, list(mixed), "prod")
    for dtype in oracle.INTEGERS:
        top = np.full(5, np.iinfo(dtype).max, dtype)
        _check_totals(backend, [top] * p, "sum")
        _check_totals(backend, [top] * p, "prod")


def _check_totals(backend: fc.Backend, parts: Sequence[Array], op: str) -> None:
    """Compare with the oracle what two algorithms make of them."""
    total = oracle.reduced(parts, op)
    for name in ("auto", "doubling"):
        result = fc.all_reduce(parts[backend.rank], backend, op=op, algorithm=name)
        check_same(result, total, f"all_reduce, {name}, {op} of {parts[0]}")


def _check_extremes(backend: fc.Backend, parts: Sequence[Array], op: str) -> None:
    """Compare min and max; which of two zeros is the smaller one is up to the processor."""
    mine, total = parts[backend.rank], oracle.reduced(parts, op)
    results = [
        fc.all_reduce(mine, backend, op=op, algorithm=name) for name in CANONICAL["all_reduce"]
    ]
    zero = mine.dtype.type(0)
    check_same(results[0] + zero, total + zero, f"{op} of special values of {mine.dtype}")
    for result in results[1:]:
        check_same(result, results[0], f"{op} of special values, between algorithms")


def means_of_integers(backend: fc.Backend) -> None:
    """In a float dtype, with the same bits by all algorithms; no sum wraps around."""
    me, p = backend.rank, backend.world_size
    for number, dtype in enumerate([np.dtype(np.bool_), *oracle.INTEGERS]):
        parts = arrays_of(p, (2 * p + 1, 3), dtype)
        if dtype.itemsize == 8:
            parts = [part >> dtype.type(13) for part in parts]  # sums below 2**53
        result = (np.float32, np.float64, np.float16, oracle.HALVES[1])[number % 4]
        op = fc.ReduceOp.mean_as(result)
        with np.errstate(all="ignore"):
            total = (sum(part.astype(np.float64) for part in parts) / p).astype(result)
        for name in CANONICAL["all_reduce"]:
            what = f"all_reduce, {name}, {op.value} of {dtype}"
            check_same(fc.all_reduce(parts[me], backend, op=op, algorithm=name), total, what)
        for name in CANONICAL["reduce_scatter"]:
            found = fc.reduce_scatter(parts[me], backend, op=op, algorithm=name)
            check_same(found, oracle.pieces(total, p)[me], f"reduce_scatter, {name}, {dtype}")
        for name in CANONICAL["reduce"]:
            root = number % p
            found = fc.reduce(parts[me], backend, op=op, root=root, algorithm=name)
            if me == root:
                check_same(found, total, f"reduce, {name}, {dtype}")
            else:
                assert found is None
    _means_by_other_ways(backend)


def _means_by_other_ways(backend: fc.Backend) -> None:
    """Ragged, scanned, asynchronous, into arrays of any layout; and refused."""
    me, p = backend.rank, backend.world_size
    op, parts = fc.ReduceOp.mean_as("float32"), arrays_of(p, (2 * p + 1, 3), np.int16)
    mine, kept = parts[me].copy(), parts[me].copy()
    total = (sum(part.astype(np.float64) for part in parts) / p).astype(np.float32)
    counts = [2 * p + 1, *[0] * (p - 1)]
    found = fc.reduce_scatter_v(mine, backend, counts, op=op)
    check_same(found, total if me == 0 else total[:0], "reduce_scatter_v")
    before = (sum(part.astype(np.float64) for part in parts[: me + 1]) / (me + 1)).astype("f4")
    check_same(fc.scan(mine, backend, op=op), before, "scan")
    out = np.zeros((2 * p + 1, 6), np.float32)
    work = fc.all_reduce(mine, backend, op=op, out=out[:, ::2], async_op=True)
    assert work.wait().base is out
    check_same(np.ascontiguousarray(out[:, ::2]), total, "out")
    check_same(mine, kept, "the input")
    for shape in ((), (0,), (30000,)):
        found = fc.all_reduce(np.full(shape, me, np.uint8), backend, op=op)
        check_same(found, np.full(shape, (p - 1) / 2, np.float32), str(shape))
    top = np.array([2**63 - 1, -(2**63)])
    check_same(fc.all_reduce(top, backend, op=op), top.astype(np.float32), "no wrapping")
    same = np.empty_like(total)
    expect_refusal(fc.all_reduce, mine, backend, op=op, out=mine)
    expect_refusal(fc.all_reduce, same, backend, op=op)
    expect_refusal(fc.exscan, mine, backend, op=op)
    expect_refusal(fc.all_reduce_many, [mine], backend, op=op)
    with fc.coalesce(backend) as batch:
        expect_refusal(batch.all_reduce, mine, op=op)
    for dtype in (np.int32, np.complex64, "longdouble"):
        expect_refusal(fc.ReduceOp.mean_as, dtype)


def combinations_refused(backend: fc.Backend) -> None:
    """What has no meaning is refused on the rank, before anything is sent."""
    for dtype in oracle.DTYPES:
        array = array_of(backend.rank, (3,), dtype)
        for op in ("mean", "min", "max"):
            if not oracle.allowed(op, dtype):
                for function in (fc.all_reduce, fc.reduce_scatter, fc.reduce):
                    expect_refusal(function, array, backend, op=op)
    ones = np.ones(3)
    for bad in (np.longdouble, np.clongdouble, ">f4", "datetime64[s]", "U3", object):
        expect_refusal(fc.all_reduce, ones.astype(bad), backend)
        expect_refusal(fc.all_gather, ones.astype(bad), backend)
    expect_refusal(fc.all_reduce, ones, backend, op="median")
    expect_refusal(fc.all_reduce, ones, backend, algorithm="magic")
    expect_refusal(fc.all_reduce, ones, backend, algorithm="tree")
    expect_refusal(fc.all_reduce, ones, backend, out=np.ones(4))
    expect_refusal(fc.all_reduce, ones, backend, out=np.ones(3, np.float32))
    expect_refusal(fc.all_reduce, ones, backend, out=[0.0, 0.0, 0.0])
    expect_refusal(fc.all_reduce, ones, backend, timeout=-1)
    expect_refusal(fc.all_reduce, ones, backend, timeout="soon")
    expect_refusal(fc.all_reduce, [[1.0], [1.0, 2.0]], backend)
    expect_refusal(fc.reduce, ones, backend, root=backend.world_size)
    expect_refusal(fc.reduce, ones, backend, root=-1)
    expect_refusal(fc.reduce, ones, backend, root=0.5)
    expect_refusal(fc.reduce_scatter, np.float32(1), backend)
    read_only = np.ones(3)
    read_only.flags.writeable = False
    expect_refusal(fc.all_reduce, ones, backend, out=read_only)
    expect_refusal(fc.all_reduce, ones, None)
    expect_refusal(fc.barrier, None)
    check_same(fc.all_reduce(ones, backend), ones * backend.world_size, "after all refusals")


def expect_refusal(function: Any, *args: Any, **kwargs: Any) -> None:
    """Call, and raise unless that raises ``ArgumentError``."""
    try:
        function(*args, **kwargs)
    except fc.ArgumentError:
        return
    raise AssertionError(f"{function.__name__}{args[:1]}, {kwargs} was not refused")


def ring_to_rounding(backend: fc.Backend) -> None:
    """The ring is right to rounding, exact for integers, and the same on all ranks."""
    p = backend.world_size
    for number, (dtype, op) in enumerate(oracle.COMBINATIONS[::3]):
        for rows in ((0, p), (1, 2 * p + 1))[number % 2]:
            parts = arrays_of(p, (rows, 2), dtype)
            total, mine = oracle.reduced(parts, op), parts[backend.rank]
            result = fc.all_reduce(mine, backend, op=op, algorithm="ring")
            check_close(result, total, f"ring {op} of {dtype}", terms=2 * p)
            check_same_everywhere(backend, result)
            piece = fc.reduce_scatter(mine, backend, op=op, algorithm="ring")
            own = oracle.pieces(total, p)[backend.rank]
            check_close(piece, own, f"ring reduce_scatter, {op} of {dtype}", terms=2 * p)


def check_same_everywhere(backend: fc.Backend, array: Array) -> None:
    """Raise unless all ranks hold the same bits; compares bytes that were gathered."""
    rows = fc.all_gather(array.reshape(-1).view(np.uint8)[None], backend)
    for rank, row in enumerate(rows):
        check_same(row, rows[0], f"rank {rank} against rank 0")


def all_reduce_in_two_steps(backend: fc.Backend) -> None:
    """reduce_scatter and all_gather together are all_reduce, to the bit."""
    p = backend.world_size
    for dtype in (*oracle.FLOATS, *oracle.COMPLEXES):
        mine = array_of(backend.rank, (3 * p, 5), dtype)
        for op in ("sum", "mean"):
            whole = fc.all_reduce(mine, backend, op=op)
            for algorithm in CANONICAL["reduce_scatter"]:
                piece = fc.reduce_scatter(mine, backend, op=op, algorithm=algorithm)
                check_same(fc.all_gather(piece, backend), whole, f"{op}, {dtype}, {algorithm}")
            check_same_everywhere(backend, whole)
