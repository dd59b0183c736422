"""Who reads which of the blocks that several ranks need parts of. Pure; the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fsdpcore.checkpoint.plan.block_rows import counts_by_block
from fsdpcore.checkpoint.plan.catalog import Catalog
from fsdpcore.checkpoint.plan.read_plan import ReadPlan
from fsdpcore.checkpoint.plan.strided import Strided
from fsdpcore.core.geometry.region_table import Ints

WASTE = 1.02
"""A rank that reads more than so many times what it needs of a piece has it shared."""

ROUND_BYTES = 4 << 20
"""Of each of the three buffers of a round: what is read, sent and received."""

_EXTENT_BLOCKS = 16
_WINDOW_BLOCKS = 1 << 15
_WINDOW_PIECES = 1 << 12
_STICKY_BYTES = 1 << 20
ALIGN = 64
"""Of what lies in a buffer, in bytes."""


class BlockWindow(NamedTuple):
    """Some pieces that are shared, and the blocks ``[start, stop)`` of them that are looked at."""

    pieces: Ints
    start: int
    stop: int


class Needs(NamedTuple):
    """What a rank needs of the pieces of a window.

    Attributes:
        rows: int64 of shape (n, 3): piece, first and last byte.
        cuts: pieces, ascending, and what of them.
    """

    rows: Ints
    cuts: list[tuple[int, Strided]]


class BlockRun(NamedTuple):
    """Neighbouring blocks of a piece that the same ranks need.

    Attributes:
        piece: its number.
        start, stop: bytes of it.
        ranks: who needs any of it, ascending.
        nbytes: how much each of them does.
        reader: who reads it.
    """

    piece: int
    start: int
    stop: int
    ranks: tuple[int, ...]
    nbytes: tuple[int, ...]
    reader: int


def wasteful_pieces(catalog: Catalog, plan: ReadPlan) -> Ints:
    """Return the pieces of which a rank would read much more than it needs; ascending."""
    size = catalog.block
    read = np.zeros(len(catalog), np.int64)
    needed = np.zeros(len(catalog), np.int64)
    piece, low, high = plan.rows[:, 0], plan.rows[:, 1], plan.rows[:, 2]
    stop = np.minimum(-(-high // size) * size, catalog.nbytes[piece])
    np.add.at(read, piece, stop - low // size * size)
    np.add.at(needed, piece, high - low)
    for each in plan.scatters:
        first, counts = counts_by_block(catalog, each.piece, each.cut)
        touched = np.flatnonzero(counts) + first - catalog.first_block[each.piece]
        stops = np.minimum((touched + 1) * size, catalog.nbytes[each.piece])
        read[each.piece] += int((stops - touched * size).sum())
        needed[each.piece] += int(counts.sum())
    return np.flatnonzero(read > WASTE * needed)


def windows(catalog: Catalog, pieces: Ints) -> Iterator[BlockWindow]:
    """Cut shared pieces into windows, each with so few blocks that a table of them is small."""
    first, last = catalog.first_block[pieces], catalog.first_block[pieces + 1]
    begin = 0
    while begin < len(pieces):
        end = begin + 1
        while (
            end < len(pieces)
            and end - begin < _WINDOW_PIECES
            and last[end] - first[begin] <= _WINDOW_BLOCKS
        ):
            end += 1
        for start in range(int(first[begin]), int(last[end - 1]), _WINDOW_BLOCKS):
            stop = int(last[end - 1])
            if end - begin == 1:
                stop = min(stop, start + _WINDOW_BLOCKS)
            yield BlockWindow(pieces[begin:end], start, stop)
            if end - begin > 1:
                break
        begin = end


def encode(needs: Needs) -> Ints:
    """Write needs down as one row of numbers."""
    numbers: list[int] = []
    for piece, cut in needs.cuts:
        numbers += [piece, cut.itemsize, cut.src, len(cut.shape), *cut.shape, *cut.strides]
    counts = np.array([len(needs.rows), len(needs.cuts)], np.int64)
    return np.concatenate([counts, needs.rows.reshape(-1), np.array(numbers, np.int64)])


def decode(numbers: Ints) -> list[Needs]:
    """Read what ``encode`` wrote, of one rank after the other."""
    found: list[Needs] = []
    at = 0
    while at < len(numbers):
        rows, cuts = numbers[at : at + 2].tolist()
        at += 2
        table = numbers[at : at + 3 * rows].reshape(-1, 3)
        at += 3 * rows
        listed: list[tuple[int, Strided]] = []
        for _ in range(cuts):
            piece, itemsize, src, ndim = numbers[at : at + 4].tolist()
            at += 4
            axes = numbers[at : at + 2 * ndim].tolist()
            at += 2 * ndim
            listed.append((piece, Strided(itemsize, src, tuple(axes[:ndim]), tuple(axes[ndim:]))))
        found.append(Needs(table, listed))
    return found


def clip_rows(catalog: Catalog, rows: Ints, window: BlockWindow) -> Ints:
    """Return the rows of a ``ReadPlan`` that are in a window, as far as they are."""
    rows = rows[np.isin(rows[:, 0], window.pieces)]
    piece, low, high, target, dst = rows.T
    first = catalog.first_block[piece]
    start = np.maximum(low, (window.start - first) * catalog.block)
    stop = np.minimum(high, (window.stop - first) * catalog.block)
    clipped: Ints = np.stack([piece, start, stop, target, dst + start - low], axis=1)
    kept: Ints = clipped[start < stop]
    return kept


def _table(catalog: Catalog, needs: Sequence[Needs], window: BlockWindow) -> Ints:
    """Return rows of block, rank, bytes that the rank needs of the block; ascending."""
    size = catalog.block
    found: list[Ints] = []
    for rank, (rows, cuts) in enumerate(needs):
        piece, low, high = rows.T
        first, last = low // size, -(-high // size)
        counts = last - first
        which = np.repeat(np.arange(len(rows)), counts)
        within = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        index = first[which] + within
        begin = np.maximum(low[which], index * size)
        end = np.minimum(high[which], (index + 1) * size)
        blocks = catalog.first_block[piece[which]] + index
        found.append(np.stack([blocks, np.full(len(which), rank), end - begin], axis=1))
        for number, cut in cuts:
            start, nbytes = counts_by_block(catalog, number, cut)
            touched = np.flatnonzero(nbytes)
            some = [start + touched, np.full(len(touched), rank), nbytes[touched]]
            found.append(np.stack(some, axis=1))
    table: Ints = np.concatenate(found)
    table = table[(table[:, 0] >= window.start) & (table[:, 0] < window.stop)]
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    if not len(table):
        return table
    new = np.flatnonzero(np.any(table[1:, :2] != table[:-1, :2], axis=1)) + 1
    starts = np.concatenate([[0], new])
    merged: Ints = table[starts]
    merged[:, 2] = np.add.reduceat(table[:, 2], starts)
    return merged


class ReadAssignment:
    """Who reads what, of one window after the other.

    Args:
        catalog: of the pieces.
        ranks: how many there are.
    """

    def __init__(self, catalog: Catalog, ranks: int) -> None:
        self._catalog = catalog
        self._ranks = ranks
        self._load = [0] * ranks
        self._last = 0

    def extents(self, needs: Sequence[Needs], window: BlockWindow) -> list[BlockRun]:
        """Return what is read by one rank for others too, in the order of the files."""
        catalog = self._catalog
        table = _table(catalog, needs, window)
        if not len(table):
            return []
        blocks, starts, counts = np.unique(table[:, 0], return_index=True, return_counts=True)
        pieces = np.searchsorted(catalog.first_block, blocks, "right") - 1
        begins = (blocks - catalog.first_block[pieces]) * catalog.block
        ends = np.minimum(begins + catalog.block, catalog.nbytes[pieces])
        least = np.minimum.reduceat(table[:, 2], starts)
        shared = np.flatnonzero((counts > 1) & (least < ends - begins)).tolist()
        found: list[BlockRun] = []
        group: list[int] = []
        lists = (blocks.tolist(), pieces.tolist(), counts.tolist(), starts.tolist())
        block_of, piece_of, count_of, start_of = lists
        rank_of = table[:, 1].tolist()
        for each in shared:
            if group:
                last, count = group[-1], count_of[each]
                at, before = start_of[each], start_of[last]
                joins = (
                    block_of[each] == block_of[last] + 1
                    and piece_of[each] == piece_of[last]
                    and count == count_of[last]
                    and len(group) < max(1, _EXTENT_BLOCKS // count)
                    and rank_of[at : at + count] == rank_of[before : before + count]
                )
                if not joins:
                    found.append(self._extent(table, group, lists, begins, ends))
                    group = []
            group.append(each)
        if group:
            found.append(self._extent(table, group, lists, begins, ends))
        return found

    def _extent(
        self,
        table: Ints,
        group: list[int],
        lists: tuple[list[int], list[int], list[int], list[int]],
        begins: Ints,
        ends: Ints,
    ) -> BlockRun:
        first, last = group[0], group[-1]
        _, piece_of, count_of, start_of = lists
        count, at = count_of[first], start_of[first]
        some = table[at : at + count * len(group)].reshape(len(group), count, 3)
        ranks = tuple(some[0, :, 1].tolist())
        start, stop = int(begins[first]), int(ends[last])
        reader = self._reader(ranks, stop - start)
        nbytes = tuple(some[:, :, 2].sum(axis=0).tolist())
        return BlockRun(piece_of[first], start, stop, ranks, nbytes, reader)

    def _reader(self, ranks: tuple[int, ...], nbytes: int) -> int:
        """Choose who has read least; but neighbours are better read by one, at once."""
        least = min(ranks, key=lambda rank: self._load[rank])
        reader = self._last
        if reader not in ranks or self._load[reader] > self._load[least] + _STICKY_BYTES:
            reader = least
        self._last = reader
        self._load[reader] += nbytes
        return reader


def rounds(extents: Sequence[BlockRun], ranks: int) -> Iterator[list[BlockRun]]:
    """Give as many extents at a time as the buffers of every rank have room for."""
    batch: list[BlockRun] = []
    read, sent, received = [0] * ranks, [0] * ranks, [0] * ranks
    for extent in extents:
        reader = extent.reader
        room = -(-(extent.stop - extent.start) // ALIGN) * ALIGN
        shares = [
            each for each in zip(extent.ranks, extent.nbytes, strict=True) if each[0] != reader
        ]
        outgoing = sum(nbytes for _, nbytes in shares)
        if batch and (
            read[reader] + room > ROUND_BYTES
            or sent[reader] + outgoing > ROUND_BYTES
            or any(received[rank] + nbytes > ROUND_BYTES for rank, nbytes in shares)
        ):
            yield batch
            batch = []
            read, sent, received = [0] * ranks, [0] * ranks, [0] * ranks
        read[reader] += room
        sent[reader] += outgoing
        for rank, nbytes in shares:
            received[rank] += nbytes
        batch.append(extent)
    if batch:
        yield batch
