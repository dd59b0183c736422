"""Regions of an array by brute force, as masks over all of its elements, and random ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fsdpcore.core.geometry.regions import Box, Range, Region


def mask(region: Region, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which elements of the array are in the region."""
    found = np.zeros(shape, bool)
    if isinstance(region, Range):
        found.reshape(-1)[region.start : region.stop] = True
    else:
        found[tuple(map(slice, region.start, region.stop))] = True
    return found


def elements(region: Region, shape: tuple[int, ...]) -> list[int]:
    """The region's elements, each by its position in the flattened array, in C order."""
    whole = np.arange(math.prod(shape)).reshape(shape)
    return [int(element) for element in whole[mask(region, shape)]]


def plain(value: object) -> bool:
    """Whether there is nothing but Python's own ints in it: no bool, no number of NumPy."""
    if isinstance(value, (tuple, list)):
        return all(plain(item) for item in value)
    if isinstance(value, (Box, Range)):
        return plain(value.start) and plain(value.stop)
    return type(value) is int


def shapes(largest: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of 0 to 4 axes, with extents from 0, often 1."""
    extent = st.integers(1, largest) | st.sampled_from([0, 1, 2, 3])
    return st.lists(extent, max_size=4).map(tuple)


def ranges(shape: tuple[int, ...]) -> st.SearchStrategy[Range]:
    bound = st.integers(0, math.prod(shape))
    return st.tuples(bound, bound).map(lambda pair: Range(min(pair), max(pair)))


def boxes(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    spans = [st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape]
    return st.tuples(*spans).map(
        lambda found: Box(tuple(a for a, _ in found), tuple(b for _, b in found))
    )


def regions(shape: tuple[int, ...]) -> st.SearchStrategy[Region]:
    return ranges(shape) | boxes(shape)


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...], most: int = 12) -> list[Region]:
    """Disjoint boxes and ranges: parts of the array, cut again and again, some left out."""
    parts = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, most - 1))):
        number = draw(st.integers(0, len(parts) - 1))
        box = parts[number]
        axes = [axis for axis, extent in enumerate(box.shape) if extent > 1]
        if axes:
            axis = draw(st.sampled_from(axes))
            at = draw(st.integers(box.start[axis] + 1, box.stop[axis] - 1))
            parts[number] = Box(box.start, _with(box.stop, axis, at))
            parts.append(Box(_with(box.start, axis, at), box.stop))
    kept = draw(st.permutations(parts))[draw(st.integers(0, 2)) :]
    return [_maybe_range(box, shape) if draw(st.booleans()) else box for box in kept]


def _with(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


def _maybe_range(box: Box, shape: tuple[int, ...]) -> Region:
    """The same elements as a range if they follow each other."""
    found = elements(box, shape)
    gapless = bool(found) and found[-1] - found[0] == len(found) - 1
    return Range(found[0], found[-1] + 1) if gapless else box
