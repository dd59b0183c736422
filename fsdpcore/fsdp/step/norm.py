"""Norms and finiteness of sharded gradients, as if they were not sharded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fsdpcore.core.array_module import array_module
from fsdpcore.core.buffers import Array
from fsdpcore.fsdp.gpu.sums import Slots, SumKind

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
    once or twice. All of them are on the host, or on one GPU, for which the host waits once (twice
    where p is 1 or 2 and the sum is too large or too small).
    """
    found, first = _peeked(arrays)
    return _gpu_part(found, first, arrays, p) if found is not None else _part(first, arrays, p)


def _peeked(arrays: Iterable[Array]) -> tuple[Any, Iterable[Array]]:
    """Return CuPy if that is whose the arrays are, else None; and what iterates over them once."""
    iterator = iter(arrays)
    head = list(itertools.islice(iterator, 1))
    module = array_module(head[0]) if head else np
    return None if module is np else module, itertools.chain(head, iterator)


def _gpu_part(cupy: Any, first: Iterable[Array], again: Iterable[Array], p: float) -> NormPart:
    if math.isinf(p):
        return NormPart(_fetched(_summed(cupy, "largest", first))[0], 0.0)
    kind: SumKind = "power" if p not in (1.0, 2.0) else "square" if p == 2.0 else "absolute"
    if p in (1.0, 2.0):
        (total,) = _fetched(_summed(cupy, kind, first))
        if math.isfinite(total) and total > _LEAST:
            return NormPart(1.0, total)
        first, again = again, again
    bound = _summed(cupy, "largest", first)
    # By a number that the host does not know yet; where it is no divisor, the sum is not used.
    largest, total = _fetched(bound, _summed(cupy, kind, again, p, divisor=bound))
    usable = largest != 0.0 and math.isfinite(largest)
    return NormPart(largest, total if usable else 0.0)


def _summed(
    cupy: Any, kind: SumKind, arrays: Iterable[Array], p: float = 1.0, divisor: Array | None = None
) -> Array:
    slots = Slots(cupy, kind, p, divisor)
    for array in arrays:
        slots.add(array)
    return slots.total()


def _fetched(*numbers: Any) -> list[float]:
    """Return numbers that are on a GPU, all of them in one copy; blocks."""
    module = array_module(numbers[0])
    together = numbers[0] if len(numbers) == 1 else module.concatenate(numbers)
    values: list[float] = together.get().tolist()
    return values


def _part(first: Iterable[Array], again: Iterable[Array], p: float) -> NormPart:
    """Return ``local_part`` of arrays on the host, which are iterated once by each iterable."""
    if math.isinf(p):
        return NormPart(_maximum(list(_of_blocks(first, p, 1.0))), 0.0)
    if p in (1.0, 2.0):
        total = sum(_of_blocks(first, p, 1.0))
        if math.isfinite(total) and total > _LEAST:
            return NormPart(1.0, total)
        first = again
    largest = _maximum(list(_of_blocks(first, math.inf, 1.0)))
    if largest == 0.0 or not math.isfinite(largest):
        return NormPart(largest, 0.0)
    return NormPart(largest, sum(_of_blocks(again, p, largest)))


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
    """Whether no element is inf or nan; reads the arrays once, and waits for a GPU once."""
    module, arrays = _peeked(arrays)
    if module is not None:
        return math.isfinite(_fetched(_summed(module, "largest", arrays))[0])
    with np.errstate(all="ignore"):
        return all(_finite(array) for array in arrays)


def _finite(array: Array) -> bool:
    if array.itemsize >= 4 and math.isfinite(float(np.dot(array, array))):
        return True  # a sum of squares has every inf and nan in it
    for start in range(0, array.size, _BLOCK):  # or an overflow
        if not np.isfinite(array[start : start + _BLOCK]).all():
            return False
    return True
