"""Who writes which of the copies that several ranks hold of a piece, for all pieces at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fsdpcore.core.geometry.region_table import Flags, Ints

SPLIT_BYTES = 1 << 20
"""Copies of a piece from this size on are written by all ranks that hold one, each some rows."""


class Copies(NamedTuple):
    """Pieces in the memory of ranks, with a number for each in every column.

    Attributes:
        rank: who holds it.
        piece: which of the rank's it is.
        array: of which.
        group: the same number for those that are copies of one another.
        rows: that it can be cut between.
        size: in elements.
        nbytes: in bytes.
    """

    rank: Ints
    piece: Ints
    array: Ints
    group: Ints
    rows: Ints
    size: Ints
    nbytes: Ints

    def take(self, which: Ints | Flags) -> Copies:
        """Return some of them."""
        return Copies(*(column[which] for column in self))


class Shares(NamedTuple):
    """Who writes what: rows ``[start, stop)`` of copies, by the indices of these."""

    copy: Ints
    start: Ints
    stop: Ints


def dealt(copies: Copies, names: Sequence[str], ranks: int) -> Shares:
    """Give each piece to a rank that holds it: large ones in shares, others to who has least.

    Args:
        copies: of all ranks, in the order of these.
        names: of the arrays.
        ranks: how many.

    Returns:
        The shares in the order of the copies.
    """
    order = np.argsort(copies.group, kind="stable")
    ordered = copies.take(order)
    heads = np.flatnonzero(np.diff(ordered.group, prepend=-1))
    counts = np.diff(heads, append=len(order))
    cut, starts, stops = _cut(ordered, heads, counts)
    load = np.zeros(ranks, np.int64)
    each = np.repeat(cut, counts)
    taken = each.copy()
    taken[heads[counts == 1]] = True  # those without a choice
    parts = ordered.nbytes // np.maximum(ordered.size, 1) * (stops - starts) * _row(ordered)
    np.add.at(load, ordered.rank[taken], parts[taken])
    choice = np.flatnonzero((counts > 1) & ~cut)
    nbytes = ordered.nbytes[heads]
    # Then the largest, so that the small ones even it out.
    for group in sorted(
        choice.tolist(), key=lambda at: (-int(nbytes[at]), names[int(ordered.array[heads[at]])])
    ):
        first = int(heads[group])
        chosen = first + int(load[ordered.rank[first : first + counts[group]]].argmin())
        load[ordered.rank[chosen]] += nbytes[group]
        taken[chosen] = True
    found = np.flatnonzero(taken)
    found = found[np.argsort(order[found])]
    return Shares(order[found], starts[found], stops[found])


def _row(copies: Copies) -> Ints:
    return copies.size // np.maximum(copies.rows, 1)


def _cut(ordered: Copies, heads: Ints, counts: Ints) -> tuple[Flags, Ints, Ints]:
    """Return which groups are cut, and the rows of each copy that its rank would write."""
    starts, stops = np.zeros_like(ordered.rows), ordered.rows.copy()
    if not len(heads):
        return np.zeros(0, np.bool_), starts, stops
    row = _row(ordered)
    largest = np.maximum.reduceat(row, heads)
    rows, rest = np.divmod(ordered.size[heads], largest)
    fits = np.logical_and.reduceat(np.repeat(largest, counts) % row == 0, heads) & (rest == 0)
    cut = (ordered.nbytes[heads] >= SPLIT_BYTES) & (counts > 1) & (rows >= counts) & fits
    each = np.flatnonzero(np.repeat(cut, counts))
    count = np.repeat(counts, counts)[each]
    share = each - np.repeat(heads, counts)[each]
    every, more = np.divmod(np.repeat(rows, counts)[each], count)
    unit = np.repeat(largest, counts)[each] // row[each]
    starts[each] = (every * share + more * share // count) * unit
    stops[each] = (every * (share + 1) + more * (share + 1) // count) * unit
    return cut, starts, stops
