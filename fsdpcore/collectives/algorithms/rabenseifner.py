"""Rabenseifner's all_reduce: recursive halving, then the same way back. For large arrays.

First ``halving`` leaves every rank the sum of one chunk; then the ranks return along the same
tree what they have, each to the one that it received from.

With p ranks and n bytes, for p = 2**k:

==========  ========================================
all_reduce  2 lg p alpha + 2 ((p - 1) / p) n beta + ((p - 1) / p) n gamma
==========  ========================================

For other p, the first half costs what ``halving`` says, and the second half is its mirror image:
what a rank sent in the first, it receives in the second. Both together, rank i sends and receives
m(i, p) + d(i, p) messages, where m and d are those of ``doubling``, and all ranks 2 (p - 1) n
bytes. (Thakur, Rabenseifner & Gropp 2005, there for powers of two.)

Canonical. For float16 and bfloat16 the first half travels as float32. Ranks that lay the chunks out
like rank 0 (all of them for p = 2**k) work in the output, the others in memory of their own; of
float16 and bfloat16, all reduce in memory of their own.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from fsdpcore.collectives.algorithms import halving
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.core.buffers import Array, bounds_of, split_sizes
from fsdpcore.core.reductions import Reduction


def all_reduce(context: CollectiveContext, source: Array, out: Array, reduction: Reduction) -> None:
    """Reduce ``source`` of all ranks into ``out`` (may be ``source``) of all ranks."""
    plan = halving.plan(context.rank, context.size)
    layout = halving.plan(0, context.size).order
    bounds = bounds_of(split_sizes(source.size, context.size))
    places = [(0, 0)] * context.size
    for chunk, ends in zip(layout, pairwise(bounds), strict=True):
        places[chunk] = ends
    at = plan.positions([end - start for start, end in places])
    result = out if plan.order == layout else np.empty_like(out)
    if result is out and out.dtype == reduction.accumulator:
        total = out
        np.copyto(total, source)
    else:
        total = halving.load(plan, source, places, reduction)
    own = halving.reduce(context, plan, total, at, reduction)
    here = plan.order.index(context.rank)
    reduction.store(own, result[at[here] : at[here + 1]], context.size)
    for merge in reversed(plan.merges):
        arriving = [context.irecv(result[at[s.first] : at[s.end]], s.target) for s in merge.sends]
        context.isend(result[at[merge.first] : at[merge.end]], merge.source)
        context.wait(*arriving)
    context.wait_all()
    if result is not out:
        for number, chunk in enumerate(plan.order):
            np.copyto(out[slice(*places[chunk])], result[at[number] : at[number + 1]])
