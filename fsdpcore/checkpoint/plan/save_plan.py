"""Which rank writes what: everything once, and each rank about as much as the others.

Pure: no arrays, no communication. Every rank describes what it holds; rank 0 plans for all, in
columns of numbers, as there may be a million of pieces.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np

from fsdpcore.checkpoint.format.dtypes import named_dtype
from fsdpcore.checkpoint.plan.dealing import Copies, Shares, dealt
from fsdpcore.checkpoint.plan.held import (
    HeldArray,
    HeldTable,
    NamedArray,
    decode_column,
    encode_column,
    tabled,
)
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.overlaps import overlapping_coordinates
from fsdpcore.core.geometry.region_table import Flags, Ints, RegionTable, ShapeTable
from fsdpcore.core.geometry.regions import (
    Box,
    Range,
    Region,
    first_overlap,
    missing_elements,
    whole,
)

_MOST_ELEMENTS = 2**62


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


class WrittenPieces(Sequence[tuple[WrittenPiece, ...]]):
    """What each rank writes, by rank; made when it is asked for.

    Args:
        ranks: how many.
        arrays: all of them.
        copies: what all ranks hold.
        regions: of each copy.
        shares: which of them are written.
    """

    def __init__(
        self,
        ranks: int,
        arrays: Sequence[NamedArray],
        copies: Copies,
        regions: RegionTable,
        shares: Shares,
    ) -> None:
        self._arrays = arrays
        self._shares = shares
        self._copies = copies.take(shares.copy)
        self._regions = regions.take(shares.copy)
        self._bounds: list[int] = np.searchsorted(self._copies.rank, range(ranks + 1)).tolist()

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @overload
    def __getitem__(self, rank: int) -> tuple[WrittenPiece, ...]: ...

    @overload
    def __getitem__(self, rank: slice) -> Sequence[tuple[WrittenPiece, ...]]: ...

    def __getitem__(
        self, rank: int | slice
    ) -> tuple[WrittenPiece, ...] | Sequence[tuple[WrittenPiece, ...]]:
        if isinstance(rank, slice):
            return [self[each] for each in range(*rank.indices(len(self)))]
        low, high = self._bounds[range(len(self))[rank] :][:2]
        copies = self._copies
        rows = zip(*(column.tolist() for column in self._rows(low, high)), strict=True)
        return tuple(
            _written(
                self._arrays[copies.array[at]],
                self._regions[at],
                int(copies.rows[at]),
                Rows(*each),
            )
            for at, each in enumerate(rows, low)
        )

    def encoded(self, rank: int) -> str:
        """Write down what a rank is to write, for ``decode_written``."""
        return json.dumps([encode_column(each) for each in self._rows(*self._bounds[rank:][:2])])

    def _rows(self, low: int, high: int) -> tuple[Ints, Ints, Ints]:
        shares = self._shares
        return self._copies.piece[low:high], shares.start[low:high], shares.stop[low:high]


@dataclass(frozen=True)
class SavePlan:
    """What every rank writes.

    Attributes:
        arrays: all of them: dtype and shape by name.
        written: by rank.
    """

    arrays: Mapping[str, tuple[str, tuple[int, ...]]]
    written: WrittenPieces


def decode_written(text: str, held: Iterable[HeldArray]) -> tuple[WrittenPiece, ...]:
    """Read which of the pieces that a rank holds it is to write."""
    pieces = [(array, piece) for array in held for piece in array.pieces]
    found = []
    for each in zip(*(decode_column(column).tolist() for column in json.loads(text)), strict=True):
        rows = Rows(*each)
        array, piece = pieces[rows.piece]
        found.append(_written(NamedArray(*array[:3]), piece.region, piece.rows, rows))
    return tuple(found)


def _written(array: NamedArray, region: Region, count: int, rows: Rows) -> WrittenPiece:
    """Return some of the rows, of which there are ``count``, of a region."""
    if rows.stop - rows.start < count:
        row = region.size // count
        region = _part(region, rows.start * row, rows.stop * row)
    return WrittenPiece(*array, region, rows)


def plan(held: Sequence[Sequence[HeldArray]]) -> SavePlan:
    """Decide who writes what; as ``plan_tables``, but for what ranks hold as they know it."""
    return plan_tables([tabled(each) for each in held])


def plan_tables(held: Sequence[HeldTable]) -> SavePlan:
    """Decide who writes what.

    Several ranks may hold the same piece. Where the copies of an array are cut differently, so that
    their pieces overlap without being the same, those of the first copy are written.

    Args:
        held: by all ranks.

    Raises:
        ArgumentError: the ranks disagree about an array, hold parts of one copy of it that overlap,
            or have not all of it.
    """
    arrays, numbers = _merged(held)
    counts = [len(each.array) for each in held]
    empty = np.empty(0, np.int64)
    array = np.concatenate([empty, *map(np.take, numbers, (each.array for each in held))])
    replica = np.concatenate([empty, *(each.replica for each in held)])
    regions = RegionTable.joined([each.regions for each in held])
    shapes = ShapeTable([each.shape for each in arrays])
    runs, group = _grouped(arrays, array, regions, shapes)
    itemsizes = [named_dtype(each.dtype, ArgumentError).itemsize for each in arrays]
    copies = Copies(
        np.repeat(np.arange(len(held)), counts),
        np.concatenate([empty, *map(np.arange, counts)]),
        array,
        group,
        np.concatenate([empty, *(each.rows for each in held)]),
        regions.sizes,
        regions.sizes * np.array(itemsizes, np.int64)[array],
    )
    kept = np.ones(len(array), np.bool_)
    for each in _irregular(copies, regions, runs, shapes).tolist():
        mine = np.flatnonzero(array == each)
        kept[mine] = _chosen(
            arrays[each], [regions[at] for at in mine.tolist()], replica[mine].tolist()
        )
    shares = dealt(copies.take(kept), [each.name for each in arrays], len(held))
    shares = shares._replace(copy=np.flatnonzero(kept)[shares.copy])
    return SavePlan(
        {name: (dtype, shape) for name, dtype, shape in arrays},
        WrittenPieces(len(held), arrays, copies, regions, shares),
    )


def _merged(held: Sequence[HeldTable]) -> tuple[list[NamedArray], list[Ints]]:
    """Return all arrays, and for each rank the numbers there of those that it has."""
    arrays: dict[str, NamedArray] = {}
    number: dict[str, int] = {}
    # Most ranks have the same ones, and tell so by the same object.
    known: dict[tuple[NamedArray, ...], Ints] = {}
    last: tuple[tuple[NamedArray, ...], Ints] | None = None
    found = []
    for rank, each in enumerate(held):
        if last is None or last[0] is not each.arrays:
            if each.arrays not in known:
                for array in each.arrays:
                    first = arrays.setdefault(array.name, array)
                    number.setdefault(array.name, len(number))
                    if first != array:
                        raise ArgumentError(
                            f"{array.name} has dtype {array.dtype} and shape {array.shape} on rank "
                            f"{rank}, but {first.dtype} and {first.shape} on another"
                        )
                mine = [number[array.name] for array in each.arrays]
                known[each.arrays] = np.array(mine, np.int64)
            last = each.arrays, known[each.arrays]
        found.append(last[1])
    return [*arrays.values()], found


def _grouped(
    arrays: Sequence[NamedArray], array: Ints, regions: RegionTable, shapes: ShapeTable
) -> tuple[tuple[Ints, Flags], Ints]:
    """Look which pieces are the same.

    Returns:
        Where each begins on a line of all arrays, one behind the other, and whether it is a run of
        that; and for each piece the index of the first that is the same.
    """
    wrong = regions.misplaced(array, shapes)
    if len(wrong):
        at = int(wrong[0])
        name, _, shape = arrays[array[at]]
        raise ArgumentError(f"{name} of shape {shape} has no part {regions[at]}")
    if sum(math.prod(each.shape) for each in arrays) > _MOST_ELEMENTS:
        raise ArgumentError("all arrays together are larger than what can be addressed")
    first, run = regions.runs(array, shapes)
    first += (np.cumsum(shapes.sizes) - shapes.sizes)[array]
    order = np.argsort(first, kind="stable")
    same = np.diff(first[order]) == 0
    group = np.arange(len(array))
    tied = np.zeros(len(array), np.bool_)
    tied[order[1:][same]] = True
    tied[order[:-1][same]] = True
    some = np.flatnonzero(tied)
    group[some] = some[regions.take(some).firsts(array[some])]
    return (first, run), group


def _irregular(
    copies: Copies, regions: RegionTable, runs: tuple[Ints, Flags], shapes: ShapeTable
) -> Ints:
    """Return the arrays of which the pieces overlap, or may do, or are not all there."""
    pieces = np.flatnonzero(copies.group == np.arange(len(copies.group)))
    first, run = runs
    pieces = pieces[np.argsort(first[pieces], kind="stable")]
    array, size = copies.array[pieces], regions.sizes[pieces]
    # What wraps around here overlaps, too.
    total = np.zeros(len(shapes.sizes), np.int64)
    np.add.at(total, array, size)
    found = total != shapes.sizes
    clash = np.diff(first[pieces]) < size[:-1]
    boxes = np.zeros_like(found)
    boxes[array[~run[pieces]]] = True
    found[array[1:][clash & ~boxes[array[1:]]]] = True
    bounds = np.searchsorted(array, np.arange(len(found) + 1))
    for each in np.flatnonzero(boxes & ~found).tolist():
        mine = regions.take(pieces[bounds[each] : bounds[each + 1]])
        # A range is in a box here that may have more than it.
        if overlapping_coordinates(*mine.around(shapes.shapes[each])) is not None:
            found[each] = True
    return np.flatnonzero(found)


def _chosen(array: NamedArray, held: Sequence[Region], replicas: Sequence[int]) -> list[bool]:
    """Return which of the pieces are to be written, which make up the array."""
    name, _, shape = array
    found: dict[Region, set[int]] = {}
    for region, replica in zip(held, replicas, strict=True):
        found.setdefault(region, set()).add(replica)
    chosen, of_one = list(found), ""
    if len(found) > 1 and first_overlap(chosen, shape) is not None:
        by_replica = [
            [region for region, theirs in found.items() if replica in theirs]
            for replica in sorted(set(replicas))
        ]
        for theirs in by_replica:
            _check_disjoint(name, shape, theirs)
        chosen, of_one = by_replica[0], f" of replica {min(replicas)}"
    size = whole(shape)
    missing = missing_elements(size, chosen, shape)
    if missing:
        raise ArgumentError(
            f"{name} of shape {shape} is not complete: no rank{of_one} has {missing} of its "
            f"{size.size} elements"
        )
    kept = set(chosen)
    return [region in kept for region in held]


def _check_disjoint(name: str, shape: tuple[int, ...], regions: list[Region]) -> None:
    overlap = first_overlap(regions, shape)
    if overlap is not None:
        one, other = (regions[index] for index in overlap)
        raise ArgumentError(
            f"{name}: {one} and {other} share elements, so that it is not clear which rank's are "
            "to be kept; parts of an array are equal on several ranks, or do not overlap"
        )


def _part(region: Region, start: int, stop: int) -> Region:
    """Return elements ``[start, stop)`` of a region, in its own C order, which are whole rows."""
    if isinstance(region, Range):
        return Range(region.start + start, region.start + stop)
    row = region.size // region.shape[0]
    first = region.start[0]
    return Box(
        (first + start // row, *region.start[1:]),
        (first + stop // row, *region.stop[1:]),
    )
