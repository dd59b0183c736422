"""Reads of all ranks together: what several need parts of is read by one of them and passed on."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fsdpcore.backend import Backend
from fsdpcore.buffers import Array, Bytes
from fsdpcore.checkpoint.catalog import Catalog, Ints
from fsdpcore.checkpoint.local_reads import (
    put,
    read_parts,
    read_rows,
    split_rows,
)
from fsdpcore.checkpoint.plan_load import LoadPlan, Scatter
from fsdpcore.checkpoint.reading import FileSet, Span
from fsdpcore.checkpoint.sharing import (
    ALIGN,
    ROUND_BYTES,
    Extent,
    Needs,
    Sharing,
    Window,
    clip_rows,
    decode,
    encode,
    rounds,
    wasteful_pieces,
    windows,
)
from fsdpcore.collectives import all_gather_v, all_to_all_v

_BITS: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
}


def read_alone(files: FileSet, catalog: Catalog, plan: LoadPlan) -> None:
    """Read what a plan needs, without the help of others; blocks. Raises as ``FileSet.read``."""
    split = split_rows(catalog, plan.rows)
    read_rows(files, plan.targets, split.whole)
    read_parts(files, catalog, plan.targets, split.parts, plan.scatters)


def read_all(
    files: FileSet, catalog: Catalog, plan: LoadPlan, backend: Backend, *, timeout: float
) -> Exception | None:
    """Read what this rank needs, and what others do, who return the favour; a collective.

    Blocks. Where a rank would read much more of a piece than it needs, because it needs parts of
    blocks only, all ranks tell each other what they need of that piece. Each block that several
    need then is read by one of them, and passed on.

    Args:
        files, catalog: of the checkpoint; the same one on all ranks.
        plan: what this rank needs.
        backend: all ranks.
        timeout: seconds to wait for the slowest rank.

    Returns:
        What went wrong with this rank's reads, for the ranks to agree on: it has taken part in all
        that the others do, who may have been given what is wrong.
    """
    if backend.world_size == 1:
        return _tried(lambda: read_alone(files, catalog, plan))
    wasteful = wasteful_pieces(catalog, plan)
    told: Ints = all_gather_v(wasteful, backend, label="load, shared pieces", timeout=timeout)
    shared = np.unique(told)
    theirs = np.isin(plan.rows[:, 0], shared)
    taken = set(shared.tolist())
    alone = LoadPlan(
        plan.rows[~theirs],
        plan.targets,
        [each for each in plan.scatters if each.piece not in taken],
        0,
        [],
    )
    error = _tried(lambda: read_alone(files, catalog, alone))
    if not len(shared):
        return error
    rows = plan.rows[theirs]
    scatters = [each for each in plan.scatters if each.piece in taken]
    reads = _SharedReads(files, catalog, plan.targets, backend, timeout)
    for window in windows(catalog, shared):
        first, last = np.searchsorted(
            [each.piece for each in scatters], [window.pieces[0], window.pieces[-1] + 1]
        )
        problem = reads.run(window, clip_rows(catalog, rows, window), scatters[first:last])
        error = error or problem
    return error


def _tried(action: Callable[[], None]) -> Exception | None:
    """Do it, and return its error: the other ranks count on this one to go on."""
    try:
        action()
    except Exception as error:
        return error
    return None


class _SharedReads:
    """The reads of one load that are shared.

    Args:
        files, catalog: of the checkpoint.
        targets: of this rank's rows.
        backend: all ranks.
        timeout: seconds to wait for the slowest rank.
    """

    def __init__(
        self,
        files: FileSet,
        catalog: Catalog,
        targets: Sequence[memoryview],
        backend: Backend,
        timeout: float,
    ) -> None:
        self._files = files
        self._catalog = catalog
        self._targets = targets
        self._backend = backend
        self._timeout = timeout
        self._sharing = Sharing(catalog, backend.world_size)
        # What is read, sent and received in a round.
        self._buffers = [np.empty(0, np.uint8)] * 3

    def run(self, window: Window, rows: Ints, scatters: Sequence[Scatter]) -> Exception | None:
        """Read one window; a collective. Returns what went wrong on this rank."""
        mine = Needs(rows[:, :3], [(each.piece, each.cut) for each in scatters])
        told: Ints = all_gather_v(
            encode(mine), self._backend, label="load, shared parts", timeout=self._timeout
        )
        needs = decode(told)
        extents = self._sharing.extents(needs, window)
        error = _tried(lambda: self._read_own(window, rows, scatters, self._blocks(extents)))
        for batch in rounds(extents, self._backend.world_size):
            problem = self._round(batch, needs, rows, scatters)
            error = error or problem
        return error

    def _blocks(self, extents: Sequence[Extent]) -> Ints:
        """Return the numbers of all blocks that are shared, ascending."""
        size, first = self._catalog.block, self._catalog.first_block
        runs = [
            np.arange(each.start // size, -(-each.stop // size)) + first[each.piece]
            for each in extents
        ]
        return np.concatenate([np.empty(0, np.int64), *runs])

    def _read_own(
        self, window: Window, rows: Ints, scatters: Sequence[Scatter], shared: Ints
    ) -> None:
        """Read what this rank needs of all other blocks."""
        split = split_rows(self._catalog, rows)
        read_rows(self._files, self._targets, _without(self._catalog, split.whole, shared))
        read_parts(
            self._files,
            self._catalog,
            self._targets,
            split.parts,
            scatters,
            skip=shared,
            within=(window.start, window.stop),
        )

    # Rounds.

    def _round(
        self,
        extents: Sequence[Extent],
        needs: Sequence[Needs],
        rows: Ints,
        scatters: Sequence[Scatter],
    ) -> Exception | None:
        """Read this rank's share of some extents, pass it on, and take what others pass on."""
        me, ranks = self._backend.rank, range(self._backend.world_size)
        spans = self._spans([each for each in extents if each.reader == me])
        error = _tried(lambda: self._files.read(span for _, span in spans))
        taking = _Taking(self._catalog, self._targets, rows, scatters)
        for _, span in spans:
            data = np.frombuffer(span.buffer, np.uint8)
            taking.take(span.piece, span.start, span.stop, data, None)
        sends = [0] * len(ranks)
        for each, _ in spans:
            for rank, nbytes in zip(each.ranks, each.nbytes, strict=True):
                sends[rank] += nbytes if rank != me else 0
        outgoing = self._room(1, sum(sends))
        at = 0
        for rank in ranks:
            if not sends[rank]:
                continue
            giving = _Giving(self._catalog, needs[rank])
            for each, span in spans:
                if rank in each.ranks:
                    at = giving.give(span, outgoing, at)
        receives = [0] * len(ranks)
        for each in extents:
            if each.reader != me and me in each.ranks:
                receives[each.reader] += each.nbytes[each.ranks.index(me)]
        incoming = self._room(2, sum(receives))
        all_to_all_v(
            outgoing,
            self._backend,
            sends,
            recv_counts=receives,
            out=incoming,
            timeout=self._timeout,
        )
        at = 0
        for rank in ranks:
            for each in extents:
                if each.reader == rank != me and me in each.ranks:
                    at = taking.take(each.piece, each.start, each.stop, incoming, at)
        return error

    def _spans(self, extents: Sequence[Extent]) -> list[tuple[Extent, Span]]:
        """Give each extent that this rank reads a place to be read to."""
        sizes = [-(-(each.stop - each.start) // ALIGN) * ALIGN for each in extents]
        room = self._room(0, sum(sizes)).data
        found, at = [], 0
        for each, size in zip(extents, sizes, strict=True):
            buffer = room[at : at + each.stop - each.start]
            found.append((each, Span(each.piece, each.start, each.stop, buffer)))
            at += size
        return found

    def _room(self, number: int, nbytes: int) -> Bytes:
        """Return the beginning of a buffer, which is as large as one was ever needed."""
        if self._buffers[number].size < nbytes:
            self._buffers[number] = np.empty(max(nbytes, ROUND_BYTES), np.uint8)
        return self._buffers[number][:nbytes]


class _Giving:
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


class _Taking:
    """Puts what this rank needs of blocks where it belongs, from them or from what was packed."""

    def __init__(
        self,
        catalog: Catalog,
        targets: Sequence[memoryview],
        rows: Ints,
        scatters: Sequence[Scatter],
    ) -> None:
        self._catalog = catalog
        self._targets = targets
        self._rows = rows
        self._scatters = scatters
        self._pieces = [each.piece for each in scatters]

    def take(self, piece: int, start: int, stop: int, data: Bytes, at: int | None) -> int:
        """Take what is needed of bytes ``[start, stop)`` of a piece.

        Args:
            piece, start, stop: see there.
            data: the bytes themselves if ``at`` is None, else what ``_Giving`` packed.
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


def _without(catalog: Catalog, whole: Ints, shared: Ints) -> Ints:
    """Return rows of whole blocks without some blocks."""
    if not len(shared) or not len(whole):
        return whole
    size = catalog.block
    origin = catalog.first_block[whole[:, 0]]
    first = origin + whole[:, 1] // size
    last = origin - (-whole[:, 2] // size)
    low, high = np.searchsorted(shared, first), np.searchsorted(shared, last)
    cut = np.flatnonzero(low < high)
    if not len(cut):
        return whole
    found = [whole[low == high]]
    for row in cut.tolist():
        piece, start, stop, target, dst = whole[row].tolist()
        at = start
        for block in (shared[low[row] : high[row]] - origin[row]).tolist():
            if at < block * size:
                found.append(np.array([[piece, at, block * size, target, dst + at - start]]))
            at = min((block + 1) * size, stop)
        if at < stop:
            found.append(np.array([[piece, at, stop, target, dst + at - start]]))
    rows = np.concatenate(found)
    return rows[np.lexsort((rows[:, 1], rows[:, 0]))]


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
