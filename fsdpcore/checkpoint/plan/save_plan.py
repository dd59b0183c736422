"""Which rank writes what: everything once, and each rank about as much as the others.

Pure: no arrays, no communication. Every rank describes what it holds; rank 0 plans for all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsdpcore.checkpoint.format.dtypes import named_dtype
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.regions import (
    Box,
    Range,
    Region,
    first_overlap,
    missing_elements,
    whole,
)

SPLIT_BYTES = 1 << 20
"""Copies of a piece from this size on are written by all ranks that hold one, each some rows."""


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


@dataclass(frozen=True)
class SavePlan:
    """What every rank writes.

    Attributes:
        arrays: all of them: dtype and shape by name.
        written: by rank.
    """

    arrays: Mapping[str, tuple[str, tuple[int, ...]]]
    written: tuple[tuple[WrittenPiece, ...], ...]


def held_piece(region: Region, shape: tuple[int, ...]) -> HeldPiece:
    """Return how a rank holds a region, which is not empty, of an array of ``shape``."""
    if isinstance(region, Range):
        return HeldPiece(region, region.size, 1)
    size = region.size
    rows = region.shape[0] if shape else 1
    # All of an array is the same piece however it lies in memory.
    return HeldPiece(whole(shape) if size == math.prod(shape) else region, rows, size // rows)


def encode(held: Iterable[HeldArray]) -> str:
    """Write down what a rank holds."""
    rows = [
        [
            name,
            dtype,
            shape,
            [[_bounds(piece.region), piece.rows, piece.row] for piece in pieces],
            replica,
        ]
        for name, dtype, shape, pieces, replica in held
    ]
    return json.dumps(rows, separators=(",", ":"))


def decode(text: str) -> list[HeldArray]:
    """Read what ``encode`` wrote."""
    return [
        HeldArray(
            name,
            dtype,
            tuple(shape),
            tuple(HeldPiece(_region(bounds), rows, row) for bounds, rows, row in pieces),
            replica,
        )
        for name, dtype, shape, pieces, replica in json.loads(text)
    ]


def encode_written(pieces: Iterable[WrittenPiece]) -> str:
    """Write down what a rank is to write."""
    rows = [
        [name, dtype, shape, _bounds(region), rows] for name, dtype, shape, region, rows in pieces
    ]
    return json.dumps(rows, separators=(",", ":"))


def decode_written(text: str) -> tuple[WrittenPiece, ...]:
    """Read what ``encode_written`` wrote."""
    return tuple(
        WrittenPiece(name, dtype, tuple(shape), _region(bounds), Rows(*rows))
        for name, dtype, shape, bounds, rows in json.loads(text)
    )


def _bounds(region: Region) -> list[Any]:
    if isinstance(region, Range):
        return [region.start, region.stop]
    return [list(region.start), list(region.stop)]


def _region(bounds: Sequence[Any]) -> Region:
    start, stop = bounds
    return Range(start, stop) if isinstance(start, int) else Box(tuple(start), tuple(stop))


class _Copies:
    """One region of an array, and the ranks that hold it."""

    def __init__(self, region: Region, itemsize: int) -> None:
        self.region = region
        self.nbytes = region.size * itemsize
        self.holders: list[tuple[int, int, HeldPiece]] = []  # rank, number of the piece, piece
        self.replicas: set[int] = set()  # of which copies of the array it is a part

    def cuts(self) -> list[int] | None:
        """Return where to cut the rows, for each holder a share; None to leave them together."""
        row = max(held.row for _, _, held in self.holders)
        rows, rest = divmod(self.region.size, row)
        count = len(self.holders)
        fits = not rest and all(not row % held.row for _, _, held in self.holders)
        if self.nbytes < SPLIT_BYTES or count == 1 or rows < count or not fits:
            return None
        return [rows * share // count * row for share in range(count + 1)]  # in elements


def plan(held: Sequence[Sequence[HeldArray]]) -> SavePlan:
    """Decide who writes what.

    Several ranks may hold the same piece. Where the copies of an array are cut differently, so that
    their pieces overlap without being the same, those of the first copy are written.

    Args:
        held: by all ranks, of each the arrays.

    Raises:
        ArgumentError: the ranks disagree about an array, hold parts of one copy of it that overlap,
            or have not all of it.
    """
    arrays: dict[str, tuple[str, tuple[int, ...]]] = {}
    regions: dict[str, dict[Region, _Copies]] = {}
    for rank, of_rank in enumerate(held):
        number = 0
        for name, dtype, shape, pieces, replica in of_rank:
            # Not of a file: another rank may know more dtypes.
            itemsize = named_dtype(dtype, ArgumentError).itemsize
            known = arrays.setdefault(name, (dtype, shape))
            if known != (dtype, shape):
                raise ArgumentError(
                    f"{name} has dtype {dtype} and shape {shape} on rank {rank}, but {known[0]} "
                    f"and {known[1]} on another"
                )
            found = regions.setdefault(name, {})
            for piece in pieces:
                copies = found.get(piece.region)
                if copies is None:
                    copies = found[piece.region] = _Copies(piece.region, itemsize)
                copies.holders.append((rank, number, piece))
                copies.replicas.add(replica)
                number += 1
    for name, found in regions.items():
        regions[name] = _chosen(name, arrays[name][1], found)
    return SavePlan(arrays, _shared_out(arrays, regions, len(held)))


def _chosen(
    name: str, shape: tuple[int, ...], found: dict[Region, _Copies]
) -> dict[Region, _Copies]:
    """Return the pieces that are to be written, which make up the array, each element once."""
    of_one = ""
    if len(found) > 1 and first_overlap(list(found), shape) is not None:
        replicas = sorted(set().union(*(copies.replicas for copies in found.values())))
        by_replica = [
            {region: copies for region, copies in found.items() if replica in copies.replicas}
            for replica in replicas
        ]
        for theirs in by_replica:
            _check_disjoint(name, shape, list(theirs))
        found = by_replica[0]
        of_one = f" of replica {replicas[0]}"
    size = Range(0, _size(shape))
    missing = 0 if list(found) == [size] else missing_elements(size, list(found), shape)
    if missing:
        raise ArgumentError(
            f"{name} of shape {shape} is not complete: no rank{of_one} has {missing} of its "
            f"{size.size} elements"
        )
    return found


def _check_disjoint(name: str, shape: tuple[int, ...], regions: list[Region]) -> None:
    overlap = first_overlap(regions, shape)
    if overlap is not None:
        one, other = (regions[index] for index in overlap)
        raise ArgumentError(
            f"{name}: {one} and {other} share elements, so that it is not clear which rank's are "
            "to be kept; parts of an array are equal on several ranks, or do not overlap"
        )


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def _shared_out(
    arrays: Mapping[str, tuple[str, tuple[int, ...]]],
    regions: Mapping[str, Mapping[Region, _Copies]],
    ranks: int,
) -> tuple[tuple[WrittenPiece, ...], ...]:
    """Give each piece to a rank that holds it: large ones in shares, others to who has least."""
    written: list[list[WrittenPiece]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    together: list[tuple[int, str, _Copies]] = []
    for name, found in regions.items():
        itemsize = named_dtype(arrays[name][0]).itemsize
        for copies in found.values():
            cuts = copies.cuts()
            if cuts is None:
                together.append((copies.nbytes, name, copies))
                continue
            for (rank, number, held), start, stop in zip(
                copies.holders, cuts, cuts[1:], strict=False
            ):
                rows = Rows(number, start // held.row, stop // held.row)
                written[rank].append(
                    WrittenPiece(name, *arrays[name], _part(copies.region, start, stop), rows)
                )
                load[rank] += (stop - start) * itemsize
    # Those without a choice first, then the largest, so that the small ones even it out.
    together.sort(key=lambda each: (len(each[2].holders) > 1, -each[0], each[1]))
    for nbytes, name, copies in together:
        chosen, number, held = min(copies.holders, key=lambda each: (load[each[0]], each[0]))
        load[chosen] += nbytes
        rows = Rows(number, 0, held.rows)
        written[chosen].append(WrittenPiece(name, *arrays[name], copies.region, rows))
    return tuple(tuple(each) for each in written)


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
