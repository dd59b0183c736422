"""Shared: the ranks are on one host and use memory that all of them see (``SharedRegion``).

Arrays that all ranks can see in place (those of ``backend.empty``; in threads, all) are lent: read
and written where they are. Others are staged: they go through the rooms of the area in pieces.
With p ranks and n bytes (per rank for all_reduce, reduce and broadcast, in total for the others),
no messages are sent, and each rank copies

==============  ====================  ====================================================
collective      lent                  staged
==============  ====================  ====================================================
all_reduce      ((p - 1) / p) n       (2 (p - 1) / p + 1 / p) n
reduce          0                     ((p - 1) / p) n, the root n more
reduce_scatter  0                     ((p - 1) / p) n
all_gather      n                     n / p in, n out
broadcast       n, not on the root    n in on the root, n out on the others
gather          n on the root         n / p in, n out on the root
scatter         n / p                 ((p - 1) / p) n in on the root, n / p out
all_to_all      n                     ((p - 1) / p) n in, n out
==============  ====================  ====================================================

Reductions reduce n/p from p arrays, in the canonical order. Up to ``AT_ONCE`` bytes every array is
staged, and every rank reduces all that it needs: one step is all. The first step is the check that
all ranks call the same (see ``area.py``), so these functions are called without one. After arrays
were lent, the last step tells that nobody uses them any more. Who leaves a call by an error leaves
arrays that others may still read, and an output that they may still write to.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.shared.fast_path import LARGEST, SHARED
from fsdpcore.collectives.shared.region import OUT, ROOM, SOURCE, SharedRegion, region_of
from fsdpcore.collectives.spec import Layout
from fsdpcore.core.algorithm import Algorithm, CostTerms
from fsdpcore.core.buffers import Array, bounds_of, split_sizes
from fsdpcore.core.policy import Costs
from fsdpcore.core.reductions import Reduction

NAME = SHARED

# Up to here every rank reduces everything: cheaper than a second step.
AT_ONCE = LARGEST
_EARLY = 8 << 20  # bytes; up to here a rank copies what it has itself while it waits
_LINE = 64  # bytes; parts of a room begin at multiples of it
_INT64 = np.dtype(np.int64)


def _area(link: CollectiveContext) -> SharedRegion:
    area = region_of(link)
    assert area is not None, "chosen for groups that have one"
    return area


def all_reduce(link: CollectiveContext, data: Array, reduction: Reduction) -> None:
    """Reduce ``data`` of all ranks into ``data`` of all ranks."""
    all_reduce_into(link, data, data, reduction)


def all_reduce_into(
    link: CollectiveContext, source: Array, out: Array, reduction: Reduction
) -> None:
    """Reduce ``source`` of all ranks into ``out`` (may be ``source``) of all ranks."""
    if source.nbytes <= AT_ONCE:
        reduction.reduce(_all_at_once(link, source), out)
        return
    area, ranks, me = _area(link), range(link.size), link.rank
    bounds = bounds_of(split_sizes(source.size, link.size))
    parts = _Parts(link, source, bounds)
    if _lend(link, parts.fill, source, out, ranks, ranks):
        sources, outs = parts.borrow(ranks), parts.borrow(ranks, OUT)
        for block in _blocks(link, bounds, source.itemsize):
            reduced = outs[me][block]
            reduction.reduce([array[block] for array in sources], reduced)
            for rank in ranks:
                if rank != me:
                    np.copyto(outs[rank][block], reduced)
        area.sync(link)
        return
    if _left_to_another(link, Layout(-1, reduction), source, out):
        return
    for low in parts.pieces():
        arrays = parts.collect(low)
        reduced = parts.cut(out, me, low)
        reduction.reduce(arrays, reduced)
        np.copyto(area.next_rooms(source.dtype, reduced.size)[me], reduced)
        area.sync(link)
        for rank in ranks:
            if rank != me:
                target = parts.cut(out, rank, low)
                np.copyto(target, area.rooms(source.dtype, target.size)[rank])


def reduce(
    link: CollectiveContext, source: Array, out: Array | None, root: int, reduction: Reduction
) -> None:
    """Reduce ``source`` of all ranks into ``out`` (may be ``source``) of the root."""
    if source.nbytes <= AT_ONCE:
        arrays = _all_at_once(link, source)
        if out is not None and link.rank == root:
            reduction.reduce(arrays, out)
        return
    area, ranks, me = _area(link), range(link.size), link.rank
    bounds = bounds_of(split_sizes(source.size, link.size))
    parts = _Parts(link, source, bounds)
    if _lend(link, parts.fill, source, out, ranks, [root]):
        sources, (target,) = parts.borrow(ranks), parts.borrow([root], OUT)
        for block in _blocks(link, bounds, source.itemsize):
            reduction.reduce([array[block] for array in sources], target[block])
        area.sync(link)
        return
    if _left_to_another(link, Layout(root, reduction), source, out):
        return
    for low in parts.pieces():
        arrays = parts.collect(low)
        reduction.reduce(arrays, area.next_rooms(source.dtype, arrays[me].size)[me])
        area.sync(link)
        if out is not None and me == root:
            for rank in ranks:
                target = parts.cut(out, rank, low)
                np.copyto(target, area.rooms(source.dtype, target.size)[rank])


def reduce_scatter(
    link: CollectiveContext, source: Array, own: Array, bounds: Sequence[int], reduction: Reduction
) -> None:
    """Reduce ``source``, of which each rank gets ``[bounds[rank]:bounds[rank + 1]]`` in ``own``.

    ``own`` may be that part of ``source``.
    """
    me, ranks = link.rank, range(link.size)
    if source.nbytes <= AT_ONCE:
        place = slice(bounds[me], bounds[me + 1])
        reduction.reduce([array[place] for array in _all_at_once(link, source)], own)
        return
    parts = _Parts(link, source, bounds)
    if _lend(link, parts.fill, source, None, ranks):
        sources = parts.borrow(ranks)
        for block in _blocks(link, bounds, source.itemsize):
            target = own[block.start - bounds[me] : block.stop - bounds[me]]
            reduction.reduce([array[block] for array in sources], target)
        _area(link).sync(link)
        return
    if _left_to_another(link, Layout(-1, reduction, bounds), source, own):
        return
    for low in parts.pieces():
        arrays = parts.collect(low)
        reduction.reduce(arrays, own[low : low + arrays[me].size])


def all_gather(link: CollectiveContext, own: Array, out: Array, bounds: Sequence[int]) -> None:
    """Bring every rank's ``own`` to ``out[bounds[rank]:bounds[rank + 1]]`` of all ranks.

    ``own`` may be that part of ``out``.
    """
    gather(link, own, out, bounds, link.rank)


def gather(
    link: CollectiveContext, own: Array, out: Array | None, bounds: Sequence[int], root: int
) -> None:
    """Bring every rank's ``own`` to ``out[bounds[rank]:bounds[rank + 1]]`` of the root."""
    area, dtype, ranks = _area(link), own.dtype, range(link.size)
    width, largest = ROOM // own.itemsize, _largest(bounds)

    def fill(low: int) -> None:
        _stage(link, own[low : low + width])

    taken = out if link.rank == root else None

    def keep_own() -> None:
        if taken is not None:
            place = taken[bounds[root] : bounds[root + 1]]
            if not np.may_share_memory(place, own):  # it is in its place already
                np.copyto(place, own)

    least = largest * own.itemsize
    # What the caches do not hold, all ranks read in the same order: memory is then read once.
    early = least <= _EARLY
    meanwhile = keep_own if early else None
    lent = _lend(link, fill, own, None, ranks, least=least, meanwhile=meanwhile)
    if (
        not lent
        and least > AT_ONCE
        and _left_to_another(link, Layout(root, None, bounds), own, out)
    ):
        return
    others = [rank for rank in ranks if rank != root]
    if lent:
        if taken is not None:
            for rank in others if early else ranks:
                if rank == root:
                    keep_own()
                    continue
                target = taken[bounds[rank] : bounds[rank + 1]]
                np.copyto(target, area.borrowed(link, rank, dtype, target.size))
        area.sync(link)
        return
    if not early:
        keep_own()
    for low in _starts(largest, width):
        if low:
            fill(low)
            area.sync(link)
        if taken is not None:
            for rank in others:
                target = taken[bounds[rank] + low : bounds[rank + 1]][:width]
                np.copyto(target, area.rooms(dtype, target.size)[rank])


