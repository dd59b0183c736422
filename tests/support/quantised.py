"""An oracle for quantised arrays: in float64, block by block, and with whole matrices."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

TINY = float(np.finfo(np.float32).tiny)


def round_trip(values: NDArray[Any], bits: int, block: int) -> NDArray[Any]:
    """Values that no rotation changes, as they come back."""
    back = np.empty_like(values)
    top = 2 ** (bits - 1) - 1
    for start in range(0, values.size, block):
        part = values[start : start + block]
        largest = np.abs(part).max()
        if not np.isfinite(largest):
            back[start : start + block] = largest
            continue
        scale = np.maximum(largest / np.float32(top), np.float32(TINY))
        back[start : start + block] = np.rint(part / scale) * scale
    return back


def half_steps(values: NDArray[Any], bits: int, block: int) -> NDArray[Any]:
    """Half a step of the scale of each value's block; nan where a block is not finite."""
    steps = np.empty(values.size)
    top = 2 ** (bits - 1) - 1
    for start in range(0, values.size, block):
        largest = float(np.abs(values[start : start + block]).max())
        finite = np.isfinite(largest)
        steps[start : start + block] = max(largest / top, TINY) / 2 if finite else np.nan
    return steps


def travelled(
    flat: NDArray[Any], bounds: list[int], coded: NDArray[np.bool_], bits: int, block: int
) -> NDArray[Any]:
    """A flat buffer as it comes back: each chunk by itself, what is not ``coded`` left alone."""
    found = flat.copy()
    for start, stop in itertools.pairwise(bounds):
        places = start + np.flatnonzero(coded[start:stop])
        found[places] = round_trip(flat[places], bits, block)
    return found


def tree_sum(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """The sum in the canonical order."""
    while len(parts) > 1:
        pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
        parts = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return parts[0]
