"""Array functions that NumPy and CuPy do not have alike, or that 16 bits are too few for.

``xp`` is the module that computes, ``numpy`` or ``cupy``, and all arrays are its own. On the host
each function takes NumPy's fastest way; on a GPU one of array functions that CuPy has, too. 16-bit
arrays (float16, bfloat16) are added up in float32 and rounded once.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
"""An array of ``numpy``, or of ``cupy``, whose interface is the same."""


def wide(x: Array) -> Array:
    """Return 16-bit values in float32, and others as they are, in the same array."""
    return x.astype(np.float32) if x.dtype.itemsize < 4 else x


def narrow(x: Array, dtype: np.dtype[Any]) -> Array:
    """Return ``x`` rounded to ``dtype``; the same array where it has that already."""
    return x.astype(dtype, copy=False)


def matmul(xp: Any, a: Array, b: Array, out: Array | None = None) -> Array:
    """Return ``a @ b`` in the type of ``a``, or rounded into ``out``, which then is returned."""
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


@np.errstate(invalid="ignore")  # OpenBLAS may warn of numbers that are not in x
def row_sum(xp: Any, x: Array, weight: float = 1.0) -> Array:
    """Return (..., 1): the sums along the last axis, times ``weight``."""
    total: Array
    if xp is np:  # a matrix product is four times as fast as NumPy's sum
        total = x @ np.full((x.shape[-1], 1), weight, x.dtype)
    else:
        total = x.sum(axis=-1, keepdims=True)
        if weight != 1.0:
            total *= weight
    return total


def row_dot(xp: Any, a: Array, b: Array) -> Array:
    """Return (..., 1): the dot products of rows, in float32 at least."""
    dot: Array = np.vecdot(wide(a), wide(b)) if xp is np else (wide(a) * b).sum(axis=-1)
    return dot[..., None]


def column_sum(xp: Any, x: Array, out: Array) -> None:
    """Write the sum over the first axis into ``out``."""
    if out.dtype.itemsize < 4:
        out[...] = xp.sum(x, axis=0, dtype=np.float32)
    else:
        xp.sum(x, axis=0, dtype=out.dtype, out=out)


def column_dot(xp: Any, a: Array, b: Array, out: Array) -> None:
    """Write the dot products of the columns of two (N, D) into ``out`` (D,)."""
    if xp is not np:
        column_sum(xp, a * b, out)
    elif out.dtype == a.dtype:
        np.einsum("nd,nd->d", a, b, out=out)
    else:
        out[...] = np.einsum("nd,nd->d", a, b)


def sum_by_index(xp: Any, index: Array, rows: Array, out: Array) -> None:
    """Write into ``out[i]`` the sum of the ``rows`` (N, D) whose ``index`` (N,) is i.

    In an order that depends on nothing but ``index``. Rows of ``out`` whose index is absent are
    zero before and after.
    """
    if xp is not np:
        # Adding up by atomics has no order. A product of this kind is small for 256 bytes.
        chosen = xp.arange(len(out))[:, None] == index
        matmul(xp, chosen.astype(rows.dtype), rows, out=out)
        return
    # Equal indices are brought together and their rows added up run by run, which takes an
    # eighth of the time of np.add.at.
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    out[ordered[starts]] = np.add.reduceat(wide(rows[order]), starts, axis=0)