def broadcast(link: CollectiveContext, data: Array, root: int) -> None:
    """Copy ``data`` of the root into ``data`` of all ranks."""
    area, sends = _area(link), link.rank == root
    width = ROOM // data.itemsize

    def fill(low: int) -> None:
        if sends:
            _stage(link, data[low : low + width])

    if _lend(link, fill, data, None, [root], least=data.nbytes):
        if not sends:
            np.copyto(data, area.borrowed(link, root, data.dtype, data.size))
        area.sync(link)
        return
    if _left_to_another(link, Layout(root), data, data):
        return
    for low in _starts(data.size, width):
        if low:
            fill(low)
            area.sync(link)
        if not sends:
            target = data[low : low + width]
            np.copyto(target, area.rooms(data.dtype, target.size)[root])


def scatter(
    link: CollectiveContext, source: Array | None, own: Array, bounds: Sequence[int], root: int
) -> None:
    """Bring ``source[bounds[rank]:bounds[rank + 1]]`` of the root to every rank's ``own``."""
    area, me, dtype = _area(link), link.rank, own.dtype
    sends = me == root
    parts = _Parts(link, own if source is None else source, bounds)

    def fill(low: int) -> None:
        if sends:
            parts.fill(low)

    if source is not None and sends:
        np.copyto(own, source[bounds[me] : bounds[me + 1]])
    if _lend(link, fill, source, None, [root], least=bounds[-1] * own.itemsize):
        if not sends:
            place = slice(bounds[me], bounds[me + 1])
            np.copyto(own, area.borrowed(link, root, dtype, bounds[-1])[place])
        area.sync(link)
        return
    large = bounds[-1] * own.itemsize > AT_ONCE
    if large and _left_to_another(link, Layout(root, None, bounds), source, own):
        return
    for low in parts.pieces():
        if low:
            fill(low)
            area.sync(link)
        if not sends:
            target = own[low : low + parts.width]
            np.copyto(target, parts.sent(root, target.size))


