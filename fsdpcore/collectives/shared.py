"""Shared: the ranks are on one host and work in memory that all of them see (``Area``).

With p ranks and n bytes (per rank for all_reduce, reduce and broadcast, in total for the others),
each rank copies, besides what it reduces; no messages are sent:

==============  ===========================================================
all_reduce      n in, n out, reduces n/p from p arrays in two steps per room (up to ``AT_ONCE``
                bytes: n in, and reduces n from p arrays, in one step)
reduce          as all_reduce, n out on the root only
reduce_scatter  ((p - 1) / p) n in, reduces n/p from p arrays
all_gather      n/p in, ((p - 1) / p) n out
broadcast       n in on the root, n out on the others
gather          n/p in; ((p - 1) / p) n out on the root
scatter         ((p - 1) / p) n in on the root; n/p out on the others
all_to_all      ((p - 1) / p) n in, ((p - 1) / p) n out
==============  ===========================================================

Larger arrays go through the rooms in pieces, a step for each, and the next piece is copied in
while others still read the last. The first step is the check that all ranks call the same (see
``area.py``), so these functions are called without one. Reductions are canonical.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fsdpcore.buffers import Array, bounds_of, split_sizes
from fsdpcore.collectives.algorithms import Algorithm, Terms
from fsdpcore.collectives.area import ROOM, Area
from fsdpcore.collectives.lane import LARGEST
from fsdpcore.collectives.link import Link
from fsdpcore.policy import Costs
from fsdpcore.reduce_ops import Reduction

NAME = "shared"

# Up to here every rank reduces everything: cheaper than a second step.
AT_ONCE = LARGEST
_LINE = 64  # bytes; parts of a room begin at multiples of it
_INT64 = np.dtype(np.int64)


def _area(link: Link) -> Area:
    return link.area  # type: ignore[return-value]  # chosen for groups that have one


def all_reduce(link: Link, data: Array, reduction: Reduction) -> None:
    """Reduce ``data`` of all ranks into ``data`` of all ranks."""
    all_reduce_into(link, data, data, reduction)


def all_reduce_into(link: Link, source: Array, out: Array, reduction: Reduction) -> None:
    """Reduce ``source`` of all ranks into ``out`` (may be ``source``) of all ranks."""
    area = _area(link)
    if source.nbytes <= AT_ONCE:
        rooms = area.next_rooms(source.dtype, source.size)
        rooms[link.rank][...] = source
        area.sync(link)
        reduction.reduce(rooms, out)
        return
    for low, high in _pieces(source.size, ROOM // source.itemsize):
        bounds = _reduce_parts(area, link, source[low:high], reduction)
        area.sync(link)
        _copy_parts(area, link, out[low:high], bounds)


def reduce(link: Link, source: Array, out: Array | None, root: int, reduction: Reduction) -> None:
    """Reduce ``source`` of all ranks into ``out`` (may be ``source``) of the root."""
    area = _area(link)
    if source.nbytes <= AT_ONCE:
        rooms = area.next_rooms(source.dtype, source.size)
        rooms[link.rank][...] = source
        area.sync(link)
        if out is not None and link.rank == root:
            reduction.reduce(rooms, out)
        return
    for low, high in _pieces(source.size, ROOM // source.itemsize):
        bounds = _reduce_parts(area, link, source[low:high], reduction)
        area.sync(link)
        if out is not None and link.rank == root:
            _copy_parts(area, link, out[low:high], bounds)


def _reduce_parts(area: Area, link: Link, piece: Array, reduction: Reduction) -> list[int]:
    """Reduce this rank's part of ``piece`` into its next room, at its place; return the places."""
    me, dtype, size = link.rank, piece.dtype, piece.size
    bounds = bounds_of(split_sizes(size, link.size))
    own = slice(bounds[me], bounds[me + 1])
    np.copyto(area.next_rooms(dtype, size)[me], piece)
    area.sync(link)
    parts = [room[own] for room in area.rooms(dtype, size)]
    reduction.reduce(parts, area.next_rooms(dtype, size)[me][own])
    return bounds


def _copy_parts(area: Area, link: Link, out: Array, bounds: Sequence[int]) -> None:
    for rank, room in enumerate(area.rooms(out.dtype, out.size)):
        low, high = bounds[rank], bounds[rank + 1]
        np.copyto(out[low:high], room[low:high])


def reduce_scatter(
    link: Link, source: Array, own: Array, bounds: Sequence[int], reduction: Reduction
) -> None:
    """Reduce ``source``, of which each rank gets ``[bounds[rank]:bounds[rank + 1]]`` in ``own``.

    ``own`` may be that part of ``source``.
    """
    area, me, dtype = _area(link), link.rank, source.dtype
    if source.nbytes <= AT_ONCE:
        rooms = area.next_rooms(dtype, source.size)
        rooms[me][...] = source
        area.sync(link)
        place = slice(bounds[me], bounds[me + 1])
        reduction.reduce([room[place] for room in rooms], own)
        return
    width = _width(link, dtype)
    for low, high in _pieces(_largest(bounds), width):
        _fill(area, link, source, bounds, low, width)
        area.sync(link)
        target = own[low:high]
        place = slice(me * width, me * width + target.size)
        parts = [room[place] for room in area.rooms(dtype, width * link.size)]
        parts[me] = source[bounds[me] + low :][: target.size]
        reduction.reduce(parts, target)


def all_gather(link: Link, own: Array, out: Array, bounds: Sequence[int]) -> None:
    """Bring every rank's ``own`` to ``out[bounds[rank]:bounds[rank + 1]]`` of all ranks.

    ``own`` may be that part of ``out``.
    """
    gather(link, own, out, bounds, link.rank)


