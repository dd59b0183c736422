"""Norms and finiteness of sharded gradients, as if they were not sharded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fsdpcore.buffers import Array

_BLOCK = 32 * 1024
# Squares that add up to less may have vanished. Those of float32 do not.
_LEAST = 1e-200


class NormPart(NamedTuple):
    """What some elements add to a global Lp norm.

    Attributes:
        largest: what elements were divided by before their power was taken, against overflow: the
            largest of them, or 1 where there is no need; for the maximum norm it is all there is.
        total: sum of ``(|x| / largest) ** p``.
    """

    largest: float
    total: float


def local_part(arrays: Iterable[Array], p: float) -> NormPart:
    """Return what these arrays add to a global Lp norm; not finite if an element is not.

    In float64, so that neither overflow nor the number of ranks matters. ``arrays`` are iterated
    once or twice.
    """
    if math.isinf(p):
        return NormPart(_maximum(list(_of_blocks(arrays, p, 1.0))), 0.0)
    if p in (1.0, 2.0):
        total = sum(_of_blocks(arrays, p, 1.0))
        if math.isfinite(total) and total > _LEAST:
            return NormPart(1.0, total)
    largest = _maximum(list(_of_blocks(arrays, math.inf, 1.0)))
    if largest == 0.0 or not math.isfinite(largest):
        return NormPart(largest, 0.0)
    return NormPart(largest, sum(_of_blocks(arrays, p, largest)))


def _of_blocks(arrays: Iterable[Array], p: float, divisor: float) -> Iterator[float]:
    scratch = np.empty(_BLOCK, np.float64)
    for array in arrays:
        for start in range(0, array.size, _BLOCK):
            values = array[start : start + _BLOCK]
            block = scratch[: values.size]
            with np.errstate(all="ignore"):
                np.copyto(block, values, casting="unsafe")
                if divisor != 1.0:
                    np.divide(block, divisor, out=block)
                found = _of_block(block, p)
            yield found


def _of_block(block: Array, p: float) -> float:
    if p == 2.0:
        return float(np.dot(block, block))
    np.abs(block, out=block)
    if math.isinf(p):
        return float(block.max())
    if p != 1.0:
        np.power(block, p, out=block)
    return float(block.sum())


def joined(parts: Sequence[NormPart], p: float, *, single: bool) -> float:
    """Return the norm from the parts of all ranks, each of which had other elements.

    Args:
        parts: in the order of the ranks.
        p: which norm.
        single: round it to float32. Shards that lie otherwise give other roundings in the sum, but
            these stay below that, and every strategy clips alike.
    """
    largest = _maximum([part.largest for part in parts])
    if math.isinf(p) or largest == 0.0 or not math.isfinite(largest):
        return largest
    total = math.fsum(part.total * (part.largest / largest) ** p for part in parts)
    try:
        norm: float = largest * total ** (1.0 / p)
    except OverflowError:
        return math.inf
    if not single:
        return norm
    with np.errstate(over="ignore"):
        rounded = float(np.float32(norm))
    return rounded if math.isfinite(rounded) else norm


def _maximum(values: Sequence[float]) -> float:
    """The largest, or nan if there is one."""
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def all_finite(arrays: Iterable[Array]) -> bool:
    """Whether no element is inf or nan; reads the arrays once."""
    with np.errstate(all="ignore"):
        return all(_finite(array) for array in arrays)


def _finite(array: Array) -> bool:
    if array.itemsize >= 4 and math.isfinite(float(np.dot(array, array))):
        return True  # a sum of squares has every inf and nan in it
    for start in range(0, array.size, _BLOCK):  # or an overflow
        if not np.isfinite(array[start : start + _BLOCK]).all():
            return False
    return True
