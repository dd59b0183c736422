"""What a rank reads for itself: whole blocks in place, parts of blocks by way of a scratch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fsdpcore.checkpoint.load.reading import FileSet, Span
from fsdpcore.checkpoint.memory.rounding import put
from fsdpcore.checkpoint.plan.block_rows import blocks_of_parts, blocks_of_scatter, split_rows
from fsdpcore.checkpoint.plan.catalog import Catalog
from fsdpcore.checkpoint.plan.read_plan import ReadPlan, Scatter
from fsdpcore.core.buffers import Bytes
from fsdpcore.core.geometry.region_table import Ints

SCRATCH_BYTES = 2 << 20
"""What is on its way from blocks that are not needed as a whole."""

_ALIGN = 64


def read_alone(files: FileSet, catalog: Catalog, plan: ReadPlan) -> None:
    """Read what a plan needs, without the help of others; blocks. Raises as ``FileSet.read``."""
    split = split_rows(catalog, plan.rows)
    read_rows(files, plan.targets, split.whole)
    read_parts(files, catalog, plan.targets, split.parts, plan.scatters)


def read_rows(files: FileSet, targets: Sequence[memoryview], whole: Ints) -> None:
    """Read whole blocks into where they belong; blocks. Raises as ``FileSet.read``."""
    files.read(
        (piece, low, high, targets[target][dst : dst + high - low])
        for piece, low, high, target, dst in whole.tolist()
    )


def read_parts(
    files: FileSet,
    catalog: Catalog,
    targets: Sequence[memoryview],
    parts: Ints,
    scatters: Sequence[Scatter],
    skip: Ints | None = None,
    within: tuple[int, int] | None = None,
) -> None:
    """Read parts of blocks, each block once, and put them where they belong; blocks.

    Args:
        files, catalog: of the checkpoint.
        targets: of the parts.
        parts: see ``split_rows``.
        scatters: in ascending order of pieces.
        skip: numbers of blocks that are not to be read.
        within: numbers of the blocks to look at: the first, and the one behind the last.

    Raises:
        CorruptCheckpointError, CheckpointError: as ``FileSet.read``.
    """
    numbers = blocks_of_parts(catalog, parts)
    needed = np.unique(
        np.concatenate([numbers, *(blocks_of_scatter(catalog, each) for each in scatters)])
    )
    if skip is not None and len(skip):
        needed = needed[~np.isin(needed, skip)]
    if within is not None:
        needed = needed[(needed >= within[0]) & (needed < within[1])]
    if not len(needed):
        return
    scratch = np.empty(max(SCRATCH_BYTES, catalog.block), np.uint8)
    begins = np.array([each.piece for each in scatters], np.int64)
    for wave in waves(catalog, needed, scratch):
        files.read(wave)
        for piece, start, stop, buffer in wave:
            data = np.frombuffer(buffer, np.uint8)
            first_block = catalog.first_block[piece]
            first = first_block + start // catalog.block
            last = first_block + -(-stop // catalog.block)
            low, high = np.searchsorted(numbers, [first, last])
            for _, begin, end, target, dst in parts[low:high].tolist():
                targets[target][dst : dst + end - begin] = buffer[begin - start : end - start]
            low, high = np.searchsorted(begins, [piece, piece + 1])
            for each in scatters[low:high]:
                deliver(catalog, each, data, start, stop)


def waves(catalog: Catalog, blocks: Ints, scratch: Bytes) -> Iterator[list[Span]]:
    """Give neighbouring blocks together, as many at a time as the scratch has room for."""
    size, room = catalog.block, scratch.data
    pieces = np.searchsorted(catalog.first_block, blocks, "right") - 1
    starts = (blocks - catalog.first_block[pieces]) * size
    stops = np.minimum(starts + size, catalog.nbytes[pieces])
    wave: list[Span] = []
    used = 0
    for piece, start, stop in zip(pieces.tolist(), starts.tolist(), stops.tolist(), strict=True):
        if used + stop - start > len(room):
            yield wave
            wave, used = [], 0
        if wave and wave[-1].piece == piece and wave[-1].stop == start:
            last = wave.pop()
            used -= -(-(last.stop - last.start) // _ALIGN) * _ALIGN
            start = last.start
        wave.append(Span(piece, start, stop, room[used : used + stop - start]))
        used += -(-(stop - start) // _ALIGN) * _ALIGN
    if wave:
        yield wave


def deliver(catalog: Catalog, scatter: Scatter, data: Bytes, start: int, stop: int) -> None:
    """Put what bytes ``[start, stop)`` of a piece have for a scatter where it belongs."""
    dtype = catalog.dtype_of(scatter.piece)
    for clip in scatter.cut.clips(start, stop):
        put(scatter.target[clip.where], scatter.cut.view(clip, data, start, dtype))
