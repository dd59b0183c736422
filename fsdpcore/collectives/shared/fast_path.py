"""The fast path: blocking calls of groups that share memory.

Moving a few bytes between two cores takes half a microsecond, less than it takes Python to look
up where they go. So once a kind of call has been settled, all that does not change from call to
call is bound here in one closure. It does what ``call.run`` does, and for small arrays what
``SharedRegion.sync`` and ``shared`` do, step for step, and leaves everything else to them:
who changes one of these changes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING

import numpy as np

from fsdpcore.collectives.output import separated
from fsdpcore.collectives.shared import published_path
from fsdpcore.collectives.shared.reducing import prepare
from fsdpcore.collectives.shared.region import DIGEST, region_of
from fsdpcore.collectives.state import state_of
from fsdpcore.core.buffers import Array

if TYPE_CHECKING:
    from fsdpcore.collectives.context import CollectiveContext
    from fsdpcore.collectives.shared.region import SharedRegion
    from fsdpcore.collectives.spec import CallSpec, FastPath
    from fsdpcore.comm.backend import Backend
    from fsdpcore.diagnostics.recorder import OperationEntry

_Work = Callable[["OperationEntry", int, Array, Array], None]
_Read = Callable[[Array, Array], None]

SHARED = "shared"  # the algorithm that the fast path knows
LARGEST = 8 * 1024  # bytes


def fast_path_for(backend: Backend, call: CallSpec) -> FastPath | None:
    """Return the fast path of a call of a group that shares memory, if it has one."""
    link, choice = state_of(backend).context, call.choice
    area = None if link is None else region_of(link)
    if link is None or area is None or not area.express:
        return None
    if choice.agrees and call.collective in _READERS and call.nbytes <= LARGEST:
        return _lane(backend, call, _short(backend, link, area, call))
    if call.definition is None or call.definition.to_root:  # None stands for the ordinary way
        return None
    work = _long(backend, link, call)
    if choice.name == SHARED and area.addressed and published_path.takes(call):
        work = published_path.lane(backend, link, area, call, work)
    return _lane(backend, call, work)


def _lane(backend: Backend, call: CallSpec, work: _Work) -> FastPath:
    """Return ``work`` with what stands before and after it in every call."""
    root, record, begin = backend.root, call.record, backend.root.recorder.begin
    order, lock = backend.order, backend.order.lock
    dtype, shape = call.dtype, call.out_shape
    empty, ndarray = np.empty, np.ndarray

    def go(source: Array, out: Array | None) -> Array | None:
        if out is None:
            out = empty(shape, dtype)
        elif not (
            type(out) is ndarray and out.shape == shape and out.dtype is dtype and out.flags.carray
        ):
            return None
        if lock.locked():
            return None
        with lock:
            executor = order.executor
            busy = executor is not None and not executor.idle
            if busy or order.closed or root.failure is not None:
                return None
            before = order.issued
            try:
                order.issued = sequence = before + 1
                entry = begin(order, sequence, record)
                work(entry, sequence, source, out)
                entry.end = monotonic_ns()
            except BaseException as error:
                order.abandon(before, call.operation, error)
                raise
        return out

    return go


def _long(backend: Backend, link: CollectiveContext, call: CallSpec) -> _Work:
    """Any algorithm, for arrays of any size."""
    definition, layout, choice, limit = call.definition, call.layout, call.choice, backend.timeout
    assert definition is not None
    start, agrees, me = definition.start, choice.agrees, backend.rank

    def work(entry: OperationEntry, sequence: int, source: Array, out: Array) -> None:
        link.begin(call, sequence, limit, False)
        link.entry = entry
        try:
            if not agrees:
                link.rows = link.agree()
            flat = source if source.ndim == 1 else source.reshape(-1)
            into = flat if source is out else out if out.ndim == 1 else out.reshape(-1)
            start(link, choice, layout, separated(flat, into, definition, layout, me), into)
        except BaseException as error:
            link.broke(entry, error)
            raise
        finally:
            link.release()

    return work


def _short(backend: Backend, link: CollectiveContext, area: SharedRegion, call: CallSpec) -> _Work:
    """The algorithm ``shared`` for small arrays: one step."""
    assert call.dtype is not None
    me, limit, digest = backend.rank, backend.timeout, call.digest
    flags, own, others, wake = area.flags, area.own, area.others, area.wake
    count, fills = math.prod(call.shape), call.root in (-1, backend.rank)
    rooms_of = read_of = area.arrays(call.dtype, count)
    if call.collective == "reduce_scatter":  # every rank reads its own part only
        read_of = area.parts(call.dtype, count, call.bounds[me], call.bounds[me + 1])
    reads = area.keep(_READERS[call.collective](link, call, rooms) for rooms in read_of)

    def work(entry: OperationEntry, sequence: int, source: Array, out: Array) -> None:
        try:
            area.step = step = area.step + 1
            parity = step & 1
            mine = own[parity]
            if fills:
                rooms_of[parity][me][...] = source if source.ndim == 1 else source.reshape(-1)
            flags[mine + DIGEST] = digest
            flags[mine] = step
            if wake is not None:
                wake()
            fits, begun = True, False
            for at in others[parity]:
                if flags[at] != step:
                    if not begun:  # once: the deadline is for all of them
                        link.begin(call, sequence, limit, False)
                        begun = True
                    area.wait(at, step, link)
                if flags[at + DIGEST] != digest:
                    fits = False
            if not fits:
                link.begin(call, sequence, limit, False)
                link.disagree()
            reads[parity](source, out)
        except BaseException as error:
            link.begin(call, sequence, limit, False)
            link.broke(entry, error)
            raise

    return work


def _reduces(link: CollectiveContext, call: CallSpec, rooms: list[Array]) -> _Read:
    assert call.reduction is not None
    reduce = prepare(link, call.reduction, rooms)

    def read(source: Array, out: Array) -> None:
        reduce(out if out.ndim == 1 else out.reshape(-1))

    return read


def _all_gather(link: CollectiveContext, call: CallSpec, rooms: list[Array]) -> _Read:
    places = [slice(low, low + call.bounds[1]) for low in call.bounds[:-1]]
    parts = list(zip(places, rooms, strict=True))

    def read(source: Array, out: Array) -> None:
        flat = out if out.ndim == 1 else out.reshape(-1)
        for place, room in parts:
            flat[place] = room

    return read


def _broadcast(link: CollectiveContext, call: CallSpec, rooms: list[Array]) -> _Read:
    room, sends = rooms[call.root], call.root == link.rank

    def read(source: Array, out: Array) -> None:
        if not sends:
            (out if out.ndim == 1 else out.reshape(-1))[...] = room
        elif out is not source:
            out[...] = source

    return read


_READERS: dict[str, Callable[[CollectiveContext, CallSpec, list[Array]], _Read]] = {
    "all_gather": _all_gather,
    "all_reduce": _reduces,
    "broadcast": _broadcast,
    "reduce_scatter": _reduces,
}
