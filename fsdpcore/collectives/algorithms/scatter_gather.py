"""Scatter and all-gather: a broadcast in which all ranks help to send. For large arrays.

The root scatters one chunk to every rank along the binomial tree of ``tree``; then the ranks
gather all chunks with the steps of ``bruck``. Chunks are numbered from the root on, so that all
this happens in place; where a range of chunks passes the end of the array and goes on at its
beginning, it takes two messages.

With p ranks and n bytes, the root, which is the busiest rank, sends:

=========  ========================================
broadcast  2 ceil(lg p) alpha + 2 ((p - 1) / p) n beta
=========  ========================================

The rank at place v from the root on, whose subtree in ``tree`` is s(v), sends in the first half
ceil(lg s(v)) messages of ((s(v) - 1) / p) n bytes in all; in the second half ((p - 1) / p) n bytes
and, for each distance d = 1, 2, 4, ... below p, one message, or two if v + min(d, p - d) > p.
(Barnett et al. 1994, van de Geijn.)
"""

from __future__ import annotations

from fsdpcore.collectives.algorithms import tree
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.core.buffers import Array, bounds_of, split_sizes


def broadcast(context: CollectiveContext, data: Array, root: int) -> None:
    """Copy ``data`` of the root into ``data`` of all ranks."""
    p = context.size
    place = (context.rank - root) % p
    at = bounds_of(split_sizes(data.size, p))

    def subtree(top: int) -> Array:
        return data[at[top] : at[top + tree.span(top, p)]]

    def ranges(first: int, count: int) -> list[Array]:
        """So many chunks from one on, in one or two pieces; the latter of them at the front."""
        first %= p
        front = max(0, first + count - p)
        return [data[at[first] : at[first + count - front]], data[: at[front]]]

    if place:
        context.recv(subtree(place), (place - (place & -place) + root) % p)
    for child in reversed(tree.children(place, p)):
        context.isend(subtree(child), (child + root) % p)
    distance = 1
    while distance < p:
        count = min(distance, p - distance)
        arriving = ranges(place + distance, count)
        receives = [context.irecv(piece, (context.rank + distance) % p) for piece in arriving]
        for piece in ranges(place, count):
            context.isend(piece, (context.rank - distance) % p)
        context.wait(*receives)
        distance *= 2
    context.wait_all()
