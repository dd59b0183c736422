"""Two levels, for ranks on several hosts: inside every host, and across hosts by many leaders.

Every rank of a host leads some chunks there: a chunk's leader is the rank with the owner's number
on its own host (modulo the ranks of that host, where hosts differ). Reductions combine a host's
contributions at the chunk's leader, which sends the owner what came of it; all_gather goes the same
way back. A broadcast spreads the array inside the root's host, whose ranks each send their piece to
its leader on all other hosts.

What crosses between hosts are messages. Inside of a host it is ``shared`` where the ranks of that
host share memory, and messages (``direct``) where they do not; the other hosts cannot tell. With
H hosts of m ranks each (p = m H) and n bytes (per rank for all_reduce and broadcast, in total for
the others), each rank sends, for broadcast the root:

==============  ======================================  ==================================
collective      across                                  inside, without shared memory
==============  ======================================  ==================================
reduce_scatter  k (H - 1) alpha + k (H - 1) / p n beta  (m - 1) alpha + (m - 1) / m n beta
all_gather      (H - 1) alpha + (H - 1) / p n beta      (m - 1) alpha + (m - 1) / m n beta
all_reduce      the sum of both                         the sum of both
broadcast       (H - 1) alpha + ((H - 1) / m) n beta    2 (m - 1) (alpha + n / m beta)
==============  ======================================  ==================================

and reduces ((p - 1) / p) n for k = 1. Of the n bytes that every rank holds, at most n / m leave
its host for each other one. k is how many subtrees of the canonical tree make up the rank's host:
1 where hosts are blocks of 2**j ranks (the last one may have fewer), since then what a host sends
is one partial sum. Other hosts send a partial sum for each subtree, so that reductions are
canonical in any case. These sums travel as float32 for float16 and bfloat16.

Hosts with m_h ranks and k_h subtrees send in all, without shared memory:

==============  ========================================================
reduce_scatter  sum of m_h (m_h - 1) + sum of k_h (p - m_h) messages,
                (p - H) n + sum of k_h ((p - m_h) / p) n bytes
all_gather      sum of m_h (m_h - 1) + p (H - 1) messages, (p - 1) n bytes
broadcast       m (m - 1) + m (H - 1) + m times the sum of m_h - 1 over the other hosts messages,
                (p - 1) n bytes; m is the number of ranks on the root's host
==============  ========================================================

and all together reduce (p - 1) n. With shared memory on every host they send

==============  ========================================================
reduce_scatter  sum of k_h (p - m_h) messages, sum of k_h ((p - m_h) / p) n bytes
all_gather      p (H - 1) messages, (H - 1) n bytes
broadcast       m (H - 1) messages, (H - 1) n bytes
==============  ========================================================

and a host's ranks go through their memory for one host's chunks after the other, so that those
cross while the next ones are reduced, or spread, inside.

On one host this is ``direct``, and the table of algorithms knows that case only: with a single
alpha and beta, two levels never pay. For groups on several hosts whose ranks share memory,
``costs`` has them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.hierarchy.host_context import Carrier, within_host
from fsdpcore.core.buffers import Array, bounds_of, split_sizes
from fsdpcore.core.reductions import ReduceOp, Reduction

Block = tuple[int, int]  # first rank and end of a subtree of the canonical tree

# Up to so many bytes the ranks of a host take all chunks at once, in an array packed for that;
# above, one host's after the other's, where they lie.
_PACKED = 32 * 1024


class Slab(NamedTuple):
    """Chunks that the ranks of a host handle together.

    Attributes:
        owners: of the chunks, in the order of their leaders.
        led: for each rank of the host, from where to where in ``owners`` those are that it leads;
            so one number more than there are ranks.
    """

    owners: list[int]
    led: list[int]

    @property
    def together(self) -> bool:
        """Whether the chunks lie next to each other, in that order."""
        return all(b == a + 1 for a, b in itertools.pairwise(self.owners))

    def bounds(self, bounds: Sequence[int]) -> list[int]:
        """Where the chunks begin in an array of them, and the end; ``bounds`` are of all chunks."""
        return bounds_of([bounds[owner + 1] - bounds[owner] for owner in self.owners])


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
        self.blocks: dict[int, list[Block]] = {host: [] for host in self.members}
        for low, high in _blocks(0, len(hosts), _ends_of_runs(hosts)):
            self.blocks[hosts[low]].append((low, high))
        self._slabs: dict[tuple[int, bool], list[Slab]] = {}

    def leader(self, owner: int, host: int) -> int:
        """The rank of ``host`` that leads ``owner``'s chunk there."""
        ranks = self.members[host]
        return ranks[self.place[owner] % len(ranks)]

    def owners(self, leader: int, host: int) -> list[int]:
        """The owners of the chunks that rank ``leader`` of ``host`` leads there."""
        m, number = len(self.members[host]), self.place[leader]
        return [owner for owner, place in enumerate(self.place) if place % m == number]

    def slabs(self, host: int, packed: bool = False) -> list[Slab]:
        """All chunks, as ``host`` handles them; first its own, then those of the next hosts.

        Args:
            packed: make one slab of them all.
        """
        if (host, packed) not in self._slabs:
            make = self._packed if packed else self._by_host
            self._slabs[host, packed] = make(host)
        return self._slabs[host, packed]

    def _packed(self, host: int) -> list[Slab]:
        led: list[list[int]] = [[] for _ in self.members[host]]
        for owner, place in enumerate(self.place):
            led[place % len(led)].append(owner)
        return [Slab([*itertools.chain(*led)], bounds_of([len(owners) for owners in led]))]

    def _by_host(self, host: int) -> list[Slab]:
        m, order, slabs = len(self.members[host]), list(self.members), []
        at = order.index(host)
        for other in order[at:] + order[:at]:
            ranks = self.members[other]
            for first in range(0, len(ranks), m):
                owners = ranks[first : first + m]
                slabs.append(Slab(owners, [min(place, len(owners)) for place in range(m + 1)]))
        return slabs


