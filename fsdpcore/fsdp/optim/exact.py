"""Sums of squares to the same bits in any order, however the numbers are dealt to ranks.

Of n numbers the largest is M. 2 n M is added to each of them, and taken away again: that rounds it
to a multiple of a power of two, which is the same one for all. n such multiples add up without
rounding. What was rounded off is below 2**-51 n M each; where that counts it is added up by itself,
in the same way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.core.array_module import on_host

Float64 = NDArray[np.float64]


def rounded(values: Float64, largest: Any, count: int, out: Float64) -> Float64:
    """Return numbers of which so many add up exactly; in ``out``, which is not ``values``.

    Args:
        values: not negative.
        largest: an array that is broadcast: the largest of all numbers that are added to them.
        count: of these numbers, on all ranks.
        out: as large as ``values``.
    """
    return _round(values, largest * (2.0 * count), out)


def add_squares(
    sums: Float64, values: Float64, largest: Float64 | None, count: int, scratch: Float64
) -> None:
    """Add the sum of squares of ``values`` to two numbers, whose sum it is.

    Args:
        sums: of two elements. Without ``largest`` the second one stays.
        values: overwritten.
        largest: of one element: the largest of all squares; None for a sum that is rounded.
        count: of all of them, on all ranks.
        scratch: at least as large as ``values``.
    """
    if largest is None and on_host(values):
        sums[0] += np.dot(values, values)
        return
    np.multiply(values, values, out=values)
    if largest is None:
        sums[0] += values.sum()
        return
    step = largest * (2.0 * count)
    coarse = _round(values, step, scratch[: values.size])
    sums[0] += coarse.sum()
    np.subtract(values, coarse, out=values)
    sums[1] += _round(values, step * (count * 2.0**-50), coarse).sum()


def note_largest(largest: Float64, values: Float64) -> None:
    """Have an array of one element be the largest square so far; ``values`` are overwritten."""
    np.abs(values, out=values)
    found = values.max(keepdims=True)
    np.maximum(largest, found * found, out=largest)


def _round(values: Float64, step: Any, out: Float64) -> Float64:
    np.add(values, step, out=out)
    np.subtract(out, step, out=out)
    return out
