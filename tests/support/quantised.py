"""An oracle for quantised arrays: in float64, block by block, and with whole matrices."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

TINY = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)

KINDS = ("normal", "zeros", "denormal", "huge", "outlier", "ties")
"""Of ``values_of``."""


def step_of(part: NDArray[Any], bits: int) -> float:
    """The smallest step with which no value is off by more than half of it.

    The integers reach one further below zero than above it; either end may be that one, unless
    what is rounded to it would be inf.
    """
    half = 2.0 ** (bits - 1)
    above, below = max(0.0, float(part.max())), max(0.0, -float(part.min()))
    ends = (above / (half + 0.5), below / (half - 0.5))
    turned = (below / (half + 0.5), above / (half - 0.5))
    step = max(min(max(ends), max(turned)), TINY)
    return step if step * half <= LARGEST else LARGEST / (half - 0.5)


def round_trip(values: NDArray[Any], bits: int, block: int) -> NDArray[Any]:
    """Values that no rotation changes, as they come back; each is off by half a step at most.

    Known from this: the step, and towards which end the integers reach further.
    """
    back = np.empty_like(values)
    for start in range(0, values.size, block):
        part = values[start : start + block]
        largest = np.abs(part).max()
        if not np.isfinite(largest):
            back[start : start + block] = largest
            continue
        # A little more than the step: no value is rounded to beyond the last integer.
        half = 2 ** (bits - 1)
        above, below = max(part.max(), np.float32(0)), max(-part.min(), np.float32(0))
        ends = np.float32(half + 0.4999), np.float32(half - 1 + 0.4999)
        scale = max(max(above, below) / ends[0], min(above, below) / ends[1], np.float32(TINY))
        if scale > np.float32(LARGEST) / half:  # what is rounded up would be inf
            scale = np.float32(LARGEST) / ends[1]
        sign = np.float32(-1 if above > below else 1)
        back[start : start + block] = np.rint(part * (1 / (scale * sign))) * (scale * sign)
    return back


def half_steps(values: NDArray[Any], bits: int, block: int) -> NDArray[Any]:
    """Half a step of the scale of each value's block; nan where a block is not finite."""
    steps = np.empty(values.size)
    for start in range(0, values.size, block):
        part = values[start : start + block]
        steps[start : start + block] = (
            step_of(part, bits) / 2 if np.isfinite(part).all() else np.nan
        )
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


def values_of(kind: str, size: int, seed: int) -> NDArray[np.float32]:
    """Draw values, the hard ones of one of ``KINDS``."""
    rng = np.random.default_rng(seed)
    found: Any = rng.standard_normal(size)
    if kind == "zeros":
        found = np.zeros(size) * rng.choice([-1, 1], size)
    elif kind == "denormal":
        found = found * 2.0**-140
    elif kind == "huge":
        found = rng.choice([-1, 1], size) * rng.uniform(0.1, 1, size) * np.finfo(np.float32).max
    elif kind == "outlier":
        found = np.where(rng.random(size) < 0.05, 1e4, found)
    elif kind == "ties":
        found = rng.integers(-254, 255, size) / 2
    return found.astype(np.float32)