@lru_cache(maxsize=64)
def arrange(hosts: tuple[int, ...]) -> Arrangement:
    """The arrangement of ranks on these hosts. Not to be changed: it is cached."""
    return Arrangement(hosts)


def _ends_of_runs(hosts: Sequence[int]) -> list[int]:
    """For each rank, the next one that is on another host."""
    ends = [len(hosts)] * len(hosts)
    for rank in range(len(hosts) - 2, -1, -1):
        ends[rank] = ends[rank + 1] if hosts[rank] == hosts[rank + 1] else rank + 1
    return ends


def _blocks(low: int, high: int, ends: Sequence[int]) -> Iterator[Block]:
    """The largest subtrees whose ranks are all on one host."""
    if ends[low] >= high:
        yield low, high
        return
    middle = _middle(low, high)
    yield from _blocks(low, middle, ends)
    yield from _blocks(middle, high, ends)


def _middle(low: int, high: int) -> int:
    """Where the ranks on the right begin, at the top of a subtree of the canonical tree."""
    return low + (1 << (high - low - 1).bit_length() - 1)


def _combine(low: int, high: int, partials: dict[Block, Array], reduction: Reduction) -> Array:
    """Combine partial results, which are overwritten, in the canonical order."""
    if (low, high) in partials:
        return partials[low, high]
    middle = _middle(low, high)
    left = _combine(low, middle, partials, reduction)
    reduction.combine(left, _combine(middle, high, partials, reduction), left)
    return left


