"""Blocks of float32 as integers of 8 or 4 bits with a scale each, and back.

A block of values ``x`` travels as one float32 ``scale`` and integers ``rint(x / scale)``, with 4
bits from -8 to 7. What comes back is ``scale * integer``, which differs by no more than half a
scale. It is the smallest scale for which this holds. The integers reach one further below zero than
above it, so the scale has the other sign than the largest value; both ends are off by half a scale.
For 64 normal numbers and 4 bits, the squares of the error are a quarter smaller than with a scale
of ``max|x| / 7``. Scales are never below the
smallest normal number, so that zeros and denormals need no rule of their own. A block with inf or
nan comes back as inf or nan everywhere: it is found by whoever looks, and spreads no further than
the block.

With *rotation* the values are first multiplied by fixed signs and by a Hadamard matrix, in log2 of
the block's size many passes of sums and differences. That spreads an outlier over its block, and so
makes the scale smaller. The way back is the same, in reverse.

Work is done in tiles that stay in a core's second-level cache, with blocks in columns, so that all
of NumPy's loops are long. Numba, where it is installed, makes the same bits in fewer passes.

On the wire, blocks are in order: first all scales, then the integers of each block. Of 4 bits,
those of the first half of a block are in the lower halves of the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.compress import kernels
from fsdpcore.core import compiling

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

TILE = 63 * 1024
"""Elements that are worked on at once, at most.

