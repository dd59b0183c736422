"""What a collective must give, computed without any: inputs and outputs as formulas.

Inputs are small whole numbers that follow from rank and position alone, so that every rank can
work out every other's. They are small enough that each dtype holds all sums exactly; the order in
which a competitor adds then makes no difference, and only a mean is compared with a tolerance.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fsdpcore.bench.cases import Case
from fsdpcore.core.buffers import BFLOAT16, Array

Whole = NDArray[np.int64]

# Elements that are worked out at a time: 2 MiB of int64.
_BLOCK = 1 << 18
_LARGEST = 1 << 16
_MASK = (1 << 64) - 1
_ODD = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)
# Bits of precision: whole numbers up to 2**bits are exact.
_PRECISION = {np.dtype(np.float16): 11, BFLOAT16: 8, np.dtype(np.float32): 24}


def inputs(case: Case, rank: int, start: int, stop: int) -> Whole:
    """Elements ``start`` to ``stop`` of a rank's input, from 1 up."""
    limit = _largest_input(case)
    position = np.arange(start, stop, dtype=np.uint64)
    mixed = position * np.uint64(_ODD[0]) + np.uint64((rank + 1) * _ODD[1] & _MASK)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(_ODD[1])
    mixed >>= np.uint64(40)
    if case.op == "prod":  # few factors are not 1, or the product would not fit
        small: Whole = ((position + np.uint64(rank)) % np.uint64(5) == 0).astype(np.int64)
    else:
        small = (mixed % np.uint64(limit)).astype(np.int64)
    return small + np.int64(1)


def expected(case: Case, rank: int, start: int, stop: int) -> Array:
    """Elements ``start`` to ``stop`` of what a rank must get; a mean as float64."""
    position = np.arange(start, stop)
    offset = rank * case.count
    if case.operation in ("all_reduce", "reduce"):
        return _reduced(case, start, stop)
    if case.operation == "reduce_scatter":
        return _reduced(case, offset + start, offset + stop)
    if case.operation == "broadcast":
        return inputs(case, case.root, start, stop)
    if case.operation == "scatter":
        return inputs(case, case.root, offset + start, offset + stop)
    result = np.empty(stop - start, np.int64)
    skip = offset if case.operation == "all_to_all" else 0
    for sender in range(case.world_size):
        first, last = max(start, sender * case.count), min(stop, (sender + 1) * case.count)
        if first < last:
            begin = first - sender * case.count + skip
            where = slice(first - start, last - start)
            result[where] = inputs(case, sender, begin, begin + position[where].size)
    return result


def fill(case: Case, rank: int, source: Array) -> None:
    """Write a rank's input."""
    for start in range(0, source.size, _BLOCK):
        stop = min(source.size, start + _BLOCK)
        source[start:stop] = inputs(case, rank, start, stop).astype(source.dtype)


def count_wrong(case: Case, rank: int, output: Array) -> int:
    """How many elements of a rank's output are not what they must be."""
    wrong = 0
    for start in range(0, output.size, _BLOCK):
        stop = min(output.size, start + _BLOCK)
        wrong += _differences(output[start:stop], expected(case, rank, start, stop), case.op)
    return wrong


def count_changed(case: Case, rank: int, source: Array) -> int:
    """How many elements of an input, which had to stay as it was, have changed."""
    changed = 0
    for start in range(0, source.size, _BLOCK):
        stop = min(source.size, start + _BLOCK)
        changed += _differences(source[start:stop], inputs(case, rank, start, stop), "none")
    return changed


def _differences(found: Array, wanted: Array, op: str) -> int:
    if op != "mean":
        return int(np.count_nonzero(found != wanted.astype(found.dtype)))
    # The sum is exact; dividing it, and rounding that, may be done in more than one way.
    step = 2.0 ** (1 - _PRECISION.get(found.dtype, 53))
    near = np.abs(found.astype(np.float64) - wanted) <= step * np.abs(wanted)
    return int(np.count_nonzero(~near))


def _reduced(case: Case, start: int, stop: int) -> Array:
    parts = (inputs(case, rank, start, stop) for rank in range(case.world_size))
    total: Array = next(parts)
    combine = {"min": np.minimum, "max": np.maximum, "prod": np.multiply}.get(case.op, np.add)
    for part in parts:
        total = combine(total, part)
    return total / case.world_size if case.op == "mean" else total


def _largest_input(case: Case) -> int:
    dtype = case.numpy_dtype
    whole = dtype.kind in "iu"
    exact = int(np.iinfo(dtype).max) if whole else 1 << _PRECISION.get(dtype, 53)
    share = exact // case.world_size if case.op in ("sum", "mean") else exact
    return max(1, min(_LARGEST, share))
