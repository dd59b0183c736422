"""What a load needs of blocks: of some all, of others parts. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fsdpcore.checkpoint.plan.catalog import Catalog
from fsdpcore.checkpoint.plan.read_plan import Scatter
from fsdpcore.checkpoint.plan.strided import Strided
from fsdpcore.core.geometry.region_table import Ints


class SplitRows(NamedTuple):
    """Rows of a ``ReadPlan``, cut where blocks begin.

    Attributes:
        whole: rows of whole blocks.
        parts: rows of a part of one block each.
    """

    whole: Ints
    parts: Ints


def split_rows(catalog: Catalog, rows: Ints) -> SplitRows:
    """Separate whole blocks from parts of blocks; both in ascending order."""
    block = catalog.block
    piece, low, high, target, dst = rows.T
    begin = -(-low // block) * block
    end = np.where(high == catalog.nbytes[piece], high, high // block * block)
    inner = begin < end
    whole = np.stack([piece, begin, end, target, dst + begin - low], axis=1)[inner]
    # In front of whole blocks, and behind them; or in one block or two neighbours.
    head_stop = np.minimum(begin, high)
    tail_start = np.where(inner, end, head_stop)
    heads = np.stack([piece, low, head_stop, target, dst], axis=1)[low < head_stop]
    tails = np.stack([piece, tail_start, high, target, dst + tail_start - low], axis=1)
    parts = np.concatenate([heads, tails[tail_start < high]])
    return SplitRows(whole, parts[np.lexsort((parts[:, 1], parts[:, 0]))])


def blocks_of_parts(catalog: Catalog, parts: Ints) -> Ints:
    """Return the number of the block that each part is of."""
    return catalog.first_block[parts[:, 0]] + parts[:, 1] // catalog.block


def blocks_of_scatter(catalog: Catalog, scatter: Scatter) -> Ints:
    """Return the numbers of the blocks that have any of its elements."""
    first, counts = counts_by_block(catalog, scatter.piece, scatter.cut)
    return first + np.flatnonzero(counts)


def counts_by_block(catalog: Catalog, piece: int, cut: Strided) -> tuple[int, Ints]:
    """Return a block, and how many bytes ``cut`` needs of it and of those behind it."""
    block = catalog.block
    first, last = cut.start // block, -(-cut.stop // block)
    bounds = np.arange(first, last + 1) * block
    return int(catalog.first_block[piece]) + first, cut.counts(bounds)
