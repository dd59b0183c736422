"""Two levels, for ranks on several hosts: inside every host, and across hosts in parallel lanes.

A chunk's lane on a host is the rank there with the owner's number on its own host (modulo the
ranks of that host, where hosts differ). Reductions combine a host's contributions on the chunk's
lane and send the owner what came of it; all_gather goes the same way back. A broadcast scatters
inside the root's host, whose ranks each send their piece to its lane on all other hosts.

With H hosts of m ranks each (p = m H) and n bytes (per rank for all_reduce and broadcast, in total
for the others), each rank sends, for broadcast the root:

==============  ========================================================
reduce_scatter  (m - 1 + k (H - 1)) alpha + ((m - 1) / m + k (H - 1) / p) n beta
all_gather      (m - 1 + H - 1) alpha + ((p - 1) / p) n beta
all_reduce      the sum of both
broadcast       (2 (m - 1) + H - 1) alpha + ((2 (m - 1) + H - 1) / m) n beta
==============  ========================================================

and reduces ((p - 1) / p) n for k = 1. The terms with H - 1 cross between hosts: of the n bytes
that every rank holds, at most n / m leave its host for each other one. k is how many subtrees of
the canonical tree make up the rank's host: 1 where hosts are blocks of 2**j ranks (the last one
may have fewer), since then what a host sends is one partial sum. Other hosts send a partial sum
for each subtree, so that reductions are canonical in any case. These sums travel as float32 for
float16 and bfloat16.

Hosts with m_h ranks and k_h subtrees send in all:

==============  ========================================================
reduce_scatter  sum of m_h (m_h - 1) + sum of k_h (p - m_h) messages,
                (p - H) n + sum of k_h ((p - m_h) / p) n bytes
all_gather      sum of m_h (m_h - 1) + p (H - 1) messages, (p - 1) n bytes
broadcast       m (m - 1) + m (H - 1) + m times the sum of m_h - 1 over the other hosts messages,
                (p - 1) n bytes; m is the number of ranks on the root's host
==============  ========================================================

and all together reduce (p - 1) n.

On one host this is ``direct``, and the table of algorithms knows that case only: its formulas have
a single alpha and beta, with which two levels never pay. So "auto" takes it where a measured
table says so; and ``halving`` and ``rabenseifner``, on hosts of 2**j ranks, keep all but their
last merges inside of a host, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from fsdpcore.buffers import Array, bounds_of, split_sizes
from fsdpcore.collectives.link import Link
from fsdpcore.collectives.traffic import left_half
from fsdpcore.reduce_ops import ReduceOp, Reduction

Block = tuple[int, int]  # first rank and end of a subtree of the canonical tree


class Arrangement:
    """Which ranks share a host.

    Attributes:
        members: for each host its ranks, in order.
        place: for each rank its number on its host.
        blocks: for each host the largest subtrees that lie within it.
    """

    def __init__(self, hosts: Sequence[int]) -> None:
        self.members: dict[int, list[int]] = {}
        self.place: list[int] = []
        for rank, host in enumerate(hosts):
            ranks = self.members.setdefault(host, [])
            self.place.append(len(ranks))
            ranks.append(rank)
        self.blocks = {
            host: _blocks(0, len(hosts), frozenset(ranks)) for host, ranks in self.members.items()
        }

    def lane(self, owner: int, host: int) -> int:
        """The rank of ``host`` that handles ``owner``'s chunk there."""
        ranks = self.members[host]
        return ranks[self.place[owner] % len(ranks)]

    def owners(self, lane: int, host: int) -> list[int]:
        """The owners of the chunks that rank ``lane`` of ``host`` handles there."""
        return [owner for owner in range(len(self.place)) if self.lane(owner, host) == lane]


@lru_cache(maxsize=64)
def _arrange(hosts: tuple[int, ...]) -> Arrangement:
    return Arrangement(hosts)


def _blocks(low: int, high: int, ranks: frozenset[int]) -> list[Block]:
    inside = sum(rank in ranks for rank in range(low, high))
    if inside in (0, high - low):
        return [(low, high)] if inside else []
    middle = low + left_half(high - low)
    return _blocks(low, middle, ranks) + _blocks(middle, high, ranks)


def _combine(low: int, high: int, partials: dict[Block, Array], reduction: Reduction) -> Array:
    """Combine partial results, which are overwritten, in the canonical order."""
    if (low, high) in partials:
        return partials[low, high]
    middle = low + left_half(high - low)
    left = _combine(low, middle, partials, reduction)
    reduction.combine(left, _combine(middle, high, partials, reduction), left)
    return left


def _pack(array: Array, owners: Sequence[int], bounds: Sequence[int]) -> Array:
    return np.concatenate([array[bounds[owner] : bounds[owner + 1]] for owner in owners])


def _positions(owners: Sequence[int], bounds: Sequence[int]) -> list[int]:
    return bounds_of([bounds[owner + 1] - bounds[owner] for owner in owners])


