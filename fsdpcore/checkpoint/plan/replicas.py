"""Which of the copies that ranks hold of an array are to be written. Pure."""

from __future__ import annotations

import numpy as np

from fsdpcore.checkpoint.plan.held import HeldTable
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.disjoint import overlapping
from fsdpcore.core.geometry.region_table import Flags, Ints
from fsdpcore.core.geometry.regions import first_overlap


def chosen_copies(held: HeldTable) -> Ints:
    """Return for each piece the first one that is the same; -1 for one that is not written.

    The pieces that are written make up all arrays, each element once.

    Raises:
        ArgumentError: parts of one copy of an array overlap, or elements are in no piece.
    """
    first = held.regions.firsts(held.array)
    heads = np.flatnonzero(first == np.arange(len(first)))
    array = held.array[heads]
    clashing = overlapping(array, held.regions.take(heads), array, held.shapes)
    replicas: dict[int, int] = {}
    if clashing.size:
        kept, replicas = _of_one_copy(held, first, clashing)
        first = np.where(kept[first], first, -1)
        heads = heads[kept[heads]]
    _check_complete(held, heads, replicas)
    return first


def _of_one_copy(held: HeldTable, first: Ints, clashing: Ints) -> tuple[Flags, dict[int, int]]:
    """Return which pieces to keep, and for each array that is cut differently the replica."""
    mine = np.flatnonzero(np.isin(held.array, clashing))
    many = int(held.replica.max()) + 1
    pieces = np.unique(first[mine] * many + held.replica[mine])
    piece, replica = pieces // many, pieces % many
    array = held.array[piece]
    copies = array * many + replica
    bad = overlapping(copies, held.regions.take(piece), array, held.shapes)
    if bad.size:
        _raise_overlap(held, piece[copies == bad[0]])
    lowest = np.full(len(held.arrays), many, np.int64)
    np.minimum.at(lowest, array, replica)
    kept = ~np.isin(held.array, clashing)
    kept[piece[replica == lowest[array]]] = True
    return kept, {number: int(lowest[number]) for number in clashing.tolist()}


def _raise_overlap(held: HeldTable, pieces: Ints) -> None:
    array = int(held.array[pieces[0]])
    regions = [held.regions[each] for each in pieces.tolist()]
    pair = first_overlap(regions, held.shapes.shapes[array])
    assert pair is not None
    one, other = (regions[index] for index in pair)
    raise ArgumentError(
        f"{list(held.arrays)[array]}: {one} and {other} share elements, so that it is not clear "
        "which rank's are to be kept; parts of an array are equal on several ranks, or do not "
        "overlap"
    )


def _check_complete(held: HeldTable, heads: Ints, replicas: dict[int, int]) -> None:
    there = np.zeros(len(held.arrays), np.int64)
    np.add.at(there, held.array[heads], held.regions.sizes[heads])
    lacking = np.flatnonzero(there != held.shapes.sizes)
    if lacking.size:
        number = int(lacking[0])
        of_one = f" of replica {replicas[number]}" if number in replicas else ""
        size = int(held.shapes.sizes[number])
        raise ArgumentError(
            f"{list(held.arrays)[number]} of shape {held.shapes.shapes[number]} is not complete: "
            f"no rank{of_one} has {size - int(there[number])} of its {size} elements"
        )