Not a power of two: rows of such a length would displace each other from the cache.
"""

_SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)
_SCALE_BYTES = 4
# The largest value is half a step beyond the last integer; a little less, so that it is not rounded
# to the next one.
_REACH = 0.4999
_ROWS = 1024
ROUNDING = np.float32(3 << 22)
"""Added to a small number, it leaves the nearest integer, ties to even, in the lowest bits."""


@dataclass(frozen=True)
class Format:
    """How values travel.

    Attributes:
        bits: of an integer: 8 or 4.
        block: values that share a scale; a power of two.
        rotation: blocks are rotated.
    """

    bits: int
    block: int
    rotation: bool

    @property
    def width(self) -> int:
        """Bytes of the integers of a block."""
        return self.block * self.bits // 8

    @property
    def reach(self) -> tuple[np.float32, np.float32]:
        """How many scales the integers reach on their longer side, and on the other one."""
        most = 1 << (self.bits - 1)
        return np.float32(most + _REACH), np.float32(most - 1 + _REACH)

    def blocks(self, size: int) -> int:
        """How many blocks so many values have; the last one may be filled up with zeros."""
        return -(-size // self.block)

    def nbytes(self, size: int) -> int:
        """Bytes that so many values take."""
        return self.blocks(size) * (_SCALE_BYTES + self.width)

    def parts(self, packed: Bytes) -> tuple[Floats, Bytes]:
        """Return where in packed bytes the scales are, and the integers, by block."""
        count = packed.size // (_SCALE_BYTES + self.width)
        border = _SCALE_BYTES * count
        return packed[:border].view(np.float32), packed[border:].reshape(count, self.width)

    @cached_property
    def signs(self) -> Floats:
        """What the values of a block are multiplied by before they are rotated."""
        drawn = np.random.Generator(np.random.PCG64(21)).integers(0, 2, self.block)
        return (2 * drawn - 1).astype(np.float32)

    @property
    def bounds(self) -> tuple[np.float32, np.float32, np.float32]:
        """The smallest scale, the largest one, and the one that stands for all larger ones.

        A value that is rounded up must not be inf on the way back: above the second one, values
        are rounded to integers that are never the one on the longer side, with the third one.
        """
        low = np.float32(_SMALLEST * (self.block if self.rotation else 1))
        high = np.nextafter(np.float32(_LARGEST / (1 << (self.bits - 1))), np.float32(0))
        return low, high, np.float32(_LARGEST) / self.reach[1]


class Quantiser:
    """Encodes and decodes; has memory of its own for that, so one thread at a time uses it.

    Args:
        form: how values travel.
        compiled: with numba; by default where it is installed. The bits are the same.
    """

    def __init__(self, form: Format, *, compiled: bool | None = None) -> None:
        self.form = form
        self._low, self._high, self._huge = form.bounds
        self._compiled = compiling.available() if compiled is None else compiled
        self.tile = max(1, TILE // form.block) * form.block
        self._padded = np.empty(self.tile, np.float32)
        self._work = np.empty((2, self.tile), np.float32)
        self._codes = np.empty((2, self.tile), np.int8)

    def encode(self, values: Floats, packed: Bytes, start: int = 0) -> None:
        """Write values ``[start, start + values.size)`` of those that ``packed`` has room for.

        Args:
            values: contiguous; of any size, if it ends with a block, or with all values.
            packed: ``form.nbytes`` bytes of all of them.
            start: a multiple of the block.
        """
        scales, codes = self.form.parts(packed)
        block = self.form.block
        for begin in range(0, values.size, self.tile):
            tile = values[begin : begin + self.tile]
            first, count = (start + begin) // block, self.form.blocks(tile.size)
            here = slice(first, first + count)
            self._encode(self._filled(tile, count * block), scales[here], codes[here])

    def decode(self, packed: Bytes, out: Floats, start: int = 0) -> None:
        """Write values ``[start, start + out.size)`` of those that were encoded.

        Args:
            packed: all bytes.
            out: contiguous; of any size, if it ends with a block, or with all values.
            start: a multiple of the block.
        """
        scales, codes = self.form.parts(packed)
        block = self.form.block
        for begin in range(0, out.size, self.tile):
            tile = out[begin : begin + self.tile]
            first, count = (start + begin) // block, self.form.blocks(tile.size)
            here = slice(first, first + count)
            whole = tile if tile.size == count * block else self._padded[: count * block]
            self._decode(scales[here], codes[here], whole)
            if whole is not tile:
                tile[:] = whole[: tile.size]

    def _filled(self, tile: Floats, size: int) -> Floats:
        """Return whole blocks: a tile, filled up with zeros if its last block is not full."""
        if tile.size == size:
            return tile
        whole = self._padded[:size]
        whole[: tile.size] = tile
        whole[tile.size :] = 0
        return whole

    def _columns(self, memory: NDArray[Any], count: int) -> NDArray[Any]:
        block = self.form.block
        return memory[: block * count].reshape(block, count)

    # One tile of whole blocks.

    def _encode(self, values: Floats, scales: Floats, codes: Bytes) -> None:
        form, count = self.form, scales.size
        if self._compiled:
            kernels.encode(form.block)(
                *(values.reshape(count, form.block), scales, codes),
                *(form.signs, form.rotation, form.bits == 4),
                *(*form.reach, *form.bounds, ROUNDING),
            )
            return
        work, other = (self._columns(memory, count) for memory in self._work)
        columns = values.reshape(count, form.block).T
        with _rowwise(), np.errstate(over="ignore", invalid="ignore", under="ignore"):
            if form.rotation:
                np.multiply(columns, form.signs[:, None], out=work)
                work, other = _rotated(work, other)
            else:
                np.copyto(work, columns)
            self._scale(work, scales)
            np.multiply(work, np.divide(1, scales), out=work)
            broken = np.flatnonzero(~np.isfinite(scales))
            work[:, broken] = 1
            np.add(work, ROUNDING, out=work)
            if form.rotation:  # the way back makes the values larger by the size of a block
                np.divide(scales, np.float32(form.block), out=scales)
        integers = self._columns(self._codes[0], count)
        np.copyto(integers, work.view(np.int32), casting="unsafe")
        if form.bits == 4:
            half = form.block // 2
            lower = self._columns(self._codes[1], count)[:half]
            np.bitwise_and(integers[:half], 15, out=lower)
            integers = np.left_shift(integers[half:], 4, out=integers[half:])
            np.bitwise_or(integers, lower, out=integers)
        codes[:] = integers.T.view(np.uint8)

    def _scale(self, columns: Floats, scales: Floats) -> None:
        """Find the scales of columns; inf or nan where one of their values is."""
        above, below = np.max(columns, axis=0), -np.min(columns, axis=0)
        longer, shorter = self.form.reach
        most = np.maximum(above, below)
        np.maximum(most / longer, np.minimum(above, below) / shorter, out=scales)
        np.maximum(scales, self._low, out=scales)
        scales[scales > self._high] = self._huge
        np.negative(scales, out=scales, where=above > below)
        broken = np.flatnonzero(~np.isfinite(most))
        scales[broken] = np.where(np.isnan(most[broken]), np.nan, np.inf)  # nan of one sign

    def _decode(self, scales: Floats, codes: Bytes, out: Floats) -> None:
        form, count = self.form, scales.size
        if self._compiled:
            kernels.decode(form.block)(
                *(scales, codes, out.reshape(count, form.block)),
                *(form.signs, form.rotation, form.bits == 4),
            )
            return
        work, other = (self._columns(memory, count) for memory in self._work)
        signed = codes.view(np.int8).T
        if form.bits == 8:
            np.copyto(work, signed)
        else:
            half = form.block // 2
            packed = self._columns(self._codes[0], count)[:half]
            shifted = self._columns(self._codes[1], count)[:half]
            np.copyto(packed, signed)
            np.right_shift(packed, 4, out=shifted)
            np.copyto(work[half:], shifted)
            np.right_shift(np.left_shift(packed, 4, out=packed), 4, out=packed)
            np.copyto(work[:half], packed)
        with _rowwise(), np.errstate(over="ignore", invalid="ignore", under="ignore"):
            np.multiply(work, scales, out=work)
            if form.rotation:
                work, other = _rotated(work, other)
                np.multiply(work.T, form.signs, out=out.reshape(count, form.block))
            else:
                np.copyto(out.reshape(count, form.block), work.T)


@contextmanager
def _rowwise() -> Iterator[None]:
    """Keep NumPy from copying rows together until they fill a buffer of 8192 elements."""
    before = np.setbufsize(_ROWS)
    try:
        yield
    finally:
        np.setbufsize(before)


def _rotated(work: Floats, other: Floats) -> tuple[Floats, Floats]:
    """Multiply columns by the Hadamard matrix; return the result, and the memory that is free."""
    block, count = work.shape
    height = 1
    while height < block:
        pairs = work.reshape(-1, 2, height * count)
        results = other.reshape(-1, 2, height * count)
        np.add(pairs[:, 0], pairs[:, 1], out=results[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=results[:, 1])
        work, other = other, work
        height *= 2
    return work, other