def gather(link: Link, own: Array, out: Array | None, bounds: Sequence[int], root: int) -> None:
    """Bring every rank's ``own`` to ``out[bounds[rank]:bounds[rank + 1]]`` of the root."""
    area, me, dtype = _area(link), link.rank, own.dtype
    width, largest = ROOM // own.itemsize, _largest(bounds)
    low = 0
    while True:
        rooms = area.next_rooms(dtype, min(width, largest - low))
        piece = own if largest <= width else own[low : low + width]
        rooms[me][: piece.size] = piece
        area.sync(link)
        if out is not None and me == root:
            for rank, room in enumerate(rooms):
                target = out[bounds[rank] + low : bounds[rank + 1]][:width]
                if rank != me:
                    target[...] = room[: target.size]
                elif not np.may_share_memory(target, piece):  # it is in its place already
                    target[...] = piece
        low += width
        if low >= largest:
            return


def broadcast(link: Link, data: Array, root: int) -> None:
    """Copy ``data`` of the root into ``data`` of all ranks."""
    area, sends = _area(link), link.rank == root
    for piece in _cut(data):
        rooms = area.next_rooms(piece.dtype, piece.size)
        if sends:
            rooms[root][...] = piece
        area.sync(link)
        if not sends:
            piece[...] = rooms[root]


def scatter(link: Link, source: Array | None, own: Array, bounds: Sequence[int], root: int) -> None:
    """Bring ``source[bounds[rank]:bounds[rank + 1]]`` of the root to every rank's ``own``."""
    area, me = _area(link), link.rank
    width = _width(link, own.dtype)
    for low, high in _pieces(_largest(bounds), width):
        if source is not None and me == root:
            _fill(area, link, source, bounds, low, width)
        area.sync(link)
        target = own[low:high]
        if source is not None and me == root:
            np.copyto(target, source[bounds[me] + low :][: target.size])
        else:
            room = area.rooms(own.dtype, width * link.size)[root]
            np.copyto(target, room[me * width :][: target.size])


def all_to_all(
    link: Link,
    source: Array,
    send_bounds: Sequence[int],
    out: Array,
    recv_bounds: Sequence[int],
) -> None:
    """Send ``source[send_bounds[r]:send_bounds[r + 1]]`` to each rank r.

    What rank r sends arrives in ``out[recv_bounds[r]:recv_bounds[r + 1]]``; ``out`` and
    ``source`` must not overlap. The ranks first find out the size of the largest message of all,
    where those are not equal anyway.
    """
    area, me, dtype = _area(link), link.rank, source.dtype
    width, largest = _width(link, dtype), max(_largest(send_bounds), _largest(recv_bounds))
    if link.call.ragged:
        area.next_rooms(_INT64, 1)[me][0] = largest
        area.sync(link)
        largest = max(int(room[0]) for room in area.rooms(_INT64, 1))
    for low, _ in _pieces(largest, width):
        _fill(area, link, source, send_bounds, low, width)
        area.sync(link)
        rooms = area.rooms(dtype, width * link.size)
        for rank in range(link.size):
            target = out[recv_bounds[rank] + low : recv_bounds[rank + 1]][:width]
            if rank == me:
                np.copyto(target, source[send_bounds[me] + low :][: target.size])
            else:
                np.copyto(target, rooms[rank][me * width :][: target.size])


def _fill(
    area: Area, link: Link, source: Array, bounds: Sequence[int], low: int, width: int
) -> None:
    """Put the next ``width`` elements for every other rank at that rank's place in the own room."""
    room = area.next_rooms(source.dtype, width * link.size)[link.rank]
    for rank in range(link.size):
        if rank != link.rank:
            piece = source[bounds[rank] + low : bounds[rank + 1]][:width]
            np.copyto(room[rank * width :][: piece.size], piece)


def _width(link: Link, dtype: np.dtype[np.generic]) -> int:
    """The elements of one rank's place, where a room has a place for each rank."""
    return ROOM // link.size // _LINE * _LINE // dtype.itemsize


def _largest(bounds: Sequence[int]) -> int:
    return max(high - low for low, high in itertools.pairwise(bounds))


def _cut(data: Array) -> list[Array]:
    """Cut an array into pieces that fit a room; at least one, so that every call takes a step."""
    if data.nbytes <= ROOM:
        return [data]
    return [data[low:high] for low, high in _pieces(data.size, ROOM // data.itemsize)]


def _pieces(size: int, width: int) -> Iterator[tuple[int, int]]:
    """Cut ``size`` elements into pieces; at least one, so that every call takes a step."""
    yield 0, min(size, width)
    for low in range(width, size, width):
        yield low, min(low + width, size)


# One thread copies about 10 GB/s of what is not in its cache.
_COSTS = Costs(alpha=1e-6, beta=0.1e-9, gamma=0.1e-9)


def _algorithm(steps: int, copies: Callable[[int], float], reduces: float = 0) -> Algorithm:
    def cost(p: int) -> Terms:
        return Terms(steps, copies(p), reduces)

    return Algorithm(sys.modules[__name__], cost, costs=_COSTS, agrees=True)


ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {NAME: _algorithm(2, lambda p: 2, 1)},
    "reduce": {NAME: _algorithm(2, lambda p: 2, 1)},
    "reduce_scatter": {NAME: _algorithm(1, lambda p: (p - 1) / p, 1)},
    "all_gather": {NAME: _algorithm(1, lambda p: 1)},
    "broadcast": {NAME: _algorithm(1, lambda p: 1)},
    "gather": {NAME: _algorithm(1, lambda p: 1)},
    "scatter": {NAME: _algorithm(1, lambda p: 1)},
    "all_to_all": {NAME: _algorithm(1, lambda p: 2 * (p - 1) / p)},
}
