"""The fast path: blocking calls of groups that share memory, with all that can be done before.

Moving a few bytes between two cores takes half a microsecond, less than it takes Python to look up
where they go. So once a kind of call has been settled, all that does not change from call to call
is bound here in one closure. It does what ``run`` does around a call. What moves the data is the
``BoundMovement`` that the ordinary way takes, too. The ranks need not all come this way.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from fsdpcore.collectives.output import separated
from fsdpcore.collectives.shared.algorithm import NAME
from fsdpcore.collectives.shared.interpreter import Begin, BoundMovement, Way
from fsdpcore.collectives.shared.region import SharedRegion, region_of
from fsdpcore.collectives.spec import DECLINED
from fsdpcore.collectives.state import state_of
from fsdpcore.core.buffers import Array

if TYPE_CHECKING:
    from fsdpcore.collectives.context import CollectiveContext
    from fsdpcore.collectives.spec import CallSpec, Declined, FastPath, Operation
    from fsdpcore.comm.backend import Backend


def fast_path_for(backend: Backend, spec: CallSpec) -> FastPath | None:
    """Return the fast path of a call of a group that shares memory, if it has one."""
    if backend.root.reduce_rate is not None:  # the ordinary way lets the time of reductions pass
        return None
    context, definition = state_of(backend).context, spec.definition
    region = None if context is None else region_of(context)
    if context is None or region is None:
        return None
    if definition is None:  # a barrier: other calls without one choose late
        return _around(backend, context, spec, False, _meeting(context, region))
    gives = definition.gives(context.rank, spec.layout)
    if spec.choice.name != NAME:
        return _around(backend, context, spec, gives, _ordinary(context, spec, definition))

    def bind(digest: int, begin: Begin | None, source: Array | None, out: Array | None) -> None:
        """The way of the second call: many kinds of calls, as of ragged sizes, come only once."""
        assert spec.dtype is not None
        made = BoundMovement(
            context,
            definition.movement,
            spec.layout,
            spec.dtype,
            math.prod(spec.shape),
            stages=spec.choice.fallback is None,
            operation=definition,
        )
        spec.fast_path = _around(backend, context, spec, gives, made.run)
        made.run(digest, begin, source, out)

    return _around(backend, context, spec, gives, bind)


def _around(
    backend: Backend, context: CollectiveContext, spec: CallSpec, gives: bool, move: Way
) -> FastPath:
    """Return ``move`` with what stands before and after it in every call."""
    root, record, begin_entry = backend.root, spec.record, backend.root.recorder.begin
    order, digest, limit = backend.order, spec.digest, backend.timeout
    lock, now = order.lock, root.clock.nanoseconds
    dtype, shape = spec.dtype, spec.out_shape
    empty, ndarray = np.empty, np.ndarray

    def begin() -> None:
        """Begin the call, if that was not done: only who has to wait needs its deadline."""
        sequence = order.issued
        if context.sequence != sequence:
            context.begin(spec, sequence, limit, False)

    def go(source: Array | None, out: Array | None) -> Array | Declined | None:
        if not gives:
            out = None
        elif out is None:
            out = empty(shape, dtype)
        elif not (
            type(out) is ndarray and out.shape == shape and out.dtype is dtype and out.flags.carray
        ):
            return DECLINED
        if lock.locked():
            return DECLINED
        with lock:  # not acquire(False): Ctrl-C could come between that and a try
            executor = order.executor
            busy = executor is not None and not executor.idle
            if busy or order.closed or root.failure is not None:
                return DECLINED
            before = order.issued
            try:
                order.issued = sequence = before + 1
                context.entry = entry = begin_entry(order, sequence, record)
                try:
                    move(digest, begin, source, out)
                except BaseException as error:
                    begin()
                    context.broke(entry, error)
                    raise
                entry.end = now()
            except BaseException as error:
                order.abandon(before, spec.operation, error)
                raise
        return out

    return go


def _meeting(context: CollectiveContext, region: SharedRegion) -> Way:
    """Nothing but the step in which the ranks meet."""
    enter = region.enter

    def run(digest: int, begin: Begin | None, source: Array | None, out: Array | None) -> None:
        enter(digest, context, begin)

    return run


def _ordinary(context: CollectiveContext, spec: CallSpec, definition: Operation) -> Way:
    """Any other algorithm, for arrays of any size."""

    def run(digest: int, begin: Begin | None, source: Array | None, out: Array | None) -> None:
        assert begin is not None
        assert source is not None
        begin()
        try:
            context.enter()
            flat, flat_out = source.reshape(-1), None
            if out is not None:
                flat_out = flat if source is out else out.reshape(-1)
                flat = separated(flat, flat_out, definition, spec.layout, context.rank)
            spec.choice.start(context, definition, spec.layout, flat, flat_out)
        finally:
            context.release()

    return run
