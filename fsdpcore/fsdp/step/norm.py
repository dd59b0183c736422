"""Norms and finiteness of sharded gradients, as if they were not sharded.

A norm is made of the sums of fixed blocks of elements, which are added up without rounding, and
rounded once. So it is the same wherever shards begin, if they begin where blocks do
(``FlatLayout.block``). Where they do not, the difference stays below the rounding to float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fsdpcore.core.array_module import array_module, on_host
from fsdpcore.core.buffers import Array
from fsdpcore.fsdp.gpu.sums import Slots, SumKind
from fsdpcore.fsdp.optim.exact import rounded
from fsdpcore.fsdp.sharding.virtual_ranks import LEAF_BLOCK

_BLOCK = 32 * 1024
_GPU_BLOCK = 4 * 2**20
# Squares that add up to less may have vanished. Those of float32 do not.
_LEAST = 1e-200
_Sum: TypeAlias = tuple[float, float, float]


class NormPart(NamedTuple):
    """What some elements add to a global Lp norm.

    Attributes:
        largest: what elements were divided by before their power was taken, against overflow: the
            largest of them, or 1 where there is no need; for the maximum norm it is all there is.
            A power of two for other norms.
        total: sum of ``(|x| / largest) ** p``, rounded.
        rest, dust: what rounding has taken from it, and from that.
    """

    largest: float
    total: float
    rest: float = 0.0
    dust: float = 0.0


def local_part(arrays: Iterable[Array], p: float, *, by_blocks: bool = False) -> NormPart:
    """Return what these arrays add to a global Lp norm; not finite if an element is not.

    In float64, so that neither overflow nor the number of ranks matters. ``arrays`` are iterated
    once or twice. All of them are on the host, or on one GPU, for which the host waits once (twice
    where p is 1 or 2 and the sum is too large or too small). Each array begins where a block does.

    Args:
        arrays: the elements.
        p: which norm.
        by_blocks: on a GPU, too, the sum is made of those of fixed blocks; the host waits oftener.
    """
    found, first = _peeked(arrays)
    if found is None or by_blocks:
        return _part(first, arrays, p)
    return _gpu_part(found, first, arrays, p)


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
    """Return ``local_part`` by blocks; the arrays are iterated once by each iterable."""
    if math.isinf(p):
        return NormPart(_maximum(_of_blocks(first, p, 1.0)), 0.0)
    unscaled = _of_blocks(first, p, 1.0)
    total = sum(unscaled)
    if math.isfinite(total) and total > _LEAST:
        return NormPart(1.0, *_exact_sum(unscaled))
    largest = _maximum(_of_blocks(again, math.inf, 1.0))
    if largest == 0.0 or not math.isfinite(largest):
        return NormPart(largest, 0.0)
    # Each rank has a divisor of its own, so it must not round.
    divisor = math.ldexp(1.0, min(1023, math.frexp(largest)[1]))
    return NormPart(divisor, *_exact_sum(_of_blocks(again, p, divisor)))


def _exact_sum(values: list[float]) -> _Sum:
    """The sum as three numbers, of which each is the rounded rest of those before it."""
    total = math.fsum(values)
    rest = math.fsum([*values, -total])
    return total, rest, math.fsum([*values, -total, -rest])


def _of_blocks(arrays: Iterable[Array], p: float, divisor: float) -> list[float]:
    """What each block adds to a sum of powers, or to a maximum."""
    return [found for values in _scaled(arrays, divisor) for found in _of_block(values, p)]


def _scaled(arrays: Iterable[Array], divisor: float) -> Iterator[Array]:
    scratch = np.empty(0)
    for array in arrays:
        module, most = array_module(array), _BLOCK if on_host(array) else _GPU_BLOCK
        for start in range(0, array.size, most):
            values = array[start : start + most]
            if scratch.size < values.size:
                scratch = module.empty(most, np.float64)
            block = scratch[: values.size]
            with np.errstate(all="ignore"):
                np.copyto(block, values, casting="unsafe")
                if divisor != 1.0:
                    np.divide(block, divisor, out=block)
            yield block


def _of_block(values: Array, p: float) -> list[float]:
    """What each block of ``values``, which may be overwritten, adds."""
    with np.errstate(all="ignore"):
        if p != 2.0:
            np.abs(values, out=values)
        if math.isinf(p):
            return [float(values.max())]
        if p not in (1.0, 2.0):
            np.power(values, p, out=values)
        whole = values.size // LEAF_BLOCK * LEAF_BLOCK
        blocks, rest = values[:whole].reshape(-1, LEAF_BLOCK), values[whole:]
        if not on_host(values):
            if p == 2.0:
                np.multiply(values, values, out=values)
            both = [each for each in (blocks, rest.reshape(1, -1)) if each.size]
            return [total for each in both for total in _in_any_order(each)]
        if p == 2.0:
            return [*np.vecdot(blocks, blocks).tolist(), float(np.vecdot(rest, rest))]
        return [*blocks.sum(axis=1).tolist(), float(rest.sum())]


def _in_any_order(blocks: Array) -> list[float]:
    """The sum of each row, in whatever order a GPU makes it."""
    out = array_module(blocks).empty_like(blocks)
    most = blocks.max(axis=1, keepdims=True)
    totals: list[float] = rounded(blocks, most, LEAF_BLOCK, out).sum(axis=1).get().tolist()
    return totals


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
    total = math.fsum(
        number * (part.largest / largest) ** p
        for part in parts
        for number in (part.total, part.rest, part.dust)
    )
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
