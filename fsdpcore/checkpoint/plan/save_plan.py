"""Which rank writes what: everything once, and each rank about as much as the others.

Pure: no arrays, no communication. Every rank describes what it holds; rank 0 plans for all, by
columns of numbers, as in a large job there are millions of pieces.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fsdpcore.checkpoint.format.dtypes import named_dtype
from fsdpcore.checkpoint.format.piece_table import PieceTable
from fsdpcore.checkpoint.plan.dealing import Share, dealt, part_of
from fsdpcore.checkpoint.plan.held import HeldArray, HeldTable, holding
from fsdpcore.checkpoint.plan.replicas import chosen_copies
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.region_table import Ints
from fsdpcore.core.geometry.regions import Region


class Rows(NamedTuple):
    """Rows ``[start, stop)`` of a piece, which is given by its number among all of a rank's."""

    piece: int
    start: int
    stop: int


class WrittenPiece(NamedTuple):
    """A piece that goes to a rank's file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    region: Region
    rows: Rows


@dataclass(frozen=True, eq=False)
class SavePlan:
    """What every rank writes.

    Attributes:
        arrays: all of them: dtype and shape by name.
        ranks: how many there are.
        writers: the ranks that write a file, ascending.
        table: the pieces of their files.
        rows: of each of these pieces what ``Rows`` has.
    """

    arrays: Mapping[str, tuple[str, tuple[int, ...]]]
    ranks: int
    writers: tuple[int, ...]
    table: PieceTable
    rows: Ints

    def of(self, rank: int) -> tuple[WrittenPiece, ...]:
        """Return what a rank writes, in the order of its file."""
        begin, end = self._pieces_of(rank)
        found = []
        for number in range(begin, end):
            name, dtype, shape = self._kinds[int(self.table.tensor[number])]
            rows = Rows(*self.rows[number].tolist())
            found.append(WrittenPiece(name, dtype, shape, self.table.regions[number], rows))
        return tuple(found)

    @property
    def written(self) -> tuple[tuple[WrittenPiece, ...], ...]:
        """What each rank writes."""
        return tuple(map(self.of, range(self.ranks)))

    def encode(self, rank: int) -> str:
        """Write down what a rank is to write, for ``decode_written``."""
        begin, end = self._pieces_of(rank)
        return json.dumps(self.rows[begin:end].tolist(), separators=(",", ":"))

    def _pieces_of(self, rank: int) -> tuple[int, int]:
        file = self._files.get(rank)
        if file is None:
            return 0, 0
        begin, end = self.table.begins[file : file + 2].tolist()
        return begin, end

    @cached_property
    def _kinds(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(name, *kind) for name, kind in self.arrays.items()]

    @cached_property
    def _files(self) -> dict[int, int]:
        return {rank: file for file, rank in enumerate(self.writers)}


def decode_written(text: str, held: Sequence[HeldArray]) -> tuple[WrittenPiece, ...]:
    """Read what a rank is to write of what it holds."""
    pieces = [(array, piece) for array in held for piece in array.pieces]
    found = []
    for each in json.loads(text):
        rows = Rows(*each)
        array, piece = pieces[rows.piece]
        region = part_of(piece.region, rows.start * piece.row, rows.stop * piece.row)
        found.append(WrittenPiece(array.name, array.dtype, array.shape, region, rows))
    return tuple(found)


def plan(held: Sequence[Sequence[HeldArray]]) -> SavePlan:
    """Decide who writes what; ``held`` are the arrays of each rank. See ``plan_table``."""
    return plan_table(HeldTable.of([holding(each) for each in held]), len(held))


def plan_table(held: HeldTable, ranks: int) -> SavePlan:
    """Decide who writes what.

    Several ranks may hold the same piece. Where the copies of an array are cut differently, so that
    their pieces overlap without being the same, those of the first copy are written.

    Args:
        held: by all ranks.
        ranks: how many there are.

    Raises:
        ArgumentError: a dtype is not known, the ranks hold parts of one copy of an array that
            overlap, or have not all of it.
    """
    # Not of a file: another rank may know more dtypes.
    dtypes = [dtype for dtype, _ in held.arrays.values()]
    known = {name: named_dtype(name, ArgumentError).itemsize for name in dict.fromkeys(dtypes)}
    itemsizes = np.array([known[dtype] for dtype in dtypes], np.int64)
    first = chosen_copies(held)
    shares = dealt(held, first, itemsizes, ranks)
    return _in_files(held, shares, itemsizes, ranks)


def _in_files(held: HeldTable, shares: Share, itemsizes: Ints, ranks: int) -> SavePlan:
    """Bring what is written into the order of the files: see ``file_layout``."""
    piece, start, stop, regions = shares
    rank, array = held.rank[piece], held.array[piece]
    names = list(held.arrays)
    place = np.empty(len(names), np.int64)
    place[np.array(sorted(range(len(names)), key=names.__getitem__), np.int64)] = np.arange(
        len(names)
    )
    first, sizes, _ = regions.runs(array, held.shapes)
    order = np.lexsort((first, place[array], -itemsizes[array], rank))
    writers, counts = np.unique(rank, return_counts=True)
    regions, array = regions.take(order), array[order]
    table = PieceTable(counts, array, regions, sizes[order] * itemsizes[array])
    rows = np.stack([held.number[piece], start, stop], axis=1)[order]
    return SavePlan(held.arrays, ranks, tuple(writers.tolist()), table, rows)