def all_to_all(
    link: CollectiveContext,
    source: Array,
    send_bounds: Sequence[int],
    out: Array,
    recv_bounds: Sequence[int],
) -> None:
    """Send ``source[send_bounds[r]:send_bounds[r + 1]]`` to each rank r.

    What rank r sends arrives in ``out[recv_bounds[r]:recv_bounds[r + 1]]``; ``out`` and
    ``source`` must not overlap. The ranks first find out the size of the largest message of all,
    where those are not equal anyway; and where they are, all ranks have the same ``send_bounds``.
    """
    area, me, ranks = _area(link), link.rank, range(link.size)
    parts = _Parts(link, source, send_bounds)
    largest, least = max(_largest(send_bounds), _largest(recv_bounds)), source.nbytes
    if link.call.ragged:  # not lent: a reader would not know where its part is
        if _left_to_another(link, Layout(-1, None, send_bounds, recv_bounds), source, out):
            return
        area.next_rooms(_INT64, 1)[me][0] = largest
        area.sync(link)
        largest, least = max(int(room[0]) for room in area.rooms(_INT64, 1)), 0
    lent = _lend(link, parts.fill, source, None, ranks, least=least)
    if lent:
        place = slice(send_bounds[me], send_bounds[me + 1])
        for rank, array in enumerate(parts.borrow(ranks)):
            np.copyto(out[recv_bounds[rank] : recv_bounds[rank + 1]], array[place])
        area.sync(link)
        return
    if _left_to_another(link, Layout(-1, None, send_bounds, recv_bounds), source, out):
        return
    np.copyto(
        out[recv_bounds[me] : recv_bounds[me + 1]], source[send_bounds[me] : send_bounds[me + 1]]
    )
    for low in _starts(largest, parts.width):
        if low:
            parts.fill(low)
            area.sync(link)
        for rank in ranks:
            if rank != me:
                target = out[recv_bounds[rank] + low : recv_bounds[rank + 1]][: parts.width]
                np.copyto(target, parts.sent(rank, target.size))


def _left_to_another(
    link: CollectiveContext, layout: Layout, source: Array | None, out: Array | None
) -> bool:
    """Have another algorithm do it all where it is faster for arrays that were not lent."""
    other = link.otherwise()
    if other is None:
        return False
    assert link.call.definition is not None
    link.call.definition.start(link, other, layout, source, out)
    return True


def _all_at_once(link: CollectiveContext, source: Array) -> list[Array]:
    """Stage a small array whole; return those of all ranks."""
    _stage(link, source)
    _area(link).sync(link)
    return _area(link).rooms(source.dtype, source.size)


def _stage(link: CollectiveContext, piece: Array) -> None:
    np.copyto(_area(link).next_rooms(piece.dtype, piece.size)[link.rank], piece)


def _lend(
    link: CollectiveContext,
    fill: Callable[[int], None],
    source: Array | None,
    out: Array | None,
    givers: Collection[int],
    takers: Collection[int] = (),
    *,
    least: int = AT_ONCE + 1,
    meanwhile: Callable[[], None] | None = None,
) -> bool:
    """Take the first step: lend what others can see, or stage the first piece of it.

    Args:
        fill: stages the piece at an offset, here the first one.
        source, out: what this rank would lend.
        givers: the ranks that have to lend their ``source``.
        takers: those of them that have to lend their ``out``, too.
        least: bytes that there are; small arrays are staged.
        meanwhile: what this rank has to do by itself; not done if ``link.otherwise`` does it all.

    Returns:
        Whether all of them have lent. If not, ``link.otherwise`` tells what to do; or the first
        pieces of all ranks are staged.
    """
    area, me = _area(link), link.rank
    if least <= AT_ONCE:
        fill(0)
        area.sync(link, meanwhile)
        return False
    other = link.staged is not None  # which then does what is not lent
    if link.entered:  # by the lane of ``loans``
        if not other and meanwhile is not None:
            meanwhile()
    else:
        seen = area.lend(source if me in givers else None, out if me in takers else None)
        if not seen and not other:
            fill(0)
        area.sync(link, None if other else meanwhile)
    lent = kept = False
    for rank in givers:
        if area.lent(rank) and (rank not in takers or area.lent(rank, OUT)):
            lent = True
        else:
            kept = True
    if lent and kept and not other:  # who has lent has not staged; all do it in the same step
        fill(0)
        area.sync(link)
    if not kept and other and meanwhile is not None:
        meanwhile()
    return not kept


