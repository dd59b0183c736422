"""Reads of all ranks together: what several need parts of is read by one of them and passed on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fsdpcore.checkpoint.load.batches import LoadBatch
from fsdpcore.checkpoint.load.block_packing import BlockPacker, BlockUnpacker, LocalNeeds
from fsdpcore.checkpoint.load.local_reads import read_alone, read_parts, read_rows
from fsdpcore.checkpoint.load.reading import FileSet, Span
from fsdpcore.checkpoint.plan.block_rows import split_rows
from fsdpcore.checkpoint.plan.catalog import Catalog
from fsdpcore.checkpoint.plan.read_plan import ReadPlan
from fsdpcore.checkpoint.plan.read_sharing import (
    ALIGN,
    ROUND_BYTES,
    BlockRun,
    BlockWindow,
    Needs,
    ReadAssignment,
    decode,
    encode,
    rounds,
    wasteful_pieces,
    windows,
)
from fsdpcore.collectives import all_gather_v, all_to_all_v
from fsdpcore.collectives.consensus import LocalAttempt
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Bytes
from fsdpcore.core.geometry.region_table import Ints

_NOTHING: Ints = np.empty(0, np.int64)
_NO_PLAN = ReadPlan(_NOTHING.reshape(0, 5), [], [], 0, [])
_NO_NEEDS: Ints = np.zeros(2, np.int64)  # as ``encode`` writes it down


def read_all(
    files: FileSet,
    catalog: Catalog,
    batches: Sequence[LoadBatch],
    backend: Backend,
    *,
    timeout: float,
) -> Exception | None:
    """Read what this rank needs, and what others do, who return the favour; a collective.

    Blocks. Where a rank would read much more of a piece than it needs, because it needs parts of
    blocks only, all ranks tell each other what they need of that piece. Each block that several
    need then is read by one of them, and passed on.

    Args:
        files, catalog: of the checkpoint; the same one on all ranks.
        batches: what this rank needs, in ascending order of their numbers.
        backend: all ranks.
        timeout: seconds to wait for the slowest rank.

    Returns:
        What went wrong with this rank's reads, for the ranks to agree on: it has taken part in all
        that the others do, who may have been given what is wrong.
    """
    attempt = LocalAttempt()
    shared = _NOTHING
    pieces = len(catalog)
    if backend.world_size > 1:
        wasteful = attempt.value(lambda: _wasteful(catalog, batches), _NOTHING)
        wasteful_anywhere: Ints = all_gather_v(
            wasteful, backend, label="load, shared pieces", timeout=timeout
        )
        shared = np.unique(wasteful_anywhere)
    found = {batch.number: batch for batch in batches}
    for number in sorted({*found, *(shared // max(pieces, 1)).tolist()}):
        batch = found.get(number) or LoadBatch(number, _NO_PLAN, backend.device)
        low, high = np.searchsorted(shared, [number * pieces, (number + 1) * pieces])
        _read_batch(
            files, catalog, batch, shared[low:high] - number * pieces, backend, timeout, attempt
        )
    return attempt.error


def _wasteful(catalog: Catalog, batches: Sequence[LoadBatch]) -> Ints:
    """Return the pieces to be shared, numbered as if every batch had a catalog of its own."""
    size = len(catalog)
    found = [wasteful_pieces(catalog, batch.plan) + batch.number * size for batch in batches]
    return np.concatenate([_NOTHING, *found])


def _read_batch(
    files: FileSet,
    catalog: Catalog,
    batch: LoadBatch,
    shared: Ints,
    backend: Backend,
    timeout: float,
    attempt: LocalAttempt,
) -> None:
    """Read one batch; a collective if there are any pieces to share."""
    plan = batch.plan
    own_needs = LocalNeeds(plan.rows[:0], [])

    def alone() -> None:
        batch.begin()
        if not len(shared):
            read_alone(files, catalog, plan)
            return
        theirs = np.isin(plan.rows[:, 0], shared)
        taken = set(shared.tolist())
        scatters = [each for each in plan.scatters if each.piece not in taken]
        read_alone(files, catalog, ReadPlan(plan.rows[~theirs], plan.targets, scatters, 0, []))
        scatters = [each for each in plan.scatters if each.piece in taken]
        nonlocal own_needs
        own_needs = LocalNeeds(plan.rows[theirs], scatters)

    attempt.do(alone)
    if len(shared):
        reads = _SharedReads(files, catalog, plan.targets, backend, timeout, attempt)
        for window in windows(catalog, shared):
            reads.run(window, own_needs)
    attempt.do(batch.end)


class _Round(NamedTuple):
    """What a rank reads, sends and receives at a time.

    Attributes:
        extents: that are read, by any rank.
        room: bytes that this one reads, with what is between them.
        sends, receives: bytes to and from each rank.
    """

    extents: Sequence[BlockRun]
    room: int
    sends: list[int]
    receives: list[int]


class _SharedReads:
    """The reads of one load that are shared.

    Args:
        files, catalog: of the checkpoint.
        targets: of this rank's rows.
        backend: all ranks.
        timeout: seconds to wait for the slowest rank.
        attempt: what failed on this rank so far; has what fails here.
    """

    def __init__(
        self,
        files: FileSet,
        catalog: Catalog,
        targets: Sequence[memoryview],
        backend: Backend,
        timeout: float,
        attempt: LocalAttempt,
    ) -> None:
        self._files = files
        self._catalog = catalog
        self._targets = targets
        self._backend = backend
        self._timeout = timeout
        self._attempt = attempt
        self._sharing = ReadAssignment(catalog, backend.world_size)
        # What is read, sent and received in a round.
        self._buffers = [np.empty(0, np.uint8)] * 3

    def run(self, window: BlockWindow, own_needs: LocalNeeds) -> None:
        """Read one window; a collective."""
        attempt = self._attempt
        own_needs = attempt.value(
            lambda: own_needs.within(self._catalog, window), LocalNeeds(own_needs.rows[:0], [])
        )
        encoded: Ints = all_gather_v(
            attempt.value(lambda: _encoded(own_needs), _NO_NEEDS),
            self._backend,
            label="load, shared parts",
            timeout=self._timeout,
        )
        # Where a rank does not even know what the others expect of it, or has no room for it,
        # there can be no rounds: all leave them out.
        nothing: tuple[list[Needs], list[_Round] | None] = ([], None)
        needs, planned = attempt.value(lambda: self._planned(encoded, window), nothing)
        able: Bytes = all_gather_v(
            np.array([planned is not None], np.uint8),
            self._backend,
            label="load, shared rounds",
            timeout=self._timeout,
        )
        if planned is None or not able.all():
            return
        extents = [each for batch in planned for each in batch.extents]
        attempt.do(lambda: self._read_own(window, own_needs, self._blocks(extents)))
        for batch in planned:
            self._round(batch, needs, own_needs)

    def _planned(
        self, encoded: Ints, window: BlockWindow
    ) -> tuple[list[Needs], list[_Round] | None]:
        """Return what each rank needs, and the rounds of this rank, for which there is room."""
        needs = decode(encoded)
        extents = self._sharing.extents(needs, window)
        planned = [self._counted(batch) for batch in rounds(extents, self._backend.world_size)]
        most = [(each.room, sum(each.sends), sum(each.receives)) for each in planned]
        for number, sizes in enumerate(zip(*most, strict=True)):
            nbytes = max(sizes)
            if self._buffers[number].size < nbytes:
                self._buffers[number] = np.empty(max(nbytes, ROUND_BYTES), np.uint8)
        return needs, planned

    def _counted(self, extents: Sequence[BlockRun]) -> _Round:
        me, ranks = self._backend.rank, self._backend.world_size
        room, sends, receives = 0, [0] * ranks, [0] * ranks
        for each in extents:
            if each.reader == me:
                room += _aligned(each.stop - each.start)
                for rank, nbytes in zip(each.ranks, each.nbytes, strict=True):
                    sends[rank] += nbytes if rank != me else 0
            elif me in each.ranks:
                receives[each.reader] += each.nbytes[each.ranks.index(me)]
        return _Round(extents, room, sends, receives)

    def _blocks(self, extents: Sequence[BlockRun]) -> Ints:
        """Return the numbers of all blocks that are shared, ascending."""
        size, first = self._catalog.block, self._catalog.first_block
        runs = [
            np.arange(each.start // size, -(-each.stop // size)) + first[each.piece]
            for each in extents
        ]
        return np.concatenate([np.empty(0, np.int64), *runs])

    def _read_own(self, window: BlockWindow, own_needs: LocalNeeds, shared: Ints) -> None:
        """Read what this rank needs of all other blocks."""
        split = split_rows(self._catalog, own_needs.rows)
        read_rows(self._files, self._targets, _without(self._catalog, split.whole, shared))
        read_parts(
            self._files,
            self._catalog,
            self._targets,
            split.parts,
            own_needs.scatters,
            skip=shared,
            within=(window.start, window.stop),
        )

    # Rounds.

    def _round(self, batch: _Round, needs: Sequence[Needs], own_needs: LocalNeeds) -> None:
        """Read this rank's share of some extents, pass it on, and take what others pass on."""
        outgoing = self._buffers[1][: sum(batch.sends)]
        incoming = self._buffers[2][: sum(batch.receives)]
        self._attempt.do(lambda: self._give(batch, needs, own_needs, outgoing))
        all_to_all_v(
            outgoing,
            self._backend,
            batch.sends,
            recv_counts=batch.receives,
            out=incoming,
            timeout=self._timeout,
        )
        self._attempt.do(lambda: self._take(batch, own_needs, incoming))

    def _give(
        self, batch: _Round, needs: Sequence[Needs], own_needs: LocalNeeds, outgoing: Bytes
    ) -> None:
        """Read, take what this rank needs of it, and pack what the others do."""
        me = self._backend.rank
        spans = self._spans([each for each in batch.extents if each.reader == me])
        self._files.read(span for _, span in spans)
        unpacker = BlockUnpacker(self._catalog, self._targets, own_needs)
        for _, span in spans:
            data = np.frombuffer(span.buffer, np.uint8)
            unpacker.take(span.piece, span.start, span.stop, data, None)
        at = 0
        for rank, nbytes in enumerate(batch.sends):
            if not nbytes:
                continue
            packer = BlockPacker(self._catalog, needs[rank])
            for each, span in spans:
                if rank in each.ranks:
                    at = packer.give(span, outgoing, at)

    def _take(self, batch: _Round, own_needs: LocalNeeds, incoming: Bytes) -> None:
        """Take what the others have passed on."""
        me = self._backend.rank
        unpacker = BlockUnpacker(self._catalog, self._targets, own_needs)
        at = 0
        for rank in range(self._backend.world_size):
            for each in batch.extents:
                if each.reader == rank != me and me in each.ranks:
                    at = unpacker.take(each.piece, each.start, each.stop, incoming, at)

    def _spans(self, extents: Sequence[BlockRun]) -> list[tuple[BlockRun, Span]]:
        """Give each extent that this rank reads a place to be read to."""
        room, found, at = self._buffers[0].data, [], 0
        for each in extents:
            buffer = room[at : at + each.stop - each.start]
            found.append((each, Span(each.piece, each.start, each.stop, buffer)))
            at += _aligned(each.stop - each.start)
        return found


def _encoded(own_needs: LocalNeeds) -> Ints:
    return encode(
        Needs(own_needs.rows[:, :3], [(each.piece, each.cut) for each in own_needs.scatters])
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


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
