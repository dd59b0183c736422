"""Who of those that hold the same piece writes it: each rank about as much as the others. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fsdpcore.checkpoint.plan.held import HeldTable
from fsdpcore.core.geometry.region_table import Ints, RegionTable
from fsdpcore.core.geometry.regions import Box, Range, Region

SPLIT_BYTES = 1 << 20
"""Copies of a piece from this size on are written by all ranks that hold one, each some rows."""


class Share(NamedTuple):
    """What is written, in columns.

    Attributes:
        piece: number of the held piece.
        start, stop: which rows of it.
        regions: which elements these are.
    """

    piece: Ints
    start: Ints
    stop: Ints
    regions: RegionTable


def dealt(held: HeldTable, first: Ints, itemsizes: Ints, ranks: int) -> Share:
    """Give each piece to a rank that holds it: large ones in shares, others to who has least.

    Args:
        held: by all ranks.
        first: for each piece the first one that is the same; -1 if it is not written.
        itemsizes: of the arrays.
        ranks: how many there are.
    """
    order = np.argsort(first, kind="stable")
    order = order[np.searchsorted(first[order], 0) :]
    begins = np.flatnonzero(np.diff(first[order], prepend=-1))
    counts = np.diff(begins, append=len(order))
    nbytes = held.regions.sizes * itemsizes[held.array]
    alone = order[begins[counts == 1]]
    load = np.zeros(ranks, np.int64)
    np.add.at(load, held.rank[alone], nbytes[alone])
    cut: list[tuple[int, int, int]] = []
    together: list[Ints] = []
    for begin, count in zip(begins[counts > 1].tolist(), counts[counts > 1].tolist(), strict=True):
        holders = order[begin : begin + count]
        shares = _shares(held, holders, int(nbytes[holders[0]]))
        if not shares:
            together.append(holders)
        for piece, start, stop in shares:
            load[held.rank[piece]] += (
                (stop - start) * held.row[piece] * itemsizes[held.array[piece]]
            )
        cut += shares
    # The largest first, so that the small ones even it out.
    names = list(held.arrays)
    together.sort(key=lambda each: (-nbytes[each[0]], names[held.array[each[0]]]))
    chosen = []
    for holders in together:
        piece = int(holders[np.argmin(load[held.rank[holders]])])
        load[held.rank[piece]] += nbytes[piece]
        chosen.append(piece)
    return _joined(held, np.concatenate([alone, np.array(chosen, np.int64)]), cut)


def _shares(held: HeldTable, holders: Ints, nbytes: int) -> list[tuple[int, int, int]]:
    """Return piece, first and last row of what each holder writes; nothing to leave it whole."""
    if nbytes < SPLIT_BYTES:
        return []
    size = int(held.regions.sizes[holders[0]])
    of_each = held.row[holders].tolist()
    row, count = max(of_each), len(of_each)
    rows, rest = divmod(size, row)
    if rows < count or rest or any(row % each for each in of_each):
        return []
    cuts = [rows * share // count * row for share in range(count + 1)]  # in elements
    return [
        (piece, start // own, stop // own)
        for piece, own, start, stop in zip(holders.tolist(), of_each, cuts, cuts[1:], strict=False)
    ]


def _joined(held: HeldTable, whole: Ints, cut: list[tuple[int, int, int]]) -> Share:
    """Return pieces that are written as they are, and those of which some rows are."""
    rows = np.array(cut, np.int64).reshape(-1, 3)
    parts = [
        part_of(held.regions[piece], start * row, stop * row)
        for (piece, start, stop), row in zip(cut, held.row[rows[:, 0]].tolist(), strict=True)
    ]
    all_rows = held.regions.sizes[whole] // held.row[whole]
    return Share(
        np.concatenate([whole, rows[:, 0]]),
        np.concatenate([np.zeros(len(whole), np.int64), rows[:, 1]]),
        np.concatenate([all_rows, rows[:, 2]]),
        RegionTable.joined([held.regions.take(whole), RegionTable.of(parts)]),
    )


def part_of(region: Region, start: int, stop: int) -> Region:
    """Return elements ``[start, stop)`` of a region, in its own C order, which are whole rows."""
    if stop - start == region.size:
        return region
    if isinstance(region, Range):
        return Range(region.start + start, region.start + stop)
    row = region.size // region.shape[0]
    first = region.start[0]
    return Box(
        (first + start // row, *region.start[1:]),
        (first + stop // row, *region.stop[1:]),
    )
