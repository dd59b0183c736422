"""The fast path: blocking calls that are one call of NCCL.

NCCL takes a few microseconds to enqueue a collective. So once a kind of call has been settled, all
that does not change from call to call is bound here in one closure. It does what
``collectives/on_device.py`` does, step for step, and leaves everything out of the ordinary to that.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy
from cupy.cuda import get_current_stream, runtime

from fsdpcore.collectives.spec import DECLINED, Declined, FastPath
from fsdpcore.collectives.state import state_of
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array

from .calls import BYTES, is_even, kind_of
from .communicators import ERRORS, Communicator
from .supervisor import Flight, key_of
from .transport import NcclTransport

if TYPE_CHECKING:
    from fsdpcore.collectives.spec import CallSpec

NATIVE = "nccl"  # the algorithm that the fast path knows
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
    transport: NcclTransport, group: Backend, spec: CallSpec, communicator: Communicator
) -> FastPath | None:
    """Return the fast path of a call whose ranks have agreed on it, if it has one."""
    if spec.choice.name != NATIVE or not spec.nbytes or not spec.met:
        return None
    form = _form(group, spec, communicator)
    return None if form is None else _fast_path(transport, group, spec, communicator, form)


def _fast_path(
    transport: NcclTransport,
    group: Backend,
    spec: CallSpec,
    communicator: Communicator,
    form: _Form,
) -> FastPath:
    device, supervisor, record = transport.gpu, transport.supervisor, spec.record
    begin, order, ordinal = transport.recorder.begin, group.order, device.ordinal
    lock = order.lock
    dtype, shape, limit = spec.dtype, spec.out_shape, transport.default_timeout
    assert dtype is not None
    size_in = spec.nbytes
    enqueue, inside = form
    get_device, empty, ndarray = runtime.getDevice, cupy.empty, cupy.ndarray
    calls, take_event, add = communicator.lock, device.take_event, supervisor.add

    def fits(out: Any) -> bool:
        return (
            type(out) is ndarray
            and out.shape == shape
            and out.dtype == dtype
            and out.flags.c_contiguous
            and out.data.device_id == ordinal
        )

    def go(source: Any, out: Any) -> Array | Declined:
        if get_device() != ordinal:
            return DECLINED
        at = source.data.ptr
        if out is None:
            out = empty(shape, dtype)
            to = out.data.ptr
        else:
            if not fits(out):
                return DECLINED
            to = out.data.ptr
            if to - at != inside and at < to + out.nbytes and to < at + size_in:
                return DECLINED
        if lock.locked():
            return DECLINED
        with lock:
            if order.closed or transport.failure is not None:
                return DECLINED
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
                    add(key, Flight(event, True, group, spec, sequence, limit, end, None))
                except ERRORS as error:
                    failure = communicator.refused(error, f"{spec.operation} #{sequence}")
                    _broke(group, entry, failure)
                    raise failure from error
                except BaseException as error:
                    _broke(group, entry, error)
                    raise
                entry.end = monotonic_ns()
            except BaseException as error:
                order.abandon(before, spec.operation, error)
                raise
        result: Array = out
        return result

    return go


def _broke(group: Backend, entry: Any, error: BaseException) -> None:
    context = state_of(group).context
    assert context is not None, "it has had a call"
    context.broke(entry, error)


# The functions of NCCL for operations that give every rank a result.
_FUNCTIONS = {
    "all_gather": "allGather",
    "all_reduce": "allReduce",
    "broadcast": "broadcast",
    "reduce_scatter": "reduceScatter",
}


def _form(group: Backend, spec: CallSpec, communicator: Communicator) -> _Form | None:
    """Return how NCCL is called, as the operation's record tells; None if it cannot be."""
    definition, layout, dtype = spec.definition, spec.layout, spec.dtype
    if definition is None or definition.name not in _FUNCTIONS or dtype is None:
        return None
    if layout.bounds and not is_even(layout.bounds):
        return None
    parts = definition.own_parts(layout, group.rank)
    assert parts is not None
    start, stop, _ = parts[0].indices(spec.nbytes // dtype.itemsize)
    inside = (start - (parts[1].start or 0)) * dtype.itemsize
    numbers: tuple[int, ...] = (stop - start) * dtype.itemsize, BYTES
    if layout.reduction is not None:
        kind = kind_of(dtype, layout.reduction.name)
        if kind is None:
            return None
        numbers = (stop - start) * kind.width, kind.dtype, kind.op
    if definition.rooted:
        numbers = *numbers, layout.root
    make = getattr(communicator.handle, _FUNCTIONS[definition.name])
    if definition.rooted and group.rank != layout.root:  # its input is not looked at
        return _Form(lambda at, to, where: make(to, to, *numbers, where), inside)
    return _Form(lambda at, to, where: make(at, to, *numbers, where), inside)