@dataclass(frozen=True)
class _InBlocks(Reduction):
    """Reduces the arrays of a host's ranks to one partial result for each block of the host.

    Attributes:
        blocks: ranges of those arrays.
    """

    blocks: tuple[Block, ...] = ()

    def reduce(self, parts: Sequence[Array], out: Array) -> None:
        """Reduce to ``out``, of shape (elements, blocks), in the accumulator dtype."""
        for number, (low, high) in enumerate(self.blocks):
            super().reduce(parts[low:high], out[:, number])

    @classmethod
    def on(cls, host: int, hosts: Arrangement, reduction: Reduction) -> _InBlocks:
        """What the ranks of a host do of a reduction."""
        place = hosts.place
        blocks = tuple((place[low], place[high - 1] + 1) for low, high in hosts.blocks[host])
        # A mean is divided, and everything rounded, at the very end only.
        op = ReduceOp.SUM if reduction.op is ReduceOp.MEAN else reduction.op
        return cls(op, reduction.dtype, reduction.accumulator, reduction.function, blocks)


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
    me, here, hosts = context.rank, context.hosts[context.rank], arrange(tuple(context.hosts))
    pieces: dict[Block, Array] = {}
    for host, blocks in hosts.blocks.items():
        for block in blocks if host != here else []:
            pieces[block] = np.empty(own.size, reduction.accumulator)
            context.irecv(pieces[block], hosts.leader(me, host))
    blocks, in_blocks = hosts.blocks[here], _InBlocks.on(here, hosts, reduction)
    with within_host(context) as (local, carrier):
        first, *others = hosts.slabs(here, carrier.sends or source.nbytes <= _PACKED)
        for slab in [*others, first]:  # what has to travel comes first
            at = slab.bounds(bounds)
            low, high = slab.led[local.rank], slab.led[local.rank + 1]
            partials = np.empty((len(blocks), at[high] - at[low]), reduction.accumulator)
            flat = _view(source, slab, bounds) if slab.together else _pack(source, slab, bounds)
            led = [at[number] for number in slab.led]
            carrier.reduce_scatter(local, flat, partials.T, led, in_blocks)
            for number in range(low, high):
                owner = slab.owners[number]
                for block, partial in zip(blocks, partials, strict=True):
                    piece = partial[at[number] - at[low] : at[number + 1] - at[low]]
                    if owner == me:
                        pieces[block] = piece
                    else:
                        context.isend(piece, owner)
    context.wait_all()
    reduction.store(_combine(0, context.size, pieces, reduction), own, context.size)


def all_gather(context: CollectiveContext, own: Array, out: Array, bounds: Sequence[int]) -> None:
    """Bring every rank's ``own`` to ``out[bounds[rank]:bounds[rank + 1]]`` of all ranks.

    ``own`` may be that part of ``out``.
    """
    me, here, hosts = context.rank, context.hosts[context.rank], arrange(tuple(context.hosts))
    arriving = {
        owner: context.irecv(out[bounds[owner] : bounds[owner + 1]], owner)
        for owner in hosts.owners(me, here)
        if owner != me
    }
    for host in hosts.members:
        if host != here:
            context.isend(own, hosts.leader(me, host))
    np.copyto(out[bounds[me] : bounds[me + 1]], own)
    with within_host(context) as (local, carrier):
        packed = carrier.sends or out.nbytes <= _PACKED
        for slab in hosts.slabs(here, packed) if local.size > 1 else []:
            low, high = slab.led[local.rank], slab.led[local.rank + 1]
            context.wait(*(arriving[owner] for owner in slab.owners[low:high] if owner != me))
            _spread(local, carrier, out, slab, bounds)
    context.wait_all()


