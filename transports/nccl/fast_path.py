"""Express lanes: blocking calls that are one call of NCCL.

NCCL takes a few microseconds to enqueue a collective. So once a kind of call has been settled, all
that does not change from call to call is bound here in one closure. It does what
``collectives/on_device.py`` does, step for step, and leaves everything out of the ordinary to that:
who changes one of them changes the other.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy
from cupy.cuda import get_current_stream, runtime

from fsdpcore.collectives.spec import FastPath
from fsdpcore.collectives.state import state_of
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array

from .calls import BYTES, is_even, kind_of
from .communicators import ERRORS, Communicator
from .supervisor import Flight, key_of

if TYPE_CHECKING:
    from fsdpcore.collectives.spec import CallSpec

    from .backend import NcclBackend

NATIVE = "nccl"  # the algorithm that the lanes know
# Addresses of input and result, and the stream.
_Enqueue = Callable[[int, int, int], None]


class _Form(NamedTuple):
    """A call of NCCL.

    Attributes:
        enqueue: makes it.
        inside: the one overlap that it allows: the result begins so many bytes behind the input
            (0 for the same memory); negative where the input begins behind the result.
    """

    enqueue: _Enqueue
    inside: int


def fast_path_for(
    transport: NcclBackend, group: Backend, call: CallSpec, communicator: Communicator
) -> FastPath | None:
    """Return the lane of a call whose ranks have agreed on it, if it has one."""
    maker = _FORMS.get(call.operation)
    if maker is None or call.choice.name != NATIVE or not call.nbytes or not call.agreed:
        return None
    form = maker(group, call, communicator)
    return None if form is None else _lane(transport, group, call, communicator, form)


def _lane(
    transport: NcclBackend, group: Backend, call: CallSpec, communicator: Communicator, form: _Form
) -> FastPath:
    device, watch, record = transport.gpu, transport.watcher, call.record
    begin, order, ordinal = transport.recorder.begin, group.order, device.ordinal
    lock = order.lock
    dtype, shape, limit = call.dtype, call.out_shape, transport.default_timeout
    assert dtype is not None
    size_in = call.nbytes
    enqueue, inside = form
    get_device, empty, ndarray = runtime.getDevice, cupy.empty, cupy.ndarray
    calls, take_event, add = communicator.lock, device.take_event, watch.add

    def fits(out: Any) -> bool:
        return (
            type(out) is ndarray
            and out.shape == shape
            and out.dtype == dtype
            and out.flags.c_contiguous
            and out.data.device_id == ordinal
        )

    def go(source: Any, out: Any) -> Array | None:
        if get_device() != ordinal:
            return None
        at = source.data.ptr
        if out is None:
            out = empty(shape, dtype)
            to = out.data.ptr
        else:
            if not fits(out):
                return None
            to = out.data.ptr
            if to - at != inside and at < to + out.nbytes and to < at + size_in:
                return None
        if lock.locked():
            return None
        with lock:
            if order.closed or transport.failure is not None:
                return None
            before = order.issued
            try:
                order.issued = sequence = before + 1
                entry = begin(order, sequence, record)
                try:
                    stream = get_current_stream()
                    where = stream.ptr
                    with calls:
                        if communicator.over:
                            communicator.check_open()
                        enqueue(at, to, where)
                    event = take_event()
                    event.record(stream)
                    end = monotonic() + limit
                    key = key_of(where)
                    add(key, Flight(event, True, group, call, sequence, limit, end, None))
                except ERRORS as error:
                    failure = communicator.refused(error, f"{call.operation} #{sequence}")
                    _broke(group, entry, failure)
                    raise failure from error
                except BaseException as error:
                    _broke(group, entry, error)
                    raise
                entry.end = monotonic_ns()
            except BaseException as error:
                order.abandon(before, call.operation, error)
                raise
        result: Array = out
        return result

    return go


def _broke(group: Backend, entry: Any, error: BaseException) -> None:
    context = state_of(group).context
    assert context is not None, "it has had a call"
    context.broke(entry, error)


def _all_reduce(group: Backend, call: CallSpec, communicator: Communicator) -> _Form | None:
    assert call.reduction is not None
    kind = kind_of(call.reduction.dtype, call.reduction.name)
    if kind is None:
        return None
    dtype, op, width = kind
    count = call.nbytes // call.reduction.dtype.itemsize * width
    make = communicator.handle.allReduce
    return _Form(lambda at, to, where: make(at, to, count, dtype, op, where), 0)


def _reduce_scatter(group: Backend, call: CallSpec, communicator: Communicator) -> _Form | None:
    assert call.reduction is not None
    kind = kind_of(call.reduction.dtype, call.reduction.name)
    if kind is None or not is_even(call.bounds):
        return None
    dtype, op, width = kind
    part, make = call.bounds[1], communicator.handle.reduceScatter
    count = part * width
    place = part * call.reduction.dtype.itemsize * group.rank
    return _Form(lambda at, to, where: make(at, to, count, dtype, op, where), place)


def _all_gather(group: Backend, call: CallSpec, communicator: Communicator) -> _Form | None:
    nbytes, make = call.nbytes, communicator.handle.allGather
    place = -nbytes * group.rank
    return _Form(lambda at, to, where: make(at, to, nbytes, BYTES, where), place)


def _broadcast(group: Backend, call: CallSpec, communicator: Communicator) -> _Form | None:
    nbytes, make, root = call.nbytes, communicator.handle.broadcast, call.root
    if root == group.rank:
        return _Form(lambda at, to, where: make(at, to, nbytes, BYTES, root, where), 0)
    return _Form(lambda at, to, where: make(to, to, nbytes, BYTES, root, where), 0)


_FORMS: dict[str, Callable[[Backend, CallSpec, Communicator], _Form | None]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
}