def reduce_scatter(
    link: Link, source: Array, own: Array, bounds: Sequence[int], reduction: Reduction
) -> None:
    """Reduce ``source``, of which each rank gets ``[bounds[rank]:bounds[rank + 1]]`` in ``own``.

    ``own`` may be that part of ``source``.
    """
    me, hosts = link.rank, _arrange(link.hosts)
    here = link.hosts[me]
    partials = _reduce_inside(link, source, bounds, reduction, hosts)
    owners = hosts.owners(me, here)
    at = _positions(owners, bounds)
    pieces: dict[Block, Array] = {}
    for host, blocks in hosts.blocks.items():
        for block in blocks if host != here else []:
            pieces[block] = np.empty(own.size, reduction.accumulator)
            link.irecv(pieces[block], hosts.lane(me, host))
    for block, partial in zip(hosts.blocks[here], partials, strict=True):
        for number, owner in enumerate(owners):
            piece = partial[at[number] : at[number + 1]]
            if owner == me:
                pieces[block] = piece
            else:
                link.isend(piece, owner)
    link.wait_all()
    reduction.store(_combine(0, link.size, pieces, reduction), own, link.size)


def _reduce_inside(
    link: Link, source: Array, bounds: Sequence[int], reduction: Reduction, hosts: Arrangement
) -> list[Array]:
    """Return, for each block of this host, its partial result of the chunks in this rank's lane."""
    me, here = link.rank, link.hosts[link.rank]
    parts = {me: _pack(source, hosts.owners(me, here), bounds)}
    mates = [rank for rank in hosts.members[here] if rank != me]
    for mate in mates:
        parts[mate] = np.empty_like(parts[me])
        link.irecv(parts[mate], mate)
    for mate in mates:
        link.isend(_pack(source, hosts.owners(mate, here), bounds), mate)
    link.wait_all()
    # A mean is divided, and everything rounded, at the very end only.
    op = ReduceOp.SUM if reduction.op is ReduceOp.MEAN else reduction.op
    unfinished = dataclasses.replace(reduction, op=op)
    partials = []
    for low, high in hosts.blocks[here]:
        partials.append(np.empty(parts[me].size, reduction.accumulator))
        unfinished.reduce([parts[rank] for rank in range(low, high)], partials[-1])
    return partials


def all_gather(link: Link, own: Array, out: Array, bounds: Sequence[int]) -> None:
    """Bring every rank's ``own`` to ``out[bounds[rank]:bounds[rank + 1]]`` of all ranks.

    ``own`` may be that part of ``out``.
    """
    me, hosts = link.rank, _arrange(link.hosts)
    here = link.hosts[me]
    owners = hosts.owners(me, here)
    for owner in owners:
        if owner != me:
            link.irecv(out[bounds[owner] : bounds[owner + 1]], owner)
    for host in hosts.members:
        if host != here:
            link.isend(own, hosts.lane(me, host))
    np.copyto(out[bounds[me] : bounds[me + 1]], own)
    link.wait_all()
    mates = [rank for rank in hosts.members[here] if rank != me]
    handled = {mate: hosts.owners(mate, here) for mate in mates}
    rooms = {mate: np.empty(_positions(handled[mate], bounds)[-1], out.dtype) for mate in mates}
    pack = _pack(out, owners, bounds) if mates else out
    for mate in mates:
        link.irecv(rooms[mate], mate)
        link.isend(pack, mate)
    link.wait_all()
    for mate, room in rooms.items():
        at = _positions(handled[mate], bounds)
        for number, owner in enumerate(handled[mate]):
            np.copyto(out[bounds[owner] : bounds[owner + 1]], room[at[number] : at[number + 1]])


def all_reduce(link: Link, data: Array, reduction: Reduction) -> None:
    """Reduce ``data`` of all ranks into ``data`` of all ranks."""
    bounds = bounds_of(split_sizes(data.size, link.size))
    own = data[bounds[link.rank] : bounds[link.rank + 1]]
    reduce_scatter(link, data, own, bounds, reduction)
    all_gather(link, own, data, bounds)


def broadcast(link: Link, data: Array, root: int) -> None:
    """Copy ``data`` of the root into ``data`` of all ranks."""
    me, hosts = link.rank, _arrange(link.hosts)
    here, first = link.hosts[me], link.hosts[root]
    helpers = hosts.members[first]
    bounds = bounds_of(split_sizes(data.size, len(helpers)))
    pieces = [data[bounds[i] : bounds[i + 1]] for i in range(len(helpers))]
    # How the pieces come to this host, one to each lane.
    mine = [i for i, helper in enumerate(helpers) if hosts.lane(helper, here) == me]
    if me == root:
        for helper, piece in zip(helpers, pieces, strict=True):
            if helper != root:
                link.isend(piece, helper)
    else:
        for i in mine:
            link.irecv(pieces[i], root if here == first else helpers[i])
    link.wait_all()
    if here == first:
        for host in hosts.members:
            if host != first:
                link.isend(pieces[hosts.place[me]], hosts.lane(me, host))
    # How every rank of this host gets them all; the root has them.
    for i, helper in enumerate(helpers):
        lane = hosts.lane(helper, here)
        if lane == me:
            for mate in hosts.members[here]:
                if mate not in (me, root):
                    link.isend(pieces[i], mate)
        elif me != root:
            link.irecv(pieces[i], lane)
    link.wait_all()
