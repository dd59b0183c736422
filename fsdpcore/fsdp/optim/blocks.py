"""A range of a flattened array cut into blocks, so that sums along its axes can be vectorised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fsdpcore.core.geometry.boxes import ArrayBox


class Matrices(NamedTuple):
    """A shape as a batch of matrices: the last two axes are rows and columns."""

    batches: int
    rows: int
    columns: int

    @classmethod
    def of(cls, shape: Sequence[int]) -> Matrices:
        """Fold all axes before the last two into one; the shape has at least two."""
        *batches, rows, columns = shape
        return cls(int(np.prod(batches, dtype=np.int64)), rows, columns)


class Block(NamedTuple):
    """Consecutive elements: some whole matrices, or rows of one, or a part of a row.

    Attributes:
        start: its first element in the flattened array.
        batches, rows, columns: the indices that it covers.
    """

    start: int
    batches: slice
    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int, int]:
        """Extents: (batches, rows, columns)."""
        batches, rows, columns = (part.stop - part.start for part in self[1:])
        return batches, rows, columns

    @property
    def stop(self) -> int:
        """First element of the flattened array behind it."""
        batches, rows, columns = self.shape
        return self.start + batches * rows * columns


def placed(block: Block, box: ArrayBox) -> Iterator[Block]:
    """Give a block of an array that is itself a box of another, by the indices in that one.

    It is cut where its matrices are no neighbours there.

    Args:
        block: cut out of ``box``, whose elements ``start`` still counts.
        box: the array, of two axes at least.
    """
    row, column = box.start[-2:]
    rows = slice(block.rows.start + row, block.rows.stop + row)
    columns = slice(block.columns.start + column, block.columns.stop + column)
    numbers = np.arange(block.batches.start, block.batches.stop)
    if len(box.shape) > 2:
        inside = np.unravel_index(numbers, box.shape[:-2])
        indices = [index + first for index, first in zip(inside, box.start, strict=False)]
        numbers = np.ravel_multi_index(tuple(indices), box.whole[:-2])
    start, matrix = block.start, block.shape[1] * block.shape[2]
    for run in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1):
        yield Block(start, slice(int(run[0]), int(run[-1]) + 1), rows, columns)
        start += len(run) * matrix


def blocks(start: int, stop: int, whole: Matrices, limit: int) -> Iterator[Block]:
    """Cut elements ``[start, stop)`` of an array in C order into blocks of up to ``limit`` of them.

    They follow each other without a gap. ``limit`` is at least 1.
    """
    matrix = whole.rows * whole.columns
    while start < stop:
        left = min(stop - start, limit)
        batch, place = divmod(start, matrix)
        row, column = divmod(place, whole.columns)
        batches, rows, columns = 1, 1, whole.columns
        if place == 0 and left >= matrix:
            batches, rows = left // matrix, whole.rows
        elif column == 0 and left >= whole.columns:
            rows = min(whole.rows - row, left // whole.columns)
        else:
            columns = min(whole.columns - column, left)
        block = Block(
            start,
            slice(batch, batch + batches),
            slice(row, row + rows),
            slice(column, column + columns),
        )
        yield block
        start = block.stop
