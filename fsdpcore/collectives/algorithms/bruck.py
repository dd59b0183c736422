"""Bruck's algorithms: ceil(lg p) steps for any number of ranks, for small arrays.

Every rank forwards what it has gathered, or what is not for itself, over distances 1, 2, 4, ...

With p ranks and n bytes (in total for all_gather, per rank for all_to_all), each rank sends:

==========  ========================================
all_gather  ceil(lg p) alpha + ((p - 1) / p) n beta
all_to_all  ceil(lg p) alpha + (n / p) b(p) beta, (n / 2) lg p beta for p = 2**k
==========  ========================================

b(p) is the number of ones in the binary digits of 0, 1, ..., p - 1 together: a block for the rank
at distance d travels once for every one in d.

(Bruck et al. 1997.) Everything is copied once more than in ``direct``. all_gather takes chunks of
any sizes. all_to_all takes blocks that differ in size by their destination, but not by their
sender, since a rank has to know the sizes of the blocks that it forwards; in all_to_all_v, where
it does not, all goes by ``direct``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fsdpcore.collectives.algorithms import direct
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.core.buffers import Array, bounds_of


def all_gather(context: CollectiveContext, own: Array, out: Array, bounds: Sequence[int]) -> None:
    """Bring every rank's ``own`` to ``out[bounds[rank]:bounds[rank + 1]]`` of all ranks.

    ``own`` may be that part of ``out``.
    """
    me, p = context.rank, context.size
    chunks = [*range(me, p), *range(me)]  # in a buffer that begins with the own one
    at = bounds_of([bounds[chunk + 1] - bounds[chunk] for chunk in chunks])
    gathered = np.empty_like(own, shape=at[-1])
    np.copyto(gathered[: own.size], own)
    distance = 1
    while distance < p:
        count = min(distance, p - distance)
        arriving = gathered[at[distance] : at[distance + count]]
        context.exchange(gathered[: at[count]], (me - distance) % p, arriving, (me + distance) % p)
        distance *= 2
    behind = bounds[p] - bounds[me]  # this rank and those behind it
    np.copyto(out[bounds[me] :], gathered[:behind])
    np.copyto(out[: bounds[me]], gathered[behind:])


def all_to_all(
    context: CollectiveContext,
    source: Array,
    send_bounds: Sequence[int],
    out: Array,
    recv_bounds: Sequence[int],
) -> None:
    """Send ``source[send_bounds[r]:send_bounds[r + 1]]`` to each rank r.

    What rank r sends arrives in ``out[recv_bounds[r]:recv_bounds[r + 1]]``; ``out`` and
    ``source`` must not overlap. ``send_bounds`` are the same on all ranks.
    """
    if context.spec.ragged:  # here the sender makes a difference, too
        direct.all_to_all(context, source, send_bounds, out, recv_bounds)
        return
    me, p = context.rank, context.size
    sizes = [send_bounds[rank + 1] - send_bounds[rank] for rank in range(p)]
    # Slot j holds a block that travels over the distance j in all, at first the own one.
    slots = [source[send_bounds[r] : send_bounds[r + 1]] for r in [*range(me, p), *range(me)]]
    distance = 1
    while distance < p:
        moving = [slot for slot in range(p) if slot & distance]
        previous = (me - distance) % p
        # A block in slot j of that rank still has the higher bits of j to go.
        goals = [(previous + (slot & -distance)) % p for slot in moving]
        at = bounds_of([sizes[goal] for goal in goals])
        arriving = np.empty_like(source, shape=at[-1])
        leaving = np.concatenate([slots[slot] for slot in moving])
        context.exchange(leaving, (me + distance) % p, arriving, previous)
        for number, slot in enumerate(moving):
            slots[slot] = arriving[at[number] : at[number + 1]]
        distance *= 2
    for slot, block in enumerate(slots):
        sender = (me - slot) % p
        np.copyto(out[recv_bounds[sender] : recv_bounds[sender + 1]], block)
