"""Binomial tree: the rooted collectives in ceil(lg p) steps.

With p ranks and n bytes (per rank for broadcast and reduce, in total for gather and scatter), the
root sends or receives:

=========  ========================================
broadcast  ceil(lg p) (alpha + n beta)
reduce     ceil(lg p) (alpha + n beta + n gamma), and rank 0 sends the result to any other root
gather     ceil(lg p) alpha + ((p - 1) / p) n beta
scatter    ceil(lg p) alpha + ((p - 1) / p) n beta
=========  ========================================

For gather and scatter the table of algorithms counts the bytes twice, since they pass through
memory of all ranks on their way and are copied once more at both ends.

A rank at place v from the root on has a subtree of s(v) places: p for v = 0, otherwise the
lowest set bit of v, or p - v if that is less. It exchanges ceil(lg s(v)) messages with its
children, in gather and scatter of ((s(v) - 1) / p) n bytes in all, and one with its parent, of
(s(v) / p) n bytes.

broadcast, gather and scatter number the places from the root on. reduce follows rank order,
whatever the root, so that it is canonical; for float16 and bfloat16, partial sums travel as
float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.core.buffers import Array, bounds_of
from fsdpcore.core.reductions import Reduction


def span(place: int, count: int) -> int:
    """How many places the subtree of ``place`` covers: its lowest set bit, cut off at the end."""
    return count if place == 0 else min(place & -place, count - place)


def children(place: int, count: int) -> list[int]:
    """The direct children of ``place``, nearest first: place + 1, + 2, + 4, ..."""
    places, step = [], 1
    while step < span(place, count):
        places.append(place + step)
        step *= 2
    return places


def broadcast(context: CollectiveContext, data: Array, root: int) -> None:
    """Copy ``data`` of the root into ``data`` of all ranks."""
    p = context.size
    place = (context.rank - root) % p
    if place:
        context.recv(data, (place - (place & -place) + root) % p)
    for child in reversed(children(place, p)):
        context.isend(data, (child + root) % p)
    context.wait_all()


def reduce(
    context: CollectiveContext, source: Array, out: Array | None, root: int, reduction: Reduction
) -> None:
    """Reduce ``source`` of all ranks into ``out`` (may be ``source``) of the root."""
    me, p = context.rank, context.size
    total = reduction.load(source)
    received = np.empty_like(total)
    for child in children(me, p):
        context.recv(received, child)
        reduction.combine(total, received, total)
    if me:
        context.send(total, me - (me & -me))
    elif root:
        context.send(total, root)
    if me == root:
        assert out is not None
        if root:
            context.recv(total, 0)
        reduction.store(total, out, p)


def _rotated(bounds: Sequence[int], root: int) -> list[int]:
    """Where the chunks lie in a buffer that begins with the root's."""
    sizes = np.diff(bounds).tolist()
    return bounds_of(sizes[root:] + sizes[:root])


def gather(
    context: CollectiveContext, own: Array, out: Array | None, bounds: Sequence[int], root: int
) -> None:
    """Bring every rank's ``own`` to ``out[bounds[rank]:bounds[rank + 1]]`` of the root."""
    p = context.size
    place = (context.rank - root) % p
    at = _rotated(bounds, root)
    first = at[place]
    subtree = np.empty_like(own, shape=at[place + span(place, p)] - first)
    np.copyto(subtree[: own.size], own)
    for child in children(place, p):
        piece = subtree[at[child] - first : at[child + span(child, p)] - first]
        context.irecv(piece, (child + root) % p)
    context.wait_all()
    if place:
        context.send(subtree, (place - (place & -place) + root) % p)
    else:
        assert out is not None
        behind = bounds[-1] - bounds[root]  # the ranks from the root to the last one
        np.copyto(out[bounds[root] :], subtree[:behind])
        np.copyto(out[: bounds[root]], subtree[behind:])


def scatter(
    context: CollectiveContext, source: Array | None, own: Array, bounds: Sequence[int], root: int
) -> None:
    """Bring ``source[bounds[rank]:bounds[rank + 1]]`` of the root to every rank's ``own``."""
    p = context.size
    place = (context.rank - root) % p
    at = _rotated(bounds, root)
    first = at[place]
    if place:
        subtree = np.empty_like(own, shape=at[place + span(place, p)] - first)
        context.recv(subtree, (place - (place & -place) + root) % p)
    else:
        assert source is not None
        subtree = np.concatenate([source[bounds[root] :], source[: bounds[root]]])
    for child in reversed(children(place, p)):
        piece = subtree[at[child] - first : at[child + span(child, p)] - first]
        context.isend(piece, (child + root) % p)
    np.copyto(own, subtree[: own.size])
    context.wait_all()
