"""Where everything lies in a rank's file; the same for who writes it and for who describes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fsdpcore.checkpoint.dtypes import dtype_of, stored_as
from fsdpcore.checkpoint.header import Entry, build_header
from fsdpcore.checkpoint.metadata import BLOCK_BYTES
from fsdpcore.checkpoint.plan_save import Written
from fsdpcore.checkpoint.regions import Box, Range
from fsdpcore.checkpoint.stored import CHECKSUM_BYTES

TABLE = "fsdpcore.checksums"
"""Name of the tensor that holds the checksums, the last one in each file."""

_RESERVED = ("__metadata__", TABLE)


@dataclass(frozen=True)
class FileLayout:
    """A file before it is written.

    Attributes:
        header: its first bytes, up to ``data_start``.
        pieces: in the order of the file.
        order: the index that each of them had among those given.
        offsets: where each begins, in bytes from the start of the file.
        table: where the checksums begin, which go up to the end.
        size: of the file, in bytes.
    """

    header: bytes
    pieces: tuple[Written, ...]
    order: tuple[int, ...]
    offsets: tuple[int, ...]
    table: int
    size: int

    @property
    def data_start(self) -> int:
        """Where the first piece begins."""
        return len(self.header)


def lay_out(pieces: Sequence[Written], save_id: str, rank: int) -> FileLayout:
    """Lay out what ``rank`` writes; the largest items first, so that all are aligned."""
    kinds = {name: dtype_of(name) for name in {piece.dtype for piece in pieces}}

    def place(index: int) -> tuple[int, str, tuple[int, ...]]:
        piece = pieces[index]
        region = piece.region
        start = (region.start,) if isinstance(region, Range) else region.start
        return -kinds[piece.dtype].itemsize, piece.name, start

    order = sorted(range(len(pieces)), key=place)
    ordered = [pieces[index] for index in order]
    codes = {name: stored_as(kind) for name, kind in kinds.items()}
    entries, sizes = [], []
    for key, piece in zip(_keys(ordered), ordered, strict=True):
        code, more = codes[piece.dtype]
        sizes.append(piece.region.size * kinds[piece.dtype].itemsize)
        entries.append(Entry(key, code, (*_shape(piece), *more), sizes[-1]))
    blocks = sum(-(-size // BLOCK_BYTES) for size in sizes)
    table_bytes = blocks * CHECKSUM_BYTES
    entries.append(Entry(TABLE, "U8", (blocks, CHECKSUM_BYTES), table_bytes))
    about = {"format": "fsdpcore.checkpoint", "save_id": save_id, "rank": str(rank)}
    header = build_header(entries, about)
    offsets, offset = [], len(header)
    for size in sizes:
        offsets.append(offset)
        offset += size
    places = (tuple(offsets), offset, offset + table_bytes)
    return FileLayout(header, tuple(ordered), tuple(order), *places)


def nbytes_of(piece: Written) -> int:
    """Return the bytes of a piece."""
    return piece.region.size * dtype_of(piece.dtype).itemsize


def _shape(piece: Written) -> tuple[int, ...]:
    if isinstance(piece.region, Box):
        return piece.region.shape
    whole = piece.region.size == math.prod(piece.shape)
    return piece.shape if whole else (piece.region.size,)


def _keys(pieces: Sequence[Written]) -> list[str]:
    """Return names for the file: that of the array, numbered where it stands for several pieces."""
    counts: dict[str, int] = {}
    for piece in pieces:
        counts[piece.name] = counts.get(piece.name, 0) + 1
    taken = {*counts, *_RESERVED}
    keys, number = [], 0
    for index, piece in enumerate(pieces):
        if counts[piece.name] == 1 and piece.name not in _RESERVED:
            keys.append(piece.name)
            continue
        first = index == 0 or pieces[index - 1].name != piece.name
        number = 0 if first else number + 1
        key = f"{piece.name}#{number}"
        while key in taken:
            key += "#"
        taken.add(key)
        keys.append(key)
    return keys
