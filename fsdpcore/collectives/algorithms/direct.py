"""Direct (pairwise exchange): every rank sends each other rank exactly what that one needs.

With p ranks and n bytes (per rank for all_reduce and broadcast, in total for the others), each rank
sends, for broadcast the root:

==============  ========================================
reduce_scatter  (p - 1) alpha + ((p - 1) / p) n beta, and reduces ((p - 1) / p) n gamma
all_gather      (p - 1) alpha + ((p - 1) / p) n beta
all_reduce      the sum of both: 2 (p - 1) alpha + 2 ((p - 1) / p) n beta
all_to_all      (p - 1) alpha + ((p - 1) / p) n beta
broadcast       8 (p - 1) alpha + (1 + (p - 2) / (8 (p - 1))) n beta
==============  ========================================

The root of a broadcast sends each of the others a part, and they send it to each other, in eight
pieces: while one comes from the root, the one before is passed on. The root sends n bytes. Only
its last pieces are passed on after that.

As few bytes as the ring, but all messages are independent of each other and the reductions are
canonical. Needs room for n bytes during a reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.core.buffers import Array, bounds_of, split_sizes
from fsdpcore.core.reductions import Reduction
from fsdpcore.core.work import Pending

# In which the root of a broadcast serves all others, one after the other.
ROUNDS = 8


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
    size = bounds[me + 1] - bounds[me]
    parts = [*context.scratch((p - 1) * size, source.dtype).reshape(p - 1, size)]
    parts.insert(me, source[bounds[me] : bounds[me + 1]])
    # Rank order is rotated by the own rank, or all would send to rank 0 first.
    for step in range(1, p):
        context.irecv(parts[(me - step) % p], (me - step) % p)
    for step in range(1, p):
        peer = (me + step) % p
        context.isend(source[bounds[peer] : bounds[peer + 1]], peer)
    context.wait_all()
    reduction.reduce(parts, own)


def all_gather(context: CollectiveContext, own: Array, out: Array, bounds: Sequence[int]) -> None:
    """Bring every rank's ``own`` to ``out[bounds[rank]:bounds[rank + 1]]`` of all ranks.

    ``own`` may be that part of ``out``.
    """
    me, p = context.rank, context.size
    for step in range(1, p):
        peer = (me - step) % p
        context.irecv(out[bounds[peer] : bounds[peer + 1]], peer)
    for step in range(1, p):
        context.isend(own, (me + step) % p)
    np.copyto(out[bounds[me] : bounds[me + 1]], own)
    context.wait_all()


def all_reduce(context: CollectiveContext, source: Array, out: Array, reduction: Reduction) -> None:
    """Reduce ``source`` of all ranks into ``out`` (may be ``source``) of all ranks."""
    bounds = bounds_of(split_sizes(source.size, context.size))
    own = out[bounds[context.rank] : bounds[context.rank + 1]]
    reduce_scatter(context, source, own, bounds, reduction)
    all_gather(context, own, out, bounds)


def broadcast(context: CollectiveContext, data: Array, root: int) -> None:
    """Copy ``data`` of the root into ``data`` of all ranks."""
    me, p = context.rank, context.size
    if p == 1:
        return
    others = [(root + step) % p for step in range(1, p)] * ROUNDS
    bounds = bounds_of(split_sizes(data.size, len(others)))
    pieces = [data[low:high] for low, high in pairwise(bounds)]
    if me == root:
        under_way: dict[int, Pending] = {}
        for piece, peer in zip(pieces, others, strict=True):
            if peer in under_way:  # or they would share the link, and the first come as the last
                context.wait(under_way[peer])
            under_way[peer] = context.isend(piece, peer)
    else:
        mine = []
        for piece, peer in zip(pieces, others, strict=True):
            receive = context.irecv(piece, root if peer == me else peer)
            if peer == me:
                mine.append((piece, receive))
        next_ones = others[others.index(me) + 1 :][: p - 2]
        for piece, receive in mine:
            context.wait(receive)
            for peer in next_ones:
                context.isend(piece, peer)
    context.wait_all()


def all_to_all(
    context: CollectiveContext,
    source: Array,
    send_bounds: Sequence[int],
    out: Array,
    recv_bounds: Sequence[int],
) -> None:
    """Send ``source[send_bounds[r]:send_bounds[r + 1]]`` to each rank r.

    What rank r sends arrives in ``out[recv_bounds[r]:recv_bounds[r + 1]]``; ``out`` and
    ``source`` must not overlap.
    """
    me, p = context.rank, context.size
    for step in range(1, p):
        peer = (me - step) % p
        context.irecv(out[recv_bounds[peer] : recv_bounds[peer + 1]], peer)
    for step in range(1, p):
        peer = (me + step) % p
        context.isend(source[send_bounds[peer] : send_bounds[peer + 1]], peer)
    np.copyto(
        out[recv_bounds[me] : recv_bounds[me + 1]], source[send_bounds[me] : send_bounds[me + 1]]
    )
    context.wait_all()
