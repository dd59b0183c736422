"""Regions of many arrays as columns of numbers, so that a million of them needs no loop.

Coordinates are 64-bit integers here: who makes a table has looked that they fit. All that is
computed from regions of which ``misplaced`` finds none fits, too, as arrays have less than 2**62
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.core.geometry.regions import Box, Range, Region

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

RANGE = -1
"""In place of a number of axes: the region is a range."""


class ShapeTable:
    """The shapes of arrays, by their numbers.

    Args:
        shapes: of all of them.

    Attributes:
        shapes: the same.
        axes: of each array.
        sizes: elements of each array.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.axes: Ints = np.array([len(shape) for shape in shapes], np.int64)
        self.sizes: Ints = np.array([math.prod(shape) for shape in shapes], np.int64)

    def extents(self, arrays: Ints, axes: int) -> Ints:
        """Return the shapes of some arrays, all of which have so many axes, as rows."""
        fitting = np.flatnonzero(self.axes == axes)
        rows = np.array([self.shapes[each] for each in fitting.tolist()], np.int64)
        found: Ints = rows.reshape(len(fitting), axes)[np.searchsorted(fitting, arrays)]
        return found


@dataclass(frozen=True, eq=False)
class RegionTable:
    """Regions, in an order that their owner knows.

    Attributes:
        axes: of each: that of a box, or ``RANGE``.
        at: where the bounds of each begin.
        bounds: start and stop of a range; all starts of a box, then all of its stops.
    """

    axes: NDArray[np.int8]
    at: Ints
    bounds: Ints

    @classmethod
    def of(cls, regions: Sequence[Region]) -> RegionTable:
        """Make a table of regions; their coordinates fit into 64 bits."""
        axes = [RANGE if isinstance(each, Range) else len(each.start) for each in regions]
        bounds: list[int] = []
        for each in regions:
            if isinstance(each, Range):
                bounds += (each.start, each.stop)
            else:
                bounds += (*each.start, *each.stop)
        return cls.packed(np.array(axes, np.int8), np.array(bounds, np.int64))

    @classmethod
    def packed(cls, axes: NDArray[np.int8], bounds: Ints) -> RegionTable:
        """Make a table of regions whose bounds lie one behind the other."""
        widths = bounds_of(axes)
        return cls(axes, np.cumsum(widths) - widths, bounds)

    @classmethod
    def joined(cls, tables: Sequence[RegionTable]) -> RegionTable:
        """Return the regions of all tables, one table behind the other."""
        axes = [each.axes for each in tables] or [np.empty(0, np.int8)]
        behind = np.cumsum([0, *(len(each.bounds) for each in tables)]).tolist()
        at = [each.at + shift for each, shift in zip(tables, behind, strict=False)]
        bounds = [each.bounds for each in tables] or [np.empty(0, np.int64)]
        return cls(
            np.concatenate(axes),
            np.concatenate(at or [np.empty(0, np.int64)]),
            np.concatenate(bounds),
        )

    def __len__(self) -> int:
        return len(self.axes)

    def __getitem__(self, number: int) -> Region:
        axes, at = int(self.axes[number]), int(self.at[number])
        if axes == RANGE:
            start, stop = self.bounds[at : at + 2].tolist()
            return Range(start, stop)
        bounds = self.bounds[at : at + 2 * axes].tolist()
        return Box(tuple(bounds[:axes]), tuple(bounds[axes:]))

    def take(self, which: Ints | Flags) -> RegionTable:
        """Return some of the regions, in the order asked for."""
        return RegionTable(self.axes[which], self.at[which], self.bounds)

    def kinds(self) -> Iterator[tuple[int, Ints, Ints]]:
        """Give for each number of axes that occurs: it, whose it is, and their bounds as rows."""
        for axes in np.unique(self.axes).tolist():
            which = np.flatnonzero(self.axes == axes)
            yield axes, which, self._rows(which, axes)

    def _rows(self, which: Ints, axes: int) -> Ints:
        width = 2 if axes == RANGE else 2 * axes
        if len(which) == len(self) and len(self.bounds) == width * len(which):
            at = self.at
            if len(at) < 2 or bool((at[1:] > at[:-1]).all()):
                return self.bounds.reshape(len(which), width)
        found: Ints = self.bounds[self.at[which][:, None] + np.arange(width)]
        return found

    @cached_property
    def sizes(self) -> Ints:
        """Elements of each region."""
        found = np.empty(len(self), np.int64)
        for axes, which, rows in self.kinds():
            half = 1 if axes == RANGE else axes
            found[which] = np.prod(rows[:, half:] - rows[:, :half], axis=1)
        return found

    def misplaced(self, arrays: Ints, shapes: ShapeTable) -> Ints:
        """Return which regions are none of their arrays, or empty; ascending."""
        wrong = np.zeros(len(self), np.bool_)
        for axes, which, rows in self.kinds():
            if axes == RANGE:
                start, stop = rows.T
                wrong[which] = (start < 0) | (stop <= start) | (stop > shapes.sizes[arrays[which]])
                continue
            fits = shapes.axes[arrays[which]] == axes
            wrong[which[~fits]] = True
            which, rows = which[fits], rows[fits]
            low, high = rows[:, :axes], rows[:, axes:]
            inside = (low >= 0) & (low < high) & (high <= shapes.extents(arrays[which], axes))
            wrong[which] = ~inside.all(axis=1)
        return np.flatnonzero(wrong)

    def runs(self, arrays: Ints, shapes: ShapeTable) -> tuple[Ints, Flags]:
        """Return of each region its first element, and whether its elements are one run.

        Args:
            arrays: whose region each is; none is misplaced.
            shapes: of the arrays.
        """
        first = np.empty(len(self), np.int64)
        run = np.ones(len(self), np.bool_)
        for axes, which, rows in self.kinds():
            if axes == RANGE:
                first[which] = rows[:, 0]
                continue
            extents = shapes.extents(arrays[which], axes)
            begin, last = np.zeros((2, len(which)), np.int64)
            for axis in range(axes):
                begin = begin * extents[:, axis] + rows[:, axis]
                last = last * extents[:, axis] + rows[:, axes + axis] - 1
            first[which] = begin
            run[which] = last + 1 - begin == self.sizes[which]
        return first, run

    def around(self, shape: Sequence[int]) -> tuple[Ints, Ints]:
        """Return starts and stops of the smallest boxes around regions, all of one array."""
        count = len(shape)
        low, high = np.empty((2, len(self), count), np.int64)
        for axes, which, rows in self.kinds():
            if axes != RANGE:
                low[which], high[which] = rows[:, :axes], rows[:, axes:]
                continue
            begin, end = rows[:, 0].copy(), rows[:, 1] - 1
            differs = np.zeros(len(which), np.bool_)
            for axis in range(count):
                inner = math.prod(shape[axis + 1 :])
                first, begin = np.divmod(begin, inner)
                last, end = np.divmod(end, inner)
                low[which, axis] = np.where(differs, 0, first)
                high[which, axis] = np.where(differs, shape[axis], last + 1)
                differs |= first != last
        return low, high

    def firsts(self, arrays: Ints) -> Ints:
        """Return for each region the first one that is the same, of the same array."""
        found = np.empty(len(self), np.int64)
        for _, which, rows in self.kinds():
            keys = [*rows.T[::-1], arrays[which]]
            order = np.lexsort(keys)
            new = np.zeros(len(which), np.bool_)
            new[:1] = True
            for key in keys:
                new[1:] |= key[order[1:]] != key[order[:-1]]
            heads = np.flatnonzero(new)
            counts = np.diff(heads, append=len(which))
            found[which[order]] = np.repeat(which[order[heads]], counts)
        return found


def bounds_of(axes: NDArray[Any]) -> Ints:
    """Return how many bounds the regions have that have so many axes."""
    return np.where(axes == RANGE, 2, 2 * axes.astype(np.int64))
