"""What ranks hold in memory: described by each for itself, gathered as columns of numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fsdpcore.checkpoint.format.packing import pack, unpack
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.region_table import (
    RANGE,
    Column,
    Ints,
    RegionTable,
    ShapeTable,
)
from fsdpcore.core.geometry.regions import Range, Region, whole


class HeldPiece(NamedTuple):
    """A piece that a rank holds in memory.

    Attributes:
        region: which elements.
        rows: extent of the first axis in memory.
        row: elements of each row; it can be cut between rows only.
    """

    region: Region
    rows: int
    row: int


class HeldArray(NamedTuple):
    """What a rank holds of an array.

    Attributes:
        name: of the array.
        dtype: by name.
        shape: of the whole array.
        pieces: what this rank holds.
        replica: of which copy they are, see ``ShardedArray``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[HeldPiece, ...]
    replica: int = 0


def held_piece(region: Region, shape: tuple[int, ...]) -> HeldPiece:
    """Return how a rank holds a region, which is not empty, of an array of ``shape``."""
    if isinstance(region, Range):
        return HeldPiece(region, region.size, 1)
    size = region.size
    rows = region.shape[0] if shape else 1
    # All of an array is the same piece however it lies in memory.
    return HeldPiece(whole(shape) if size == math.prod(shape) else region, rows, size // rows)


class RankHolding(NamedTuple):
    """What one rank holds, as it tells it.

    Attributes:
        names: name, dtype and shape of each array that it knows, as text.
        pieces: how many it has.
        numbers: of all pieces the number of the array, of its copy, elements of a row, whether it
            is a box, column by column; then all bounds.
    """

    names: str
    pieces: int
    numbers: Column

    def encode(self, *, named: bool) -> str:
        """Write it down; without the names if another rank tells the same ones."""
        names, numbers = self.names if named else None, self.numbers
        return json.dumps([names, self.pieces, len(numbers), pack(numbers)])


def holding(arrays: Iterable[HeldArray]) -> RankHolding:
    """Return what a rank holds; of an array of which it has nothing, just the name."""
    arrays = list(arrays)
    pieces = [(n, array, piece) for n, array in enumerate(arrays) for piece in array.pieces]
    regions = RegionTable.of([piece.region for _, _, piece in pieces])
    columns: list[Any] = [
        [number for number, _, _ in pieces],
        [array.replica for _, array, _ in pieces],
        [piece.row for _, _, piece in pieces],
        regions.axes != RANGE,
        regions.bounds,
    ]
    names = json.dumps([each[:3] for each in arrays], separators=(",", ":"))
    numbers = [np.asarray(column, np.int64) for column in columns]
    return RankHolding(names, len(pieces), np.concatenate(numbers))


def decode(texts: Sequence[str], same: Sequence[str]) -> list[RankHolding]:
    """Read what all ranks wrote.

    Args:
        texts: of all of them.
        same: for each rank a text, the same where the names are; the first of these gave them.
    """
    found = []
    told: dict[str, str] = {}
    for key, text in zip(same, texts, strict=True):
        names, count, size, numbers = json.loads(text)
        names = told.setdefault(key, names)
        told_pieces = unpack(numbers, size, "the pieces of a rank")
        found.append(RankHolding(names, count, told_pieces))
    return found


@dataclass(frozen=True, eq=False)
class HeldTable:
    """The pieces of all ranks, rank by rank, in columns.

    Attributes:
        arrays: dtype and shape by name.
        shapes: of the arrays.
        rank: who holds each piece.
        number: of the piece among all of its rank's.
        array: its number.
        replica: of which copy of the array it is.
        row: elements of each row; it can be cut between rows only.
        regions: which elements.
    """

    arrays: dict[str, tuple[str, tuple[int, ...]]]
    shapes: ShapeTable
    rank: Ints
    number: Ints
    array: Ints
    replica: Ints
    row: Ints
    regions: RegionTable

    @classmethod
    def of(cls, ranks: Sequence[RankHolding]) -> HeldTable:
        """Bring together what all ranks hold.

        Raises:
            ArgumentError: they disagree about an array.
        """
        arrays: dict[str, tuple[str, tuple[int, ...]]] = {}
        places: dict[str, int] = {}
        numbers: dict[str, Ints] = {}  # of the arrays that a rank names
        columns: list[list[Column]] = [[], [], [], []]
        bounds: list[Column] = [np.empty(0, np.int8)]
        for rank, (names, count, told) in enumerate(ranks):
            mine = numbers.get(names)
            if mine is None:
                mine = numbers[names] = _numbered(names, rank, arrays, places)
            parts = np.split(told, np.arange(1, 5) * count)
            columns[0].append(mine[parts[0]])
            for column, part in zip(columns[1:], parts[1:4], strict=True):
                column.append(part)
            bounds.append(parts[4])
        # Told in as few bits as they need, but sums and products are made of them.
        array, replica, row, boxed = (
            np.concatenate(each).astype(np.int64, copy=False) for each in columns
        )
        shapes = ShapeTable([shape for _, shape in arrays.values()])
        axes = np.where(boxed == 0, RANGE, shapes.axes[array]).astype(np.int8)
        counts = np.array([each.pieces for each in ranks], np.int64)
        rank_of = np.repeat(np.arange(len(ranks)), counts)
        number = np.arange(len(array)) - np.repeat(np.cumsum(counts) - counts, counts)
        regions = RegionTable.packed(axes, np.concatenate(bounds))
        return cls(arrays, shapes, rank_of, number, array, replica, row, regions)


def _numbered(
    names: str, rank: int, arrays: dict[str, tuple[str, tuple[int, ...]]], places: dict[str, int]
) -> Ints:
    """Return the numbers of the arrays that a rank names; new ones are added to both."""
    found = []
    for name, dtype, extents in json.loads(names):
        shape = tuple(extents)
        known = arrays.setdefault(name, (dtype, shape))
        if known != (dtype, shape):
            raise ArgumentError(
                f"{name} has dtype {dtype} and shape {shape} on rank {rank}, but {known[0]} and "
                f"{known[1]} on another"
            )
        found.append(places.setdefault(name, len(places)))
    return np.array(found, np.int64)
