"""Array functions that NumPy and CuPy do not have alike, or that 16 bits are too few for.

All arrays of a call are of one library. On the host each function takes NumPy's fastest way; on a
GPU one of array functions that CuPy has, too. 16-bit arrays (float16, bfloat16) are added up in
float32 and rounded once; others are computed with in their own type.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpcore.core.array_module import array_module, on_host
from fsdpcore.core.buffers import Array

# OpenBLAS may compute with what lies beside its operands, too, and drop the result. Products are
# right, but the warning may be of numbers that are in neither operand.
_without_warning = np.errstate(invalid="ignore")


def wide(x: Array) -> Array:
    """Return 16-bit values in float32, and others as they are, in the same array."""
    return x.astype(np.float32) if x.dtype.itemsize < 4 else x


def narrow(x: Array, dtype: np.dtype[Any]) -> Array:
    """Return ``x`` rounded to ``dtype``; the same array where it has that already."""
    return x.astype(dtype, copy=False)


@_without_warning
def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return ``a @ b`` in the type of ``a``, or rounded into ``out``, which then is returned."""
    xp = array_module(a)
    product: Array
    # BLAS has no 16 bits, and NumPy's loop is slow; CuPy has none for stacks of bfloat16 matrices.
    if a.dtype.itemsize < 4 and (xp is np or max(a.ndim, b.ndim) > 2):
        product = xp.matmul(wide(a), wide(b))
    elif out is None or out.dtype == a.dtype:
        product = xp.matmul(a, b, out=out)
        return product
    else:
        product = xp.matmul(a, b)
    if out is None:
        return narrow(product, a.dtype)
    out[...] = product
    return out


@_without_warning
def row_sum(x: Array, weight: float = 1.0) -> Array:
    """Return (..., 1): the sums along the last axis, times ``weight``."""
    total: Array
    if on_host(x):  # a matrix product takes a quarter of the time of NumPy's sum
        total = x @ np.full((x.shape[-1], 1), weight, x.dtype)
    else:
        total = x.sum(axis=-1, keepdims=True)
        if weight != 1.0:
            total *= weight
    return total


def row_dot(a: Array, b: Array) -> Array:
    """Return (..., 1): the dot products of rows, in float32 at least."""
    a, b = wide(a), wide(b)
    dot: Array = np.vecdot(a, b) if on_host(a) else (a * b).sum(axis=-1)
    return dot[..., None]


def column_sum(x: Array, out: Array) -> None:
    """Write the sums over the first axis into ``out``, in float32 at least before they are rounded.

    ``x`` is (N, ...) and ``out`` of the shape of one of its rows.
    """
    if out.dtype.itemsize < 4:
        out[...] = x.sum(axis=0, dtype=np.float32)
    else:
        x.sum(axis=0, dtype=out.dtype, out=out)


def column_dot(a: Array, b: Array, out: Array) -> None:
    """Write the dot products of the columns of two (N, D) into ``out`` (D,)."""
    if not on_host(a):
        column_sum(wide(a) * b, out)
    elif out.dtype == a.dtype == b.dtype and out.dtype.itemsize >= 4:
        np.einsum("nd,nd->d", a, b, out=out)
    else:
        out[...] = np.einsum("nd,nd->d", wide(a), wide(b))


def sum_by_index(index: Array, rows: Array, out: Array) -> None:
    """Write into ``out[i]`` the sum of the rows whose index is i, and zeros where there are none.

    In an order that follows from ``index`` alone, so that the bits do not change from run to run.

    Args:
        index: (N,) integers of int64; rows with one that ``out`` does not have are left out.
        rows: (N, D).
        out: (size, D), written whole.
    """
    if not index.size:
        out.fill(0)
    elif on_host(index):
        _sum_runs(index, rows, out)
    else:
        _sum_scan(array_module(index), index, rows, out)


def _sum_runs(index: Array, rows: Array, out: Array) -> None:
    """Bring equal indices together and add them up run by run: an eighth of np.add.at's time."""
    out[...] = 0
    chosen = np.flatnonzero((index >= 0) & (index < len(out)))
    if not len(chosen):
        return
    order = chosen[np.argsort(index[chosen], kind="stable")]
    ordered = index[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    out[ordered[starts]] = np.add.reduceat(wide(rows[order]), starts, axis=0)


def _sum_scan(xp: Any, index: Array, rows: Array, out: Array) -> None:
    """Add up runs of equal indices by doubling steps, lg N in all (Hillis, Steele, 1986).

    Neither waits for the GPU, as picking rows by a mask does, nor adds by atomics, which have no
    order.
    """
    order = xp.argsort(index)  # CuPy's is stable
    ordered = index[order]
    sums = wide(rows[order])
    step = 1
    while step < len(ordered):
        same = ordered[step:] == ordered[:-step]
        sums[step:] += xp.where(same[:, None], sums[:-step], sums.dtype.type(0))
        step *= 2
    # The last row of a run has its sum.
    wanted = xp.arange(len(out))
    last = xp.searchsorted(ordered, wanted, side="right") - 1
    found = (last >= 0) & (ordered[last] == wanted)
    out[...] = xp.where(found[:, None], sums[last], sums.dtype.type(0))
