"""Regions of many arrays as columns of numbers, so that a million of them needs no loop.

Coordinates are 64-bit integers here, or narrower ones where those do: who makes a table has looked
that they fit. All that is computed from regions of which ``misplaced`` finds none fits 64 bits,
too, as arrays have less than 2**62 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.core.geometry.regions import Box, Range, Region

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Column = NDArray[np.signedinteger[Any]]
"""Integers, of fewer bits where those are enough: they stay, one for each of a million regions."""

_AT_ONCE = 1 << 14
"""Regions that are looked at together: what is computed of them stays in the cache."""

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
        self._place = np.empty(len(shapes), np.int64)  # among the arrays of as many axes
        self._extents: dict[int, Ints] = {}
        for axes in np.unique(self.axes).tolist():
            fitting = np.flatnonzero(self.axes == axes)
            self._place[fitting] = np.arange(len(fitting))
            rows = np.array([shapes[each] for each in fitting.tolist()], np.int64)
            self._extents[axes] = np.ascontiguousarray(rows.reshape(len(fitting), axes).T)

    def extents(self, arrays: Column, axes: int) -> Ints:
        """Return the extents of some arrays along each axis; of one without so many, anything."""
        found = self._extents.get(axes)
        if found is None:
            return np.zeros((axes, len(arrays)), np.int64)
        return found.take(self._place[arrays], axis=1, mode="clip")

    @property
    def largest(self) -> int:
        """No bound of a region of any of the arrays is larger."""
        every = (self.sizes, *self._extents.values())
        return max(int(each.max(initial=0)) for each in every)


@dataclass(frozen=True, eq=False)
class RegionTable:
    """Regions, in an order that their owner knows.

    Attributes:
        axes: of each: that of a box, or ``RANGE``.
        at: where the bounds of each begin.
        bounds: start and stop of a range; all starts of a box, then all of its stops.
    """

    axes: NDArray[np.int8]
    at: Column
    bounds: Column

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
    def packed(cls, axes: NDArray[np.int8], bounds: Column) -> RegionTable:
        """Make a table of regions whose bounds lie one behind the other."""
        widths = bound_counts(axes)
        at = np.cumsum(widths)
        at -= widths
        return cls(axes, narrowed(at, len(bounds)), bounds)

    @classmethod
    def joined(cls, tables: Sequence[RegionTable]) -> RegionTable:
        """Return the regions of all tables, one table behind the other."""
        axes = [each.axes for each in tables] or [np.empty(0, np.int8)]
        behind = np.cumsum([0, *(len(each.bounds) for each in tables)]).tolist()
        at = [each.at + np.int64(shift) for each, shift in zip(tables, behind, strict=False)]
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

    def take(self, which: Column | Flags | slice) -> RegionTable:
        """Return some of the regions, in the order asked for."""
        return RegionTable(self.axes[which], self.at[which], self.bounds)

    def kinds(self, *, whole: bool = False) -> Iterator[tuple[int, Ints | slice, Ints]]:
        """Give for each number of axes that occurs: it, whose it is, and their bounds in columns.

        Args:
            whole: give all of a number of axes together; else it comes again, part by part.
        """
        step = max(len(self), 1) if whole else _AT_ONCE
        for begin in range(0, len(self), step):
            part = self.axes[begin : begin + step]
            if bool((part == part[0]).all()):
                every = slice(begin, begin + len(part))
                yield int(part[0]), every, self._columns(every, int(part[0]))
                continue
            for axes in (np.flatnonzero(np.bincount(part - RANGE)) + RANGE).tolist():
                which = begin + np.flatnonzero(part == axes)
                yield axes, which, self._columns(which, axes)

    def _columns(self, which: Ints | slice, axes: int) -> Ints:
        width = 2 if axes == RANGE else 2 * axes
        at = self.at[which]
        if bool((np.diff(at) == width).all()):
            first = int(at[0])
            rows = self.bounds[first : first + width * len(at)].reshape(len(at), width)
            return rows.T.astype(np.int64, order="C")
        found = np.empty((width, len(at)), np.int64)
        for number, column in enumerate(found):
            column[:] = self.bounds[at + number]
        return found

    @property
    def sizes(self) -> Ints:
        """Elements of each region; counted anew each time."""
        found = np.empty(len(self), np.int64)
        for _, which, columns in self.kinds():
            found[which] = _size(columns)
        return found

    def misplaced(self, arrays: Column, shapes: ShapeTable) -> Ints:
        """Return which regions are none of their arrays, or empty; ascending."""
        wrong = np.empty(len(self), np.bool_)
        for axes, which, columns in self.kinds():
            mine = arrays[which]
            if axes == RANGE:
                start, stop = columns
                wrong[which] = (start < 0) | (stop <= start) | (stop > shapes.sizes[mine])
                continue
            bad = shapes.axes[mine] != axes
            extents = shapes.extents(mine, axes)
            for start, stop, extent in zip(columns, columns[axes:], extents, strict=False):
                bad |= (start < 0) | (stop <= start) | (stop > extent)
            wrong[which] = bad
        return np.flatnonzero(wrong)

    def runs(self, arrays: Column, shapes: ShapeTable) -> tuple[Ints, Ints, Flags]:
        """Return of each region its first element, how many it has, and whether they are one run.

        Args:
            arrays: whose region each is; none is misplaced.
            shapes: of the arrays.
        """
        first, sizes = np.empty((2, len(self)), np.int64)
        run = np.ones(len(self), np.bool_)
        for axes, which, columns in self.kinds():
            size = sizes[which] = _size(columns)
            if axes == RANGE:
                first[which] = columns[0]
                continue
            begin, last = np.zeros((2, columns.shape[1]), np.int64)
            extents = shapes.extents(arrays[which], axes)
            for start, stop, extent in zip(columns, columns[axes:], extents, strict=False):
                begin *= extent
                begin += start
                last *= extent
                last += stop
                last -= 1
            first[which] = begin
            run[which] = last + 1 - begin == size
        return first, sizes, run

    def around(self, shape: Sequence[int]) -> tuple[Ints, Ints]:
        """Return starts and stops of the smallest boxes around regions, all of one array."""
        count = len(shape)
        low, high = np.empty((2, len(self), count), np.int64)
        for axes, which, columns in self.kinds():
            if axes != RANGE:
                low[which], high[which] = columns[:axes].T, columns[axes:].T
                continue
            begin, end = columns[0], columns[1] - 1
            differs = np.zeros(len(begin), np.bool_)
            for axis in range(count):
                inner = math.prod(shape[axis + 1 :])
                first, begin = np.divmod(begin, inner)
                last, end = np.divmod(end, inner)
                low[which, axis] = np.where(differs, 0, first)
                high[which, axis] = np.where(differs, shape[axis], last + 1)
                differs |= first != last
        return low, high

    def firsts(self, arrays: Column) -> Ints:
        """Return for each region the first one that is the same, of the same array."""
        found = np.empty(len(self), np.int64)
        for _, kind, columns in self.kinds(whole=True):
            which = np.arange(len(self))[kind]
            keys = [*columns[::-1], arrays[which]]
            order = np.lexsort(keys)
            new = np.zeros(len(which), np.bool_)
            new[:1] = True
            for key in keys:
                new[1:] |= key[order[1:]] != key[order[:-1]]
            heads = np.flatnonzero(new)
            counts = np.diff(heads, append=len(which))
            found[which[order]] = np.repeat(which[order[heads]], counts)
        return found


def _size(columns: Ints) -> Ints:
    half = len(columns) // 2
    found = np.ones(columns.shape[1], np.int64)
    for start, stop in zip(columns[:half], columns[half:], strict=True):
        found *= stop - start
    return found


def stretches(owners: Column) -> Iterator[slice]:
    """Cut ascending numbers of owners into parts that stay in the cache; no owner is divided."""
    begin = 0
    while begin < len(owners):
        end = begin + _AT_ONCE
        if end < len(owners):
            end = int(np.searchsorted(owners, owners[end - 1], "right"))
        yield slice(begin, end)
        begin = end


def bound_counts(axes: NDArray[Any]) -> Ints:
    """Return how many bounds the regions have that have so many axes."""
    return np.where(axes == RANGE, 2, 2 * axes.astype(np.int64))


def narrowed(numbers: Ints, most: int) -> Column:
    """Return numbers from 0 to ``most``, in as few bits as those need."""
    return numbers.astype(dtype_for(most), copy=False)


def dtype_for(most: int) -> np.dtype[np.signedinteger[Any]]:
    """Return that of as few bits as numbers up to ``most``, and those below 0, need."""
    for dtype in (np.int16, np.int32):
        if most < np.iinfo(dtype).max:
            return np.dtype(dtype)
    return np.dtype(np.int64)
