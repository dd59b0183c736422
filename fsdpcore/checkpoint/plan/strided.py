"""Elements of a stored piece that lie apart, and the part of them that a run of bytes holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsdpcore.checkpoint.plan.copies import span
from fsdpcore.core.buffers import Array, Bytes

Ints = NDArray[np.int64]


class Clip(NamedTuple):
    """Some elements of a ``Strided``.

    Attributes:
        where: which ones, along every axis.
        shape: how many.
        src: position of the first one in the flat piece.
    """

    where: tuple[slice | int, ...]
    shape: tuple[int, ...]
    src: int


class Strided(NamedTuple):
    """Elements of a piece, as a strided array of it. Positions and strides count elements.

    Attributes:
        itemsize: bytes of an element.
        src: position of the first one.
        shape: at least one axis; no extent is 0.
        strides: positive; each at least as large as all that is inside of it.
    """

    itemsize: int
    src: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def start(self) -> int:
        """The byte of the piece that the first element begins at."""
        return self.src * self.itemsize

    @property
    def stop(self) -> int:
        """The byte behind the last element."""
        return (self.src + span(self.shape, self.strides)) * self.itemsize

    def counts(self, bounds: Ints) -> Ints:
        """Return the bytes that are needed between each two of ``bounds``.

        Args:
            bounds: positions in bytes, ascending, none of them inside of an element.
        """
        rest = bounds // self.itemsize - self.src
        below = np.zeros(len(bounds), np.int64)
        active = np.ones(len(bounds), bool)
        inner = 1
        for extent in self.shape:
            inner *= extent
        last = len(self.shape) - 1
        for axis, (extent, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            inner //= extent
            # Rows before this one are below; of the innermost, those that begin before.
            rows = rest // stride if axis < last else -(-rest // stride)
            rows = np.clip(rows, 0, extent)
            below += np.where(active, rows * inner, 0)
            active &= (rows < extent) & (rest >= 0)
            rest = rest - rows * stride
        return np.diff(below) * self.itemsize

    def clips(self, start: int, stop: int) -> Iterator[Clip]:
        """Give the elements in bytes ``[start, stop)`` of the piece, in ascending order.

        At most ``2 * ndim - 1`` parts. The bounds are not inside of an element.
        """
        low, high = start // self.itemsize, -(-stop // self.itemsize)
        return self._clips(0, (), self.src, low, high)

    def _clips(
        self, axis: int, index: tuple[int, ...], src: int, low: int, high: int
    ) -> Iterator[Clip]:
        extent, stride = self.shape[axis], self.strides[axis]
        inner = self.shape[axis + 1 :]
        width = span(inner, self.strides[axis + 1 :])
        # Rows [first, last) have elements within, rows [begin, end) lie within as a whole.
        begin = min(max(0, -((src - low) // stride)), extent)
        end = min(extent, (high - src - width) // stride + 1)
        first = min(max(0, (low - src - width) // stride + 1), extent)
        last = min(extent, -((src - high) // stride))
        for row in range(first, min(begin, last)):
            yield from self._clips(axis + 1, (*index, row), src + row * stride, low, high)
        if begin < end:
            rest = (slice(None),) * len(inner)
            yield Clip(
                (*index, slice(begin, end), *rest), (end - begin, *inner), src + begin * stride
            )
        for row in range(max(begin, end), last):
            yield from self._clips(axis + 1, (*index, row), src + row * stride, low, high)

    def view(self, clip: Clip, data: Bytes, start: int, dtype: np.dtype[Any]) -> Array:
        """Return the elements of a clip as an array.

        Args:
            clip: some of these elements.
            data: bytes of the piece from ``start`` on.
            start: see there.
            dtype: of the elements.
        """
        strides = self.strides[len(self.strides) - len(clip.shape) :]
        view: Array = np.ndarray(
            clip.shape,
            dtype,
            data,
            clip.src * self.itemsize - start,
            tuple(stride * self.itemsize for stride in strides),
        )
        return view
