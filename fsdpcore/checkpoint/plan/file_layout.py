"""Where everything lies in a rank's file; the same for who writes it and for who describes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from fsdpcore.checkpoint.format.dtypes import named_dtype, stored_as
from fsdpcore.checkpoint.format.header import TensorEntry, build_header
from fsdpcore.checkpoint.format.metadata import BLOCK_BYTES
from fsdpcore.checkpoint.format.stored import CHECKSUM_BYTES
from fsdpcore.checkpoint.plan.save_plan import WrittenPiece
from fsdpcore.core.geometry.regions import Box, first_element

TABLE = "fsdpcore.checksums"
"""Name of the tensor that holds the checksums, the last one in each file."""

_RESERVED = ("__metadata__", TABLE)


@dataclass(frozen=True)
class FilePlaces:
    """Where everything lies in a file.

    Attributes:
        pieces: in the order of the file.
        order: the index that each of them had among those given.
        sizes: of each, in bytes.
        offsets: where each begins, in bytes from the start of the file.
        data_start: where the first one begins.
        table: where the checksums begin, which go up to the end.
        size: of the file, in bytes.
    """

    pieces: tuple[WrittenPiece, ...]
    order: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    data_start: int
    table: int
    size: int


@dataclass(frozen=True)
class FileLayout:
    """A file before it is written.

    Attributes:
        header: its first bytes, up to where the data starts.
        places: of all that follows.
    """

    header: bytes
    places: FilePlaces


def lay_out(pieces: Sequence[WrittenPiece], save_id: str, rank: int) -> FileLayout:
    """Lay out what ``rank`` writes; the largest items first, so that all are aligned."""
    order, sizes = _ordered(pieces)
    ordered = [pieces[index] for index in order]
    kinds = _kinds(pieces)
    codes = {name: stored_as(kind) for name, kind in kinds.items()}
    entries = []
    for key, piece, size in zip(_keys(ordered), ordered, sizes, strict=True):
        code, more = codes[piece.dtype]
        entries.append(TensorEntry(key, code, (*_shape(piece), *more), size))
    blocks = _blocks(sizes)
    entries.append(TensorEntry(TABLE, "U8", (blocks, CHECKSUM_BYTES), blocks * CHECKSUM_BYTES))
    about = {"format": "fsdpcore.checkpoint", "save_id": save_id, "rank": str(rank)}
    header = build_header(entries, about)
    return FileLayout(header, _places(ordered, order, sizes, len(header)))


def _kinds(pieces: Sequence[WrittenPiece]) -> dict[str, np.dtype[Any]]:
    return {name: named_dtype(name) for name in {piece.dtype for piece in pieces}}


def _ordered(pieces: Sequence[WrittenPiece]) -> tuple[list[int], list[int]]:
    """Return the order in which pieces are written, and the bytes of each in that order.

    Those with large items first, then by the name of the array and by their first elements. A
    ``SavePlan`` has them in this order, too.
    """
    itemsizes = {name: kind.itemsize for name, kind in _kinds(pieces).items()}

    def place(index: int) -> tuple[int, str, int]:
        name, dtype, shape, region, _ = pieces[index]
        return -itemsizes[dtype], name, first_element(region, shape)

    order = sorted(range(len(pieces)), key=place)
    return order, [pieces[each].region.size * itemsizes[pieces[each].dtype] for each in order]


def _places(
    ordered: Sequence[WrittenPiece], order: Sequence[int], sizes: Sequence[int], data_start: int
) -> FilePlaces:
    *offsets, table = accumulate(sizes, initial=data_start)
    return FilePlaces(
        tuple(ordered),
        tuple(order),
        tuple(sizes),
        tuple(offsets),
        data_start,
        table,
        table + _blocks(sizes) * CHECKSUM_BYTES,
    )


def _blocks(sizes: Sequence[int]) -> int:
    return sum(-(-size // BLOCK_BYTES) for size in sizes)


def _shape(piece: WrittenPiece) -> tuple[int, ...]:
    if isinstance(piece.region, Box):
        return piece.region.shape
    whole = piece.region.size == math.prod(piece.shape)
    return piece.shape if whole else (piece.region.size,)


def _keys(pieces: Sequence[WrittenPiece]) -> list[str]:
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