class _Parts:
    """A flat array in parts, one for each rank, and the places for them in the rooms.

    Attributes:
        width: elements of a place: what a piece of a part has at most.
    """

    def __init__(self, link: CollectiveContext, array: Array, bounds: Sequence[int]) -> None:
        self._link, self._array, self._bounds = link, array, bounds
        size = ROOM // max(1, link.size - 1) // _LINE * _LINE  # a rank needs no place for itself
        self.width = size // array.itemsize

    def pieces(self) -> range:
        """Where pieces begin, counted from the beginning of each part."""
        return _starts(_largest(self._bounds), self.width)

    def cut(self, array: Array, rank: int, low: int) -> Array:
        """The piece at ``low`` of ``rank``'s part of ``array``."""
        return array[self._bounds[rank] + low : self._bounds[rank + 1]][: self.width]

    def fill(self, low: int) -> None:
        """Stage the pieces at ``low`` for all other ranks."""
        link, width, itemsize = self._link, self.width, self._array.itemsize
        room = _area(link).next_rooms(self._array.dtype, ROOM // itemsize)[link.rank]
        for rank in range(link.size):
            if rank != link.rank:
                piece = self.cut(self._array, rank, low)
                np.copyto(room[_place(link.rank, rank) * width :][: piece.size], piece)

    def sent(self, rank: int, count: int) -> Array:
        """What ``rank`` has staged for this one."""
        link, dtype = self._link, self._array.dtype
        room = _area(link).rooms(dtype, ROOM // dtype.itemsize)[rank]
        return room[_place(rank, link.rank) * self.width :][:count]

    def collect(self, low: int) -> list[Array]:
        """All ranks' pieces at ``low`` of this rank's part; the first ones are staged already."""
        link = self._link
        if low:
            self.fill(low)
            _area(link).sync(link)
        own = self.cut(self._array, link.rank, low)
        return [
            own if rank == link.rank else self.sent(rank, own.size) for rank in range(link.size)
        ]

    def borrow(self, ranks: Collection[int], which: int = SOURCE) -> list[Array]:
        """The whole arrays that ranks have lent."""
        link, dtype, size = self._link, self._array.dtype, self._array.size
        return [_area(link).borrowed(link, rank, dtype, size, which) for rank in ranks]


def _place(owner: int, reader: int) -> int:
    """The number of ``reader``'s place in the room of ``owner``."""
    return reader - (reader > owner)


def _blocks(link: CollectiveContext, bounds: Sequence[int], itemsize: int) -> Iterator[slice]:
    """This rank's part, in what is reduced at once."""
    low, high, step = bounds[link.rank], bounds[link.rank + 1], _area(link).block // itemsize
    for start in range(low, high, step):
        yield slice(start, min(start + step, high))


def _starts(size: int, width: int) -> range:
    """Where pieces of ``size`` elements begin; at least one, so that every call takes a step."""
    return range(0, max(1, size), width)


def _largest(bounds: Sequence[int]) -> int:
    return max(high - low for low, high in itertools.pairwise(bounds))


# One thread copies about 10 GB/s of what is not in its cache.
_COSTS = Costs(alpha=1e-6, beta=0.1e-9, gamma=0.1e-9)


def _algorithm(steps: int, copies: Callable[[int], float], reduces: float = 0) -> Algorithm:
    def cost(p: int) -> CostTerms:
        return CostTerms(steps, copies(p), reduces)

    return Algorithm(sys.modules[__name__], cost, costs=_COSTS, agrees=True, lends=AT_ONCE)


# Of arrays that are staged: others do not compete.
ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {NAME: _algorithm(2, lambda p: (2 * p - 1) / p, 1)},
    "reduce": {NAME: _algorithm(2, lambda p: (2 * p - 1) / p, 1)},
    "reduce_scatter": {NAME: _algorithm(1, lambda p: (p - 1) / p, 1)},
    "all_gather": {NAME: _algorithm(1, lambda p: (p + 1) / p)},
    "broadcast": {NAME: _algorithm(1, lambda p: 1)},
    "gather": {NAME: _algorithm(1, lambda p: 1)},
    "scatter": {NAME: _algorithm(1, lambda p: 1)},
    "all_to_all": {NAME: _algorithm(1, lambda p: (2 * p - 1) / p)},
}
