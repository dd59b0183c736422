"""The pieces of all arrays of a checkpoint, in the order in which they lie in the files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fsdpcore.checkpoint.format.packing import pack, unpack, unpack_parts
from fsdpcore.core.errors import CorruptCheckpointError
from fsdpcore.core.geometry.region_table import (
    RANGE,
    Column,
    Ints,
    RegionTable,
    ShapeTable,
    bound_counts,
    dtype_for,
    narrowed,
)


@dataclass(frozen=True, eq=False)
class PieceTable:
    """Columns with a row for each piece.

    Where a piece begins in its file follows from those before it, which leave no gaps.

    Attributes:
        counts: pieces of each file.
        tensor: number of the array that each piece is of.
        regions: which elements of it.
        nbytes: of each piece.
    """

    counts: Ints
    tensor: Column
    regions: RegionTable
    nbytes: Column

    def __len__(self) -> int:
        return len(self.tensor)

    @cached_property
    def begins(self) -> Ints:
        """Number of the first piece of each file, and the end of the last one."""
        return _sums(self.counts)

    @cached_property
    def file(self) -> Column:
        """Number of each piece's file."""
        return np.repeat(narrowed(np.arange(len(self.counts)), len(self.counts)), self.counts)

    @cached_property
    def data(self) -> Ints:
        """Bytes of all pieces of each file."""
        return np.diff(_sums(self.nbytes)[self.begins])

    def offsets(self, data_starts: Ints) -> Column:
        """Return where each piece begins in its file, from where the data of each file do."""
        found = _sums(self.nbytes)
        before = data_starts - found[self.begins[:-1]]
        found = found[:-1]
        found += np.repeat(before, self.counts)
        return narrowed(found, int(found.max(initial=0)))

    def blocks(self, block_bytes: int) -> Ints:
        """Return the number of each piece's first block among those of all, and how many."""
        return _sums(-(-self.nbytes // np.int64(block_bytes)))

    @cached_property
    def by_tensor(self) -> tuple[Column, Ints]:
        """The numbers of the pieces, array by array; and where those of each array begin."""
        order = np.argsort(self.tensor, kind="stable")
        last = int(self.tensor.max(initial=-1)) + 1
        begins = np.searchsorted(self.tensor[order], np.arange(last + 1))
        return narrowed(order, len(order)), begins

    def of(self, tensor: int) -> Column:
        """Return the numbers of an array's pieces, ascending."""
        order, begins = self.by_tensor
        return order[begins[tensor] : begins[tensor + 1]] if tensor + 1 < len(begins) else order[:0]

    @cached_property
    def packed(self) -> tuple[str, str, str]:
        """Arrays, kinds and bounds as text, see ``metadata``; made once, for all saves."""
        kinds = (self.regions.axes != RANGE).astype(np.int64)
        bounds = [np.empty(0, np.int64)]
        for _, which, columns in self.regions.kinds(whole=True):
            half = len(columns) // 2
            columns[half:] -= columns[:half]
            owner = self.tensor[which]
            order = np.argsort(owner, kind="stable")
            owner = owner[order]
            same = owner[1:] == owner[:-1]
            for column in columns:
                steps = np.empty(len(owner), np.int64)
                sorted_column = column[order]
                steps[order] = np.diff(sorted_column, prepend=0)
                steps[order[1:][~same]] = sorted_column[1:][~same]
                bounds.append(steps)
        tensors = np.diff(self.tensor, prepend=0)
        return pack(tensors), pack(kinds), pack(np.concatenate(bounds))


def unpacked(texts: Sequence[object], count: int, shapes: ShapeTable) -> tuple[Column, RegionTable]:
    """Return arrays and regions of what ``PieceTable.packed`` wrote; nothing is said of its sense.

    A bound that no array can have may come back as another one that none can have.

    Args:
        texts: three.
        count: how many pieces there are.
        shapes: of the arrays.

    Raises:
        CorruptCheckpointError: these are no numbers, or there is no such array.
    """
    numbers = np.cumsum(unpack(texts[0], count, "the arrays of the pieces"), dtype=np.int64)
    if count and not (numbers.min() >= 0 and numbers.max() < len(shapes.shapes)):
        raise CorruptCheckpointError(
            f"pieces are of arrays from {numbers.min()} to {numbers.max()}, but there are "
            f"{len(shapes.shapes)}"
        )
    tensor = narrowed(numbers, len(shapes.shapes))
    del numbers
    axes = _axes(unpack(texts[1], count, "the kinds of the pieces"), shapes.axes[tensor])
    regions = RegionTable.packed(
        axes, np.empty(int(bound_counts(axes).sum()), dtype_for(shapes.largest))
    )
    kinds, counts = np.unique(axes, return_counts=True)
    halves = [1 if kind == RANGE else kind for kind in kinds.tolist()]
    sizes = np.repeat(counts, 2 * np.array(halves, np.int64)).tolist()
    columns = unpack_parts(texts[2], sizes, "the bounds of the pieces")
    for kind, half in zip(kinds.tolist(), halves, strict=True):
        _add_up(columns, np.flatnonzero(axes == kind), tensor, regions, half)
    next(columns, None)  # looks that there is nothing behind the last one
    return tensor, regions


def _axes(kinds: Column, axes: Ints) -> NDArray[np.int8]:
    """Return the numbers of axes of regions, from their kinds and those of their arrays."""
    if len(kinds) and not (kinds.min() >= 0 and kinds.max() <= 1):
        raise CorruptCheckpointError("a piece is neither a range nor a box")
    return np.where(kinds == 0, RANGE, axes).astype(np.int8)


def _add_up(
    columns: Iterator[Column], which: Ints, tensor: Column, regions: RegionTable, half: int
) -> None:
    """Set the bounds of regions that have so many starts, from columns of steps."""
    owner = tensor[which]
    order = narrowed(np.argsort(owner, kind="stable"), len(owner))
    heads = np.flatnonzero(np.diff(owner[order], prepend=-1))
    at = regions.at[which][order]
    del which, owner  # of what is needed for each of a million pieces, little is kept
    bounds, limits = regions.bounds, np.iinfo(regions.bounds.dtype)
    for number in range(2 * half):
        sums = next(columns)[order].astype(np.int64, copy=False)
        of_each = np.add.reduceat(sums, heads)
        sums[heads[1:]] -= of_each[:-1]  # each array's begin anew
        np.cumsum(sums, out=sums)
        if number >= half:  # extents, which make stops of starts
            sums += bounds[at + (number - half)]
        bounds[at + number] = np.clip(sums, limits.min, limits.max, out=sums)


def _sums(numbers: Ints) -> Ints:
    """Return the sums of all numbers before each, and of all."""
    found = np.zeros(len(numbers) + 1, np.int64)
    np.cumsum(numbers, out=found[1:])
    return found
