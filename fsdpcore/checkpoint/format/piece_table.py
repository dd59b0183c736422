"""The pieces of all arrays of a checkpoint, in the order in which they lie in the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fsdpcore.checkpoint.format.packing import pack, unpack
from fsdpcore.core.errors import CorruptCheckpointError
from fsdpcore.core.geometry.region_table import (
    RANGE,
    Ints,
    RegionTable,
    ShapeTable,
    bounds_of,
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
    tensor: Ints
    regions: RegionTable
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    @cached_property
    def begins(self) -> Ints:
        """Number of the first piece of each file, and the end of the last one."""
        return _sums(self.counts)

    @cached_property
    def file(self) -> Ints:
        """Number of each piece's file."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def data(self) -> Ints:
        """Bytes of all pieces of each file."""
        return np.diff(_sums(self.nbytes)[self.begins])

    def offsets(self, data_starts: Ints) -> Ints:
        """Return where each piece begins in its file, from where the data of each file do."""
        before = _sums(self.nbytes)
        found: Ints = before[:-1] + np.repeat(data_starts - before[self.begins[:-1]], self.counts)
        return found

    def blocks(self, block_bytes: int) -> tuple[Ints, Ints]:
        """Return the number of each piece's first block in its file, and how many a file has."""
        before = _sums(-(-self.nbytes // block_bytes))
        of_files = before[self.begins]
        first: Ints = before[:-1] - np.repeat(of_files[:-1], self.counts)
        return first, np.diff(of_files)

    @cached_property
    def by_tensor(self) -> tuple[Ints, Ints]:
        """The numbers of the pieces, array by array; and where those of each array begin."""
        order = np.argsort(self.tensor, kind="stable")
        last = int(self.tensor.max(initial=-1)) + 1
        return order, np.searchsorted(self.tensor[order], np.arange(last + 1))

    def of(self, tensor: int) -> Ints:
        """Return the numbers of an array's pieces, ascending."""
        order, begins = self.by_tensor
        return order[begins[tensor] : begins[tensor + 1]] if tensor + 1 < len(begins) else order[:0]

    @cached_property
    def packed(self) -> tuple[str, str, str]:
        """Arrays, kinds and bounds as text, see ``metadata``; made once, for all saves."""
        kinds = (self.regions.axes != RANGE).astype(np.int64)
        bounds = [np.empty(0, np.int64)]
        for axes, which, rows in self.regions.kinds():
            half = 1 if axes == RANGE else axes
            order = np.argsort(self.tensor[which], kind="stable")
            owner = self.tensor[which[order]]
            same = owner[1:] == owner[:-1]
            for column in (*rows[:, :half].T, *(rows[:, half:] - rows[:, :half]).T):
                steps = np.empty(len(which), np.int64)
                sorted_column = column[order]
                steps[order] = np.diff(sorted_column, prepend=0)
                steps[order[1:][~same]] = sorted_column[1:][~same]
                bounds.append(steps)
        tensors = np.diff(self.tensor, prepend=0)
        return pack(tensors), pack(kinds), pack(np.concatenate(bounds))


def unpacked(texts: Sequence[object], count: int, shapes: ShapeTable) -> tuple[Ints, RegionTable]:
    """Return arrays and regions of what ``PieceTable.packed`` wrote; nothing is said of its sense.

    Args:
        texts: three.
        count: how many pieces there are.
        shapes: of the arrays.

    Raises:
        CorruptCheckpointError: these are no numbers, or there is no such array.
    """
    tensor = np.cumsum(unpack(texts[0], count, "the arrays of the pieces"))
    if count and not (tensor.min() >= 0 and tensor.max() < len(shapes.shapes)):
        raise CorruptCheckpointError(
            f"pieces are of arrays from {tensor.min()} to {tensor.max()}, but there are "
            f"{len(shapes.shapes)}"
        )
    axes = _axes(unpack(texts[1], count, "the kinds of the pieces"), shapes.axes[tensor])
    size = int(bounds_of(axes).sum())
    steps = unpack(texts[2], size, "the bounds of the pieces")
    regions = RegionTable.packed(axes, np.empty(size, np.int64))
    for kind in np.unique(axes).tolist():
        which = np.flatnonzero(axes == kind)
        half = 1 if kind == RANGE else kind
        _add_up(steps, tensor[which], regions.bounds, regions.at[which], half)
        steps = steps[2 * half * len(which) :]
    return tensor, regions


def _axes(kinds: Ints, axes: Ints) -> NDArray[np.int8]:
    """Return the numbers of axes of regions, from their kinds and those of their arrays."""
    if len(kinds) and not (kinds.min() >= 0 and kinds.max() <= 1):
        raise CorruptCheckpointError("a piece is neither a range nor a box")
    return np.where(kinds == 0, RANGE, axes).astype(np.int8)


def _add_up(steps: Ints, owner: Ints, bounds: Ints, at: Ints, half: int) -> None:
    """Set the bounds of regions that have so many starts, from columns of steps."""
    order = np.argsort(owner, kind="stable")
    owner, at = owner[order], at[order]
    heads = np.flatnonzero(np.diff(owner, prepend=-1))
    lengths = np.diff(heads, append=len(owner))
    for number in range(2 * half):
        column = np.cumsum(steps[number * len(at) : (number + 1) * len(at)][order])
        before = np.where(heads > 0, column[heads - 1], 0)
        column -= np.repeat(before, lengths)
        if number >= half:  # extents, which make stops of starts
            column += bounds[at + (number - half)]
        bounds[at + number] = column


def _sums(numbers: Ints) -> Ints:
    """Return the sums of all numbers before each, and of all."""
    found = np.zeros(len(numbers) + 1, np.int64)
    np.cumsum(numbers, out=found[1:])
    return found