def _spread(
    local: CollectiveContext, carrier: Carrier, out: Array, slab: Slab, bounds: Sequence[int]
) -> None:
    """Bring the chunks of a slab from their leaders' ``out`` to all ranks of the host."""
    at = slab.bounds(bounds)
    led = [at[number] for number in slab.led]
    mine = slice(led[local.rank], led[local.rank + 1])
    if slab.together:
        flat = _view(out, slab, bounds)
        carrier.all_gather(local, flat[mine], flat, led)
        return
    flat = np.empty(at[-1], out.dtype)
    own = range(slab.led[local.rank], slab.led[local.rank + 1])
    for number, owner in enumerate(slab.owners):
        if number in own:
            np.copyto(flat[at[number] : at[number + 1]], out[bounds[owner] : bounds[owner + 1]])
    carrier.all_gather(local, flat[mine], flat, led)
    for number, owner in enumerate(slab.owners):
        if number not in own:
            np.copyto(out[bounds[owner] : bounds[owner + 1]], flat[at[number] : at[number + 1]])


def _view(array: Array, slab: Slab, bounds: Sequence[int]) -> Array:
    if not slab.owners:
        return array[:0]
    return array[bounds[slab.owners[0]] : bounds[slab.owners[-1] + 1]]


def _pack(array: Array, slab: Slab, bounds: Sequence[int]) -> Array:
    return np.concatenate([array[bounds[owner] : bounds[owner + 1]] for owner in slab.owners])


def all_reduce(context: CollectiveContext, source: Array, out: Array, reduction: Reduction) -> None:
    """Reduce ``source`` of all ranks into ``out`` (may be ``source``) of all ranks."""
    bounds = bounds_of(split_sizes(source.size, context.size))
    own = out[bounds[context.rank] : bounds[context.rank + 1]]
    reduce_scatter(context, source, own, bounds, reduction)
    all_gather(context, own, out, bounds)


def broadcast(context: CollectiveContext, data: Array, root: int) -> None:
    """Copy ``data`` of the root into ``data`` of all ranks."""
    me, here, hosts = context.rank, context.hosts[context.rank], arrange(tuple(context.hosts))
    helpers = hosts.members[context.hosts[root]]
    bounds = bounds_of(split_sizes(data.size, len(helpers)))
    pieces = [data[low:high] for low, high in itertools.pairwise(bounds)]
    leaders = [hosts.leader(helper, here) for helper in helpers]  # of the pieces, on this host
    with within_host(context) as (local, carrier):
        if me not in helpers:
            for piece, helper, leader in zip(pieces, helpers, leaders, strict=True):
                if leader == me:
                    context.irecv(piece, helper)
            context.wait_all()
        elif carrier.broadcast is not None:
            carrier.broadcast(local, data, hosts.place[root])
        elif me == root:
            for helper, piece in zip(helpers, pieces, strict=True):
                if helper != root:
                    context.isend(piece, helper)
        else:
            context.recv(pieces[hosts.place[me]], root)
        for host in hosts.members if me in helpers else []:
            if host != here:
                context.isend(pieces[hosts.place[me]], hosts.leader(me, host))
        if carrier.sends:
            _share(context, pieces, leaders, hosts.members[here], root)
        elif me not in helpers:
            _spread_pieces(local, carrier, data, bounds)
    context.wait_all()


def _share(
    context: CollectiveContext,
    pieces: Sequence[Array],
    leaders: Sequence[int],
    mates: Sequence[int],
    root: int,
) -> None:
    """Send every piece from its leader to all ranks of a host; the root has them."""
    for piece, leader in zip(pieces, leaders, strict=True):
        if leader == context.rank:
            for mate in mates:
                if mate not in (context.rank, root):
                    context.isend(piece, mate)
        elif context.rank != root:
            context.irecv(piece, leader)


def _spread_pieces(
    local: CollectiveContext, carrier: Carrier, data: Array, bounds: Sequence[int]
) -> None:
    """Bring every piece from its leader to all ranks of a host, through their memory."""
    m, count = local.size, len(bounds) - 1
    for first in range(0, count, m):
        at = [bounds[min(first + place, count)] for place in range(m + 1)]
        some, led = data[at[0] : at[-1]], [low - at[0] for low in at]
        carrier.all_gather(local, some[led[local.rank] : led[local.rank + 1]], some, led)
