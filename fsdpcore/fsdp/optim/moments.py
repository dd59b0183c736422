"""Second moments of Adafactor, of one parameter's piece, during one update.

They give the directions of the update, gradient over root of the second moment, block by block.
All of it is computed in float64; state is stored in the parameter's dtype. Arrays are NumPy's, or
CuPy's, whose functions NumPy's call; numbers then stay on the GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsdpcore.core.array_module import array_module
from fsdpcore.fsdp.optim.blocks import Block, Matrices, blocks, placed
from fsdpcore.fsdp.optim.exact import Float64, rounded
from fsdpcore.fsdp.optim.pieces import ShardPiece

BLOCK = 64 * 1024
"""Elements at a time; of float64, so that two blocks stay in the cache."""

GPU_BLOCK = 4 * 2**20
"""The same on a GPU, where each operation is a launch of its own."""


class MomentScratch(NamedTuple):
    """Two arrays for a block of any of the pieces, which are where the pieces are."""

    first: Float64
    second: Float64

    @classmethod
    def of(cls, pieces: Sequence[ShardPiece]) -> MomentScratch:
        """Allocate them."""
        module: Any = array_module(pieces[0].param) if pieces else np
        most = BLOCK if module is np else GPU_BLOCK
        size = min(most, max((piece.size for piece in pieces), default=0))
        return cls(module.empty(size, np.float64), module.empty(size, np.float64))

    def blocks(self, size: int) -> Iterator[slice]:
        """Cut ``[0, size)`` into ranges that fit."""
        most = self.first.size
        for start in range(0, size, max(1, most)):
            yield slice(start, min(start + most, size))


class SecondMoments(ABC):
    """Those of one parameter; ``measure``, then ``settle``, then ``directions`` any often."""

    def __init__(self, piece: ShardPiece, grad_scale: float, scratch: MomentScratch):
        self._piece = piece
        self._grad_scale = grad_scale
        self._scratch = scratch

    @property
    @abstractmethod
    def sums(self) -> int:
        """Numbers that have to be summed over the ranks."""

    @abstractmethod
    def compare(self, largest: Float64) -> None:
        """Write the largest square that this rank adds to each number to ``largest``, of zeros."""

    @abstractmethod
    def measure(self, sums: Float64, largest: Float64 | None) -> None:
        """Write this rank's part of the numbers to ``sums``, which is zero.

        Sums of all ranks are exact if ``largest`` is what ``compare`` has found on all of them.
        """

    @abstractmethod
    def settle(self, sums: Float64, beta: float, eps: float) -> None:
        """Update the state, given the numbers of all ranks together."""

    @abstractmethod
    def directions(self) -> Iterator[tuple[slice, Float64]]:
        """Yield ranges of the piece and the directions there, in scratch memory."""

    def _gradient(self, local: slice) -> Float64:
        """Return a block of the scaled gradient in the first scratch array."""
        values = self._scratch.first[: local.stop - local.start]
        np.copyto(values, self._piece.grad[local])
        if self._grad_scale != 1.0:
            np.multiply(values, self._grad_scale, out=values)
        return values


class Elementwise(SecondMoments):
    """Of a parameter that is no matrix: one second moment per element."""

    @property
    def sums(self) -> int:
        return 0

    def compare(self, largest: Float64) -> None:
        pass

    def measure(self, sums: Float64, largest: Float64 | None) -> None:
        pass

    def settle(self, sums: Float64, beta: float, eps: float) -> None:
        variance = self._piece.state["variance"]
        for local in self._scratch.blocks(self._piece.size):
            values = self._gradient(local)
            np.multiply(values, values, out=values)
            np.add(values, eps, out=values)
            np.multiply(values, 1.0 - beta, out=values)
            block = variance[local]
            np.multiply(block, beta, out=block)
            np.add(block, values, out=block)

    def directions(self) -> Iterator[tuple[slice, Float64]]:
        variance = self._piece.state["variance"]
        for local in self._scratch.blocks(self._piece.size):
            values = self._gradient(local)
            root = self._scratch.second[: values.size]
            np.copyto(root, variance[local])
            np.sqrt(root, out=root)
            np.divide(values, root, out=values)
            yield local, values


class Factored(SecondMoments):
    """Of a matrix, or a batch of them: means of rows and of columns."""

    def __init__(self, piece: ShardPiece, grad_scale: float, scratch: MomentScratch):
        super().__init__(piece, grad_scale, scratch)
        self._whole = Matrices.of(piece.shape)
        self._own = self._whole if piece.box is None else Matrices.of(piece.box.shape)
        self._row_scale: Float64 | None = None
        self._column_scale: Float64 | None = None

    @property
    def sums(self) -> int:
        return self._whole.batches * (self._whole.rows + self._whole.columns)

    def compare(self, largest: Float64) -> None:
        rows, columns = self._split(largest)
        for block, cube in self._squares():
            row, column = rows[block.batches, block.rows], columns[block.batches, block.columns]
            np.maximum(row, cube.max(axis=2), out=row)
            np.maximum(column, cube.max(axis=1), out=column)

    def measure(self, sums: Float64, largest: Float64 | None) -> None:
        rows, columns = self._split(sums)
        for block, cube in self._squares():
            row, column = rows[block.batches, block.rows], columns[block.batches, block.columns]
            if largest is None:
                row += cube.sum(axis=2)
                column += cube.sum(axis=1)
                continue
            by_row, by_column = self._split(largest)
            most = by_row[block.batches, block.rows, None]
            out = self._scratch.second[: cube.size].reshape(cube.shape)
            row += rounded(cube, most, self._whole.columns, out).sum(axis=2)
            most = by_column[block.batches, None, block.columns]
            column += rounded(cube, most, self._whole.rows, out).sum(axis=1)

    def _squares(self) -> Iterator[tuple[Block, Float64]]:
        """Yield blocks, and the squares of the gradient there, in the first scratch array."""
        for block, local in self._blocks():
            values = self._gradient(local)
            np.multiply(values, values, out=values)
            yield block, values.reshape(block.shape)

    def settle(self, sums: Float64, beta: float, eps: float) -> None:
        rows, columns = self._split(sums)
        row = self._averaged("row_var", rows / self._whole.columns, beta, eps)
        column = self._averaged("col_var", columns / self._whole.rows, beta, eps)
        self._row_scale = 1.0 / np.sqrt(row / row.mean(axis=1, keepdims=True))
        self._column_scale = 1.0 / np.sqrt(column)

    def directions(self) -> Iterator[tuple[slice, Float64]]:
        row_scale, column_scale = self._row_scale, self._column_scale
        assert row_scale is not None
        assert column_scale is not None
        for block, local in self._blocks():
            values = self._gradient(local)
            cube = values.reshape(block.shape)
            np.multiply(cube, row_scale[block.batches, block.rows, None], out=cube)
            np.multiply(cube, column_scale[block.batches, None, block.columns], out=cube)
            yield local, values

    def _averaged(self, name: str, values: Float64, beta: float, eps: float) -> Float64:
        """Return the new moving mean, as it was rounded for the state."""
        state: NDArray[Any] = self._piece.state[name]
        state[:] = beta * state.astype(np.float64) + (1.0 - beta) * (values.reshape(-1) + eps)
        return state.astype(np.float64).reshape(values.shape)

    def _split(self, sums: Float64) -> tuple[Float64, Float64]:
        batches, rows, columns = self._whole
        first = sums[: batches * rows].reshape(batches, rows)
        return first, sums[batches * rows :].reshape(batches, columns)

    def _blocks(self) -> Iterator[tuple[Block, slice]]:
        start, stop, box = self._piece.start, self._piece.stop, self._piece.box
        for found in blocks(start, stop, self._own, self._scratch.first.size):
            for block in [found] if box is None else placed(found, box):
                yield block, slice(block.start - start, block.stop - start)
