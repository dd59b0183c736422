"""Recursive halving along the canonical tree: few steps and few bytes, for reduce_scatter.

At every merge of the canonical tree the ranks of two neighbouring blocks, each of which holds the
sums of its own block, spread the sums of both over all of them: a rank keeps some of the chunks
that it holds, and sends the others to the ranks that keep those. The chunks are spread so that
the last merge leaves every rank its own. The messages are those of ``doubling``, in which rank i
of p sends m(i, p), defined there.

With p ranks and n bytes, for p = 2**k:

==============  ========================================
reduce_scatter  lg p alpha + ((p - 1) / p) n (beta + gamma)
==============  ========================================

For other p, rank i sends m(i, p) messages and, as for all p, n less its own chunk in bytes. What
it receives and reduces is no longer even: all ranks together (p - 1) n, the busiest one up to
about 1.5 n (where p is just below a power of two). At a merge of w + r ranks (w the power of two
on the left), the chunk that place t of both together keeps was held on the left by place t mod w,
on the right by place (t mod w) mod r; a rank receives at each merge the chunks that it keeps.

(Thakur, Rabenseifner & Gropp 2005, there for powers of two.) Canonical, since neighbours are
combined first; for that reason the longest messages stay between neighbours, too. For float16
and bfloat16, partial sums travel as float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsdpcore.collectives.algorithms import doubling
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.core.buffers import Array, bounds_of
from fsdpcore.core.reductions import Reduction


class Send(NamedTuple):
    """Positions ``first`` to ``end`` of a plan's order go to ``target``."""

    target: int
    first: int
    end: int


class Merge(NamedTuple):
    """One merge, for one rank: it keeps positions ``first`` to ``end``, and gets those too.

    ``left`` says whether this rank is in the left one of the two blocks.
    """

    left: bool
    source: int
    first: int
    end: int
    sends: list[Send]


class HalvingPlan(NamedTuple):
    """The merges of one rank; ``order`` is how it lays out the chunks to have them contiguous.

    For p = 2**k all ranks have the same order; otherwise those of the left half do.
    """

    order: list[int]
    merges: list[Merge]

    def positions(self, sizes: Sequence[int]) -> list[int]:
        """Where the chunks begin in this order, of the sizes that they have, and the end."""
        return bounds_of([sizes[chunk] for chunk in self.order])


@lru_cache(maxsize=1024)
def plan(rank: int, count: int) -> HalvingPlan:
    """The plan of ``rank`` among ``count`` ranks. Not to be changed: it is cached."""
    steps = list(doubling.steps(rank, count))
    place = np.arange(count)  # of every chunk, in a block that contains this rank
    places = []
    for step in reversed(steps):
        places.append(place)
        left = min(step.mine, step.theirs)
        width, size = left[1] - left[0], step.mine[1] - step.mine[0]
        place = place % width % size
    places.reverse()
    # Ranks that share a block agree on the places above it, so both ends of a message sort alike.
    order = np.lexsort(places[::-1]) if places else np.arange(count)
    merges, held = [], slice(0, count)
    for step, place in zip(steps, places, strict=True):
        low = min(step.mine, step.theirs)[0]
        keepers = low + place[order[held]]
        sends = [Send(target, *_kept(target, keepers, held.start)) for target in step.targets]
        held = slice(*_kept(rank, keepers, held.start))
        left_side = step.mine < step.theirs
        merges.append(Merge(left_side, step.source, held.start, held.stop, sends))
    return HalvingPlan(order.tolist(), merges)


def _kept(rank: int, keepers: NDArray[np.intp], start: int) -> tuple[int, int]:
    """The positions that a rank keeps, of those from ``start`` that these ranks do."""
    (found,) = np.nonzero(keepers == rank)
    return start + int(found[0]), start + int(found[-1]) + 1


def load(
    plan: HalvingPlan, source: Array, places: Sequence[tuple[int, int]], reduction: Reduction
) -> Array:
    """Return a new array with the chunks in the plan's order, ready to be accumulated.

    Args:
        plan: has the order.
        source: flat.
        places: where each chunk begins in it, and ends.
        reduction: says in which dtype.
    """
    size = source.size // len(places)
    if all(end - start == size for start, end in places):
        rows = [places[chunk][0] // size for chunk in plan.order] if size else []
        values = np.take(source.reshape(-1, max(size, 1)), rows, axis=0).reshape(-1)
    else:
        values = np.concatenate([source[slice(*places[chunk])] for chunk in plan.order])
    return values if values.dtype == reduction.accumulator else reduction.load(values)


def reduce(
    context: CollectiveContext,
    plan: HalvingPlan,
    total: Array,
    at: Sequence[int],
    reduction: Reduction,
) -> Array:
    """Reduce ``total``, laid out by ``plan``; return the part of it with this rank's own chunk.

    Nothing is divided or rounded yet; the rest of ``total`` then holds partial sums.
    """
    mine, room = total, np.empty(0, total.dtype)
    for merge in plan.merges:
        mine = total[at[merge.first] : at[merge.end]]
        if room.size < mine.size:  # at the first merge: what a rank keeps only shrinks
            room = np.empty_like(mine)
        received = room[: mine.size]
        arriving = context.irecv(received, merge.source)
        for send in merge.sends:
            context.isend(total[at[send.first] : at[send.end]], send.target)
        context.wait(arriving)  # what was sent is not touched again
        left, right = (mine, received) if merge.left else (received, mine)
        reduction.combine(left, right, mine)
    context.wait_all()
    return mine


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
    steps = plan(context.rank, context.size)
    places = list(pairwise(bounds))
    total = load(steps, source, places, reduction)
    at = steps.positions([end - start for start, end in places])
    mine = reduce(context, steps, total, at, reduction)
    reduction.store(mine, own, context.size)
