"""Ring: every rank sends to its right neighbour only. For large arrays and many ranks.

With p ranks and n bytes (per rank for all_reduce, in total for the others), each rank sends:

==============  ========================================
reduce_scatter  (p - 1) alpha + ((p - 1) / p) n beta, and reduces ((p - 1) / p) n gamma
all_gather      (p - 1) alpha + ((p - 1) / p) n beta
all_reduce      the sum of both: 2 (p - 1) alpha + 2 ((p - 1) / p) n beta
==============  ========================================

(Patarasuk & Yuan 2009.) For float16 and bfloat16, partial sums travel as float32, which doubles
the bytes of the reduction. Not canonical: chunk c is combined in the order c + 1, c + 2, ..., c of
ranks, so the bits differ from those of the other algorithms (they are still equal on all ranks).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.core.buffers import Array, bounds_of, split_sizes
from fsdpcore.core.reductions import Reduction


def reduce_scatter(
    context: CollectiveContext,
    source: Array,
    own: Array,
    bounds: Sequence[int],
    reduction: Reduction,
) -> None:
    """Reduce ``source``, of which each rank gets ``[bounds[rank]:bounds[rank + 1]]`` in ``own``.

    ``own`` may be that part of ``source``.
    """
    me, p = context.rank, context.size

    def chunk(index: int) -> Array:
        index %= p
        return source[bounds[index] : bounds[index + 1]]

    partial = reduction.load(chunk(me - 1))
    room = np.empty(max(chunk(index).size for index in range(p)), reduction.accumulator)
    for step in range(p - 1):
        mine = chunk(me - 2 - step)
        received = room[: mine.size]
        context.exchange(partial, (me + 1) % p, received, (me - 1) % p)
        partial = reduction.load(mine)
        reduction.combine(received, partial, partial)
    reduction.store(partial, own, p)


def all_gather(context: CollectiveContext, own: Array, out: Array, bounds: Sequence[int]) -> None:
    """Bring every rank's ``own`` to ``out[bounds[rank]:bounds[rank + 1]]`` of all ranks.

    ``own`` may be that part of ``out``.
    """
    me, p = context.rank, context.size

    def chunk(index: int) -> Array:
        index %= p
        return out[bounds[index] : bounds[index + 1]]

    np.copyto(chunk(me), own)
    for step in range(p - 1):
        context.exchange(chunk(me - step), (me + 1) % p, chunk(me - 1 - step), (me - 1) % p)


def all_reduce(context: CollectiveContext, source: Array, out: Array, reduction: Reduction) -> None:
    """Reduce ``source`` of all ranks into ``out`` (may be ``source``) of all ranks."""
    bounds = bounds_of(split_sizes(source.size, context.size))
    own = out[bounds[context.rank] : bounds[context.rank + 1]]
    reduce_scatter(context, source, own, bounds, reduction)
    all_gather(context, own, out, bounds)
