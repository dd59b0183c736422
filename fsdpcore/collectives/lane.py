"""Express lanes: blocking calls with small arrays, through the group's area.

Moving a few bytes between two cores takes half a microsecond, less than it takes Python to look
up where they go. So once a kind of call has been settled, all that does not change from call to
call is bound here in one closure. It does what ``call.run``, ``Area.sync`` and ``shared`` do, step
for step, and leaves everything out of the ordinary to them: who changes one of these changes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from fsdpcore.buffers import Array

if TYPE_CHECKING:
    from fsdpcore.backend import Backend
    from fsdpcore.collectives.call import Call

# Input and ``out``, both of any shape and layout, to the result; None to go the ordinary way.
Lane = Callable[[Array, "Array | None"], "Array | None"]
_Read = Callable[[list[Array], Array, Array], Any]

LARGEST = 8 * 1024  # bytes


def lane_for(backend: Backend, call: Call) -> Lane | None:
    """Return the lane of a call that goes through the group's area, if it has one."""
    make = _READERS.get(call.operation)
    if make is None or call.nbytes > LARGEST:
        return None
    return _lane(backend, call, make(backend, call), call.root in (-1, backend.rank))


def _lane(backend: Backend, call: Call, read: _Read, fills: bool) -> Lane:
    root, link = backend.root, backend.link
    assert link is not None
    assert link.area is not None
    assert call.dtype is not None
    acquire, release = backend.issue_lock.acquire, backend.issue_lock.release
    begin = root.recorder.begin
    area, me, limit, record = link.area, backend.rank, root.default_timeout, call.record
    flags, own, others = area.flags, area.own, area.others
    digest, dtype, shape = call.digest, call.dtype, call.out_shape
    count = math.prod(call.shape)
    rooms_of = read_of = area.arrays(dtype, count)
    if call.operation == "reduce_scatter":  # every rank reads its own part only
        read_of = area.parts(dtype, count, call.bounds[me], call.bounds[me + 1])
    empty, ndarray = np.empty, np.ndarray

    def go(source: Array, out: Array | None) -> Array | None:
        if out is None:
            out = empty(shape, dtype)
        elif not (
            type(out) is ndarray and out.shape == shape and out.dtype is dtype and out.flags.carray
        ):
            return None
        if not acquire(False):
            return None
        try:
            executor = backend.executor
            busy = executor is not None and not executor.idle
            if busy or backend.closed or root.failure is not None:
                return None
            backend.issued = sequence = backend.issued + 1
            entry = begin(backend, sequence, record)
            try:
                area.step = step = area.step + 1
                parity = step & 1
                mine = own[parity]
                if fills:
                    rooms_of[parity][me][...] = source if source.ndim == 1 else source.reshape(-1)
                flags[mine + 1] = digest
                flags[mine] = step
                fits, begun = True, False
                for at in others[parity]:
                    if flags[at] != step:
                        if not begun:  # once: the deadline is for all of them
                            link.begin(call, sequence, limit, False)
                            begun = True
                        area.wait(at, step, link)
                    if flags[at + 1] != digest:
                        fits = False
                if not fits:
                    link.begin(call, sequence, limit, False)
                    link.disagree()
                read(read_of[parity], source, out)
            except BaseException as error:
                link.begin(call, sequence, limit, False)
                link.broke(entry, error)
                raise
            entry.end = monotonic_ns()
        finally:
            release()
        return out

    return go


def _reduces(backend: Backend, call: Call) -> _Read:
    assert call.reduction is not None
    reduce = call.reduction.reduce

    def read(rooms: list[Array], source: Array, out: Array) -> None:
        reduce(rooms, out if out.ndim == 1 else out.reshape(-1))

    return read


def _all_gather(backend: Backend, call: Call) -> _Read:
    places = [slice(low, low + call.bounds[1]) for low in call.bounds[:-1]]

    def read(rooms: list[Array], source: Array, out: Array) -> None:
        flat = out if out.ndim == 1 else out.reshape(-1)
        for place, room in zip(places, rooms, strict=False):
            flat[place] = room

    return read


def _broadcast(backend: Backend, call: Call) -> _Read:
    root, sends = call.root, call.root == backend.rank

    def read(rooms: list[Array], source: Array, out: Array) -> None:
        if not sends:
            (out if out.ndim == 1 else out.reshape(-1))[...] = rooms[root]
        elif out is not source:
            out[...] = source

    return read


_READERS: dict[str, Callable[[Backend, Call], _Read]] = {
    "all_gather": _all_gather,
    "all_reduce": _reduces,
    "broadcast": _broadcast,
    "reduce_scatter": _reduces,
}
