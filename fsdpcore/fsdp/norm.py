"""Norms and finiteness of sharded gradients, as if they were not sharded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from fsdpcore.buffers import Array
from fsdpcore.errors import ArgumentError

_BLOCK = 32 * 1024


def check_norm_type(p: float) -> float:
    """Return ``p`` if there is an Lp norm; raise ArgumentError if not."""
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not p > 0:
        raise ArgumentError(f"norm_type must be a positive number or math.inf, got {p!r}")
    return float(p)


def local_part(arrays: Iterable[Array], p: float) -> float:
    """Return what these arrays add to a global Lp norm: their sum of ``|x|**p``, or their maximum.

    In float64, so that neither overflow nor the number of ranks matters at float32 precision. inf
    or nan if an element is.
    """
    scratch = np.empty(_BLOCK, np.float64)
    found = []
    with np.errstate(all="ignore"):
        for array in arrays:
            for start in range(0, array.size, _BLOCK):
                values = array[start : start + _BLOCK]
                block = scratch[: values.size]
                np.copyto(block, values, casting="unsafe")
                found.append(_of_block(block, p))
    return _maximum(found) if math.isinf(p) else sum(found)


def _of_block(block: Array, p: float) -> float:
    if p == 2.0:
        return float(np.dot(block, block))
    np.abs(block, out=block)
    if math.isinf(p):
        return float(block.max())
    if p != 1.0:
        np.power(block, p, out=block)
    return float(block.sum())


def joined(parts: Sequence[float], p: float) -> float:
    """Return the norm from the parts of all ranks, each of which had other elements.

    Rounded to float32: shards that lie otherwise give other roundings in the sum, which stay below.
    """
    if math.isinf(p):
        return _maximum(parts)
    if not all(map(math.isfinite, parts)):
        return math.nan if any(map(math.isnan, parts)) else math.inf
    norm = math.fsum(parts) ** (1.0 / p)
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
