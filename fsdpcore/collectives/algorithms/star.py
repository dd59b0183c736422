"""Star: everything goes through one rank. Fewest rules, for few ranks and small arrays.

With p ranks and n bytes at the collective's own size (per rank for all_reduce, reduce and
broadcast; in total for the others), the centre sends or receives:

==============  ==========================================
all_reduce      2 (p - 1) alpha + 2 (p - 1) n beta
reduce_scatter  2 (p - 1) alpha + (p - 1) (1 + 1/p) n beta
all_gather      2 (p - 1) alpha + (p - 1) (1 + 1/p) n beta
broadcast       (p - 1) alpha + (p - 1) n beta
reduce          (p - 1) alpha + (p - 1) n beta
gather          (p - 1) alpha + ((p - 1) / p) n beta
scatter         (p - 1) alpha + ((p - 1) / p) n beta
==============  ==========================================

and reduces (p - 1) n gamma. No message goes between two other ranks.

Reductions are canonical. They work in segments, so that the centre holds p segments besides its
result; alpha then counts once per segment.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.core.buffers import Array
from fsdpcore.core.reductions import Reduction

CENTRE = 0
SEGMENT = 256 * 1024  # elements


def reduce(
    context: CollectiveContext, source: Array, out: Array | None, root: int, reduction: Reduction
) -> None:
    """Reduce ``source`` of all ranks into ``out`` (may be ``source``) of the root."""
    segments = [source[at : at + SEGMENT] for at in range(0, source.size, SEGMENT)]
    if context.rank != root:
        for segment in segments:
            context.send(segment, root)
        return
    assert out is not None
    room = np.empty((context.size, min(SEGMENT, source.size)), source.dtype)
    for number, segment in enumerate(segments):
        parts = [row[: segment.size] for row in room]
        parts[root] = segment
        for rank in range(context.size):
            if rank != root:
                context.irecv(parts[rank], rank)
        context.wait_all()
        reduction.reduce(parts, out[number * SEGMENT :][: segment.size])


def broadcast(context: CollectiveContext, data: Array, root: int) -> None:
    """Copy ``data`` of the root into ``data`` of all ranks."""
    if context.rank != root:
        context.recv(data, root)
        return
    for rank in range(context.size):
        if rank != root:
            context.isend(data, rank)
    context.wait_all()


def gather(
    context: CollectiveContext, own: Array, out: Array | None, bounds: Sequence[int], root: int
) -> None:
    """Bring every rank's ``own`` to ``out[bounds[rank]:bounds[rank + 1]]`` of the root."""
    if context.rank != root:
        context.send(own, root)
        return
    assert out is not None
    for rank in range(context.size):
        if rank != root:
            context.irecv(out[bounds[rank] : bounds[rank + 1]], rank)
    np.copyto(out[bounds[root] : bounds[root + 1]], own)
    context.wait_all()


def scatter(
    context: CollectiveContext, source: Array | None, own: Array, bounds: Sequence[int], root: int
) -> None:
    """Bring ``source[bounds[rank]:bounds[rank + 1]]`` of the root to every rank's ``own``."""
    if context.rank != root:
        context.recv(own, root)
        return
    assert source is not None
    for rank in range(context.size):
        if rank != root:
            context.isend(source[bounds[rank] : bounds[rank + 1]], rank)
    np.copyto(own, source[bounds[root] : bounds[root + 1]])
    context.wait_all()


def all_reduce(context: CollectiveContext, source: Array, out: Array, reduction: Reduction) -> None:
    """Reduce ``source`` of all ranks into ``out`` (may be ``source``) of all ranks."""
    reduce(context, source, out, CENTRE, reduction)
    broadcast(context, out, CENTRE)


def reduce_scatter(
    context: CollectiveContext,
    source: Array,
    own: Array,
    bounds: Sequence[int],
    reduction: Reduction,
) -> None:
    """Reduce ``source``, of which each rank gets ``[bounds[rank]:bounds[rank + 1]]``."""
    total = np.empty_like(source) if context.rank == CENTRE else None
    reduce(context, source, total, CENTRE, reduction)
    scatter(context, total, own, bounds, CENTRE)


def all_gather(context: CollectiveContext, own: Array, out: Array, bounds: Sequence[int]) -> None:
    """Bring every rank's ``own`` to ``out[bounds[rank]:bounds[rank + 1]]`` of all ranks."""
    gather(context, own, out, bounds, CENTRE)
    broadcast(context, out, CENTRE)
