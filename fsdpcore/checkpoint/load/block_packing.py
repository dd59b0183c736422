"""What one rank has read for another: packed by the one, put where it belongs by the other."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fsdpcore.checkpoint.load.reading import Span
from fsdpcore.checkpoint.memory.rounding import put
from fsdpcore.checkpoint.plan.catalog import Catalog
from fsdpcore.checkpoint.plan.read_plan import Scatter
from fsdpcore.checkpoint.plan.read_sharing import BlockWindow, Needs, clip_rows
from fsdpcore.core.buffers import Array, Bytes
from fsdpcore.core.geometry.region_table import Ints

_BITS: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
}


class LocalNeeds(NamedTuple):
    """What this rank needs: rows and scatters of a ``ReadPlan``."""

    rows: Ints
    scatters: Sequence[Scatter]

    def within(self, catalog: Catalog, window: BlockWindow) -> LocalNeeds:
        """Return what of it is in a window; scatters as a whole."""
        pieces = [each.piece for each in self.scatters]
        first = bisect_left(pieces, int(window.pieces[0]))
        last = bisect_right(pieces, int(window.pieces[-1]))
        return LocalNeeds(clip_rows(catalog, self.rows, window), self.scatters[first:last])


class BlockPacker:
    """Packs what another rank needs of blocks, in an order that both know."""

    def __init__(self, catalog: Catalog, needs: Needs) -> None:
        self._catalog = catalog
        self._needs = needs
        self._pieces = [piece for piece, _ in needs.cuts]

    def give(self, span: Span, out: Bytes, at: int) -> int:
        """Pack into ``out`` from ``at`` on; return where that ends."""
        data = np.frombuffer(span.buffer, np.uint8)
        for low, high in _overlapping(self._needs.rows, span.piece, span.start, span.stop):
            out[at : at + high - low] = data[low - span.start : high - span.start]
            at += high - low
        first = bisect_left(self._pieces, span.piece)
        last = bisect_right(self._pieces, span.piece)
        for _, cut in self._needs.cuts[first:last]:
            dtype = _BITS.get(cut.itemsize) or self._catalog.dtype_of(span.piece)
            for clip in cut.clips(span.start, span.stop):
                values = cut.view(clip, data, span.start, dtype)
                room: Array = np.ndarray(clip.shape, dtype, out, at)
                room[...] = values
                at += values.nbytes
        return at


class BlockUnpacker:
    """Puts what this rank needs of blocks where it belongs, from them or from what was packed."""

    def __init__(
        self,
        catalog: Catalog,
        targets: Sequence[memoryview],
        own_needs: LocalNeeds,
    ) -> None:
        self._catalog = catalog
        self._targets = targets
        self._rows, self._scatters = own_needs
        self._pieces = [each.piece for each in own_needs.scatters]

    def take(self, piece: int, start: int, stop: int, data: Bytes, at: int | None) -> int:
        """Take what is needed of bytes ``[start, stop)`` of a piece.

        Args:
            piece, start, stop: see there.
            data: the bytes themselves if ``at`` is None, else what ``BlockPacker`` packed.
            at: where that begins in ``data``.

        Returns:
            Where it ends.
        """
        packed = at is not None
        at = at or 0
        for low, high, target, dst in _overlapping_rows(self._rows, piece, start, stop):
            begin = at if packed else low - start
            self._targets[target][dst : dst + high - low] = data[begin : begin + high - low].data
            at += high - low
        first, last = bisect_left(self._pieces, piece), bisect_right(self._pieces, piece)
        for scatter in self._scatters[first:last]:
            dtype = self._catalog.dtype_of(piece)
            for clip in scatter.cut.clips(start, stop):
                if packed:
                    values: Array = np.ndarray(clip.shape, dtype, data, at)
                else:
                    values = scatter.cut.view(clip, data, start, dtype)
                put(scatter.target[clip.where], values)
                at += values.nbytes
        return at


def _overlapping_rows(
    rows: Ints, piece: int, start: int, stop: int
) -> Iterator[tuple[int, int, int, int]]:
    """Give what rows have of bytes ``[start, stop)``: first and last byte, and where they go."""
    first, last = np.searchsorted(rows[:, 0], [piece, piece + 1])
    for _, low, high, target, dst in rows[first:last].tolist():
        begin, end = max(low, start), min(high, stop)
        if begin < end:
            yield begin, end, target, dst + begin - low


def _overlapping(rows: Ints, piece: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Give what rows have of bytes ``[start, stop)`` of a piece: first and last byte."""
    first, last = np.searchsorted(rows[:, 0], [piece, piece + 1])
    for _, low, high in rows[first:last].tolist():
        begin, end = max(low, start), min(high, stop)
        if begin < end:
            yield begin, end
