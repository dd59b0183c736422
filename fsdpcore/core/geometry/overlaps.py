"""Find two of many ranges, or of many boxes, that overlap, without comparing every pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Run = tuple[int, int, int]
"""Start and stop of a range that is not empty, and whose it is."""

Extent = tuple[tuple[int, ...], tuple[int, ...], int]
"""Start and stop of a box that is not empty, and whose it is."""

Coordinates = NDArray[Any]

_FEW = 256
"""So many boxes are compared pair by pair."""

_AT_ONCE = 1 << 20
"""Pairs that are compared in one go, which takes a few bytes each."""

_WORTH_IT = 0.95
"""What a cut must leave of the number of pairs, at most."""


def overlapping_ranges(runs: list[Run]) -> tuple[int, int] | None:
    """Return the owners, ascending, of two runs that overlap; None if none do. Sorts ``runs``."""
    runs.sort()
    behind, before = 0, -1
    for start, stop, owner in runs:
        if start < behind:
            return _ascending(before, owner)
        behind, before = stop, owner
    return None


def overlapping_boxes(boxes: Sequence[Extent]) -> tuple[int, int] | None:
    """Return the owners, ascending, of two boxes that overlap; None if none do.

    The boxes are divided by planes, a box that is cut going to both sides, until few are left or no
    plane helps; then all pairs of a part are compared. Two that overlap share an element, and so
    the side that it is on. A plane is used only if it leaves fewer pairs, hence no arrangement of
    boxes costs much more than to compare all pairs; planes alone settle grids and the like.
    """
    if not boxes:
        return None
    pair = overlapping_coordinates(*_coordinates(boxes))
    return None if pair is None else _ascending(*(boxes[i][2] for i in pair))


def overlapping_coordinates(starts: Coordinates, stops: Coordinates) -> tuple[int, int] | None:
    """Return the positions of two boxes that overlap, given as rows; None if none do."""
    parts = [np.arange(len(starts))]
    while parts:
        part = parts.pop()
        low, high = starts[part], stops[part]
        plane = _best_plane(low, high) if len(part) > _FEW else None
        if plane is not None:
            axis, at = plane
            parts += [part[high[:, axis] > at], part[low[:, axis] < at]]
            continue
        pair = _overlapping_pair(low, high)
        if pair is not None:
            return int(part[pair[0]]), int(part[pair[1]])
    return None


def _coordinates(boxes: Sequence[Extent]) -> tuple[Coordinates, Coordinates]:
    """Return the starts and stops as arrays of shape (boxes, axes).

    Python's own ints are left in them if one would not fit NumPy's.
    """
    largest = max((bound for _, stop, _ in boxes for bound in stop), default=0)
    dtype = np.int64 if largest < 1 << 63 else object
    starts, stops, _ = zip(*boxes, strict=True)
    return np.array(starts, dtype), np.array(stops, dtype)


def _best_plane(low: Coordinates, high: Coordinates) -> tuple[int, Any] | None:
    """Return axis and position of the plane that leaves the fewest pairs; None if too many.

    A plane at a stop is as good as any: between two stops, only more boxes begin on its left.
    """
    count = len(low)
    fewest, best = _WORTH_IT * count**2, None
    for axis in range(low.shape[1]):
        begins, ends = np.sort(low[:, axis]), np.sort(high[:, axis])
        left = np.searchsorted(begins, ends, "left")
        right = count - np.searchsorted(ends, ends, "right")
        pairs = left**2 + right**2
        least = int(pairs.argmin())
        if pairs[least] < fewest:
            fewest, best = pairs[least], (axis, ends[least])
    return best


def _overlapping_pair(low: Coordinates, high: Coordinates) -> tuple[int, int] | None:
    """Return the positions of two boxes that overlap, comparing all pairs; None if none do."""
    count, axes = low.shape
    rows = max(1, _AT_ONCE // count)
    for first in range(0, count, rows):
        behind = min(first + rows, count)
        hit = np.tri(behind - first, count - first, dtype=np.bool_)
        np.logical_not(hit, out=hit)  # each pair once, and no box with itself
        for axis in range(axes):
            lows, highs = low[first:, axis], high[first:, axis]
            hit &= low[first:behind, axis, None] < highs
            hit &= lows < high[first:behind, axis, None]
        if hit.any():
            row, column = divmod(int(hit.argmax()), count - first)
            return first + row, first + column
    return None


def _ascending(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a < b else (b, a)
