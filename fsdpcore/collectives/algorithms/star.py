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
    link: CollectiveContext, source: Array, out: Array | None, root: int, reduction: Reduction
) -> None:
    """Reduce ``source`` of all ranks into ``out`` (may be ``source``) of the root."""
    segments = [source[at : at + SEGMENT] for at in range(0, source.size, SEGMENT)]
    if link.rank != root:
        for segment in segments:
            link.send(segment, root)
        return
    assert out is not None
    room = np.empty((link.size, min(SEGMENT, source.size)), source.dtype)
    for number, segment in enumerate(segments):
        parts = [row[: segment.size] for row in room]
        parts[root] = segment
        for rank in range(link.size):
            if rank != root:
                link.irecv(parts[rank], rank)
        link.wait_all()
        reduction.reduce(parts, out[number * SEGMENT :][: segment.size])


def broadcast(link: CollectiveContext, data: Array, root: int) -> None:
    """Copy ``data`` of the root into ``data`` of all ranks."""
    if link.rank != root:
        link.recv(data, root)
        return
    for rank in range(link.size):
        if rank != root:
            link.isend(data, rank)
    link.wait_all()


def gather(
    link: CollectiveContext, own: Array, out: Array | None, bounds: Sequence[int], root: int
) -> None:
    """Bring every rank's ``own`` to ``out[bounds[rank]:bounds[rank + 1]]`` of the root."""
    if link.rank != root:
        link.send(own, root)
        return
    assert out is not None
    for rank in range(link.size):
        if rank != root:
            link.irecv(out[bounds[rank] : bounds[rank + 1]], rank)
    np.copyto(out[bounds[root] : bounds[root + 1]], own)
    link.wait_all()


def scatter(
    link: CollectiveContext, source: Array | None, own: Array, bounds: Sequence[int], root: int
) -> None:
    """Bring ``source[bounds[rank]:bounds[rank + 1]]`` of the root to every rank's ``own``."""
    if link.rank != root:
        link.recv(own, root)
        return
    assert source is not None
    for rank in range(link.size):
        if rank != root:
            link.isend(source[bounds[rank] : bounds[rank + 1]], rank)
    np.copyto(own, source[bounds[root] : bounds[root + 1]])
    link.wait_all()


def all_reduce(link: CollectiveContext, data: Array, reduction: Reduction) -> None:
    """Reduce ``data`` of all ranks into ``data`` of all ranks."""
    reduce(link, data, data, CENTRE, reduction)
    broadcast(link, data, CENTRE)


def reduce_scatter(
    link: CollectiveContext, source: Array, own: Array, bounds: Sequence[int], reduction: Reduction
) -> None:
    """Reduce ``source``, of which each rank gets ``[bounds[rank]:bounds[rank + 1]]``."""
    total = np.empty_like(source) if link.rank == CENTRE else None
    reduce(link, source, total, CENTRE, reduction)
    scatter(link, total, own, bounds, CENTRE)


def all_gather(link: CollectiveContext, own: Array, out: Array, bounds: Sequence[int]) -> None:
    """Bring every rank's ``own`` to ``out[bounds[rank]:bounds[rank + 1]]`` of all ranks."""
    gather(link, own, out, bounds, CENTRE)
    broadcast(link, out, CENTRE)
