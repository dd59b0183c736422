"""The fast path: blocking calls of groups that share memory, with all that can be done before.

Moving a few bytes between two cores takes half a microsecond, less than it takes Python to look up
where they go. So once a kind of call has been settled, all that does not change from call to call
is bound here in one closure. It does what ``run`` does around a call. What it moves is the program
of ``interpreter``, bound to arrays once: of small inputs for each kind of call, of larger ones for
each set of arrays that the ranks have published. The ranks need not all come this way.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING

import numpy as np

from fsdpcore.collectives.movements import INPUT, OUTPUT
from fsdpcore.collectives.output import separated
from fsdpcore.collectives.shared.algorithm import NAME
from fsdpcore.collectives.shared.interpreter import (
    SMALL,
    Call,
    Plan,
    Round,
    bind,
    in_buffers,
    peer_view,
    published,
    rounds,
)
from fsdpcore.collectives.shared.program import Copy, Span, Work, schedule
from fsdpcore.collectives.shared.reducing import prepare
from fsdpcore.collectives.shared.region import NOT_PUBLISHED, Kept, SharedRegion, region_of
from fsdpcore.collectives.state import state_of
from fsdpcore.core.buffers import Array

if TYPE_CHECKING:
    from fsdpcore.collectives.context import CollectiveContext
    from fsdpcore.collectives.spec import CallSpec, FastPath, Operation
    from fsdpcore.comm.backend import Backend
    from fsdpcore.diagnostics.entries import OperationEntry

# The record of the call, and its flat input and output.
_Work = Callable[["OperationEntry", Array, Array], None]

_LARGEST = 4 << 20  # bytes that are published; there are steps for each 128 to 512 KiB
_LARGEST_STAGED = 32 << 20  # bytes that are staged; there are rounds for each 256 KiB and less
_PLANS = 64


class _Plans(dict[bytes, Plan]):
    """Plans by what all ranks have published; they hold parts of the memory."""


def fast_path_for(backend: Backend, call: CallSpec) -> FastPath | None:
    """Return the fast path of a call of a group that shares memory, if it has one."""
    context, definition = state_of(backend).context, call.definition
    region = None if context is None else region_of(context)
    # Where only the root gets a result, None is one.
    if context is None or region is None or definition is None or definition.to_root:
        return None
    if definition.movement is None:
        return None
    made = _FastCall(backend, context, region, call, definition)
    if call.choice.name != NAME:
        return _around(backend, call, made.ordinary)
    if call.nbytes <= SMALL:
        return _around(backend, call, made.small())
    if region.addressed and call.nbytes <= _LARGEST_STAGED:
        return _around(backend, call, made.large())
    return _around(backend, call, made.ordinary)


def _around(backend: Backend, call: CallSpec, work: _Work) -> FastPath:
    """Return ``work`` with what stands before and after it in every call."""
    root, record, begin = backend.root, call.record, backend.root.recorder.begin
    order = backend.order
    acquire, release = order.lock.acquire, order.lock.release
    dtype, shape = call.dtype, call.out_shape
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
            executor = order.executor
            busy = executor is not None and not executor.idle
            if busy or order.closed or root.failure is not None:
                return None
            before = order.issued
            try:
                order.issued = sequence = before + 1
                entry = begin(order, sequence, record)
                work(entry, source, out)
                entry.end = monotonic_ns()
            except BaseException as error:
                order.abandon(before, call.operation, error)
                raise
        finally:
            release()
        return out

    return go


class _FastCall:
    """What is known of one kind of call."""

    def __init__(
        self,
        backend: Backend,
        context: CollectiveContext,
        region: SharedRegion,
        call: CallSpec,
        definition: Operation,
    ) -> None:
        assert call.dtype is not None
        self._order, self._limit = backend.order, backend.timeout
        self._context, self._region, self._call = context, region, call
        self._definition, self._dtype = definition, call.dtype
        self._schedule = schedule(
            definition.movement,
            context.size,
            context.rank,
            call.root,
            call.dtype.itemsize,
            math.prod(call.shape),
            tuple(call.layout.bounds),
            tuple(call.layout.arriving),
        )

    def _begin(self) -> None:
        """Begin the call, if that was not done: only who has to wait needs its deadline."""
        context, sequence = self._context, self._order.issued
        if context.sequence != sequence:
            context.begin(self._call, sequence, self._limit, False)

    def ordinary(self, entry: OperationEntry, source: Array, out: Array) -> None:
        """Any algorithm, for arrays of any size."""
        context, call = self._context, self._call
        self._begin()
        context.entry = entry
        try:
            if not call.choice.agrees:
                context.rows = context.agree()
            flat = source.reshape(-1)
            flat_out = flat if source is out else out.reshape(-1)
            flat = separated(flat, flat_out, self._definition, call.layout, context.rank)
            self._definition.start(context, call.choice, call.layout, flat, flat_out)
        except BaseException as error:
            context.broke(entry, error)
            raise
        finally:
            context.release()

    def _bind(
        self, moves: tuple[list[Copy], list[Work]], find: Callable[[Span], Array], nbytes: int
    ) -> Plan:
        def reduce(arrays: Sequence[Array]) -> Callable[[Array], None]:
            assert self._call.reduction is not None
            return prepare(self._context, self._call.reduction, arrays)

        return bind(moves, find, reduce, max(1, nbytes // self._dtype.itemsize))

    def small(self) -> _Work:
        """The way of inputs that are staged as a whole: one step."""
        region, call, context, begin = self._region, self._call, self._context, self._begin
        me, digest, enter, todo = context.rank, call.digest, region.enter, self._schedule
        copies, work_ = todo.whole
        stages = bool(todo.own) or INPUT in todo.publishers.get(me, ())
        staging = region.staging(self._dtype, math.prod(call.shape))
        plans = [
            self._bind((todo.own + copies, work_), partial(in_buffers, buffers), SMALL)
            for buffers in staging
        ]
        kept = region.keep(plans)

        def work(entry: OperationEntry, source: Array, out: Array) -> None:
            try:
                parity = (region.step + 1) & 1
                if stages:
                    staging[parity][me][...] = source if source.ndim == 1 else source.reshape(-1)
                enter(digest, context, begin)
                flat_out = out if out.ndim == 1 else out.reshape(-1)
                copies, steps = kept[parity]
                for place, array in copies:
                    flat_out[place] = array
                for step in steps:
                    step(flat_out)
            except BaseException as error:
                begin()
                context.broke(entry, error)
                raise

        return work

    def large(self) -> _Work:
        """The way of arrays that all ranks see in place, or that no rank sees.

        A loop brings the same arrays again and again. So once all ranks have published some, a rank
        keeps what it did with them, under what the ranks have written into their flags.
        """
        region, call, context, begin = self._region, self._call, self._context, self._begin
        digest, enter = call.digest, region.enter
        own_places, all_places = region.own_places, region.all_places
        own = [(place, span.place) for place, span in self._schedule.own]
        nothing = np.array([*NOT_PUBLISHED, *NOT_PUBLISHED], np.uint64)
        nobody = nothing.tobytes() * context.size
        plans = _Plans()
        region.empty_at_close(plans)
        instead = None if call.choice.staged else nothing
        # What came last time.
        kept_source: Callable[[], Array | None] = _nothing
        kept_out: Callable[[], Array | None] = _nothing
        kept_places: Array | None = None
        in_place = False

        def work(entry: OperationEntry, source: Array, out: Array) -> None:
            nonlocal kept_source, kept_out, kept_places, in_place
            if kept_source() is source and kept_out() is out:
                places = kept_places
            else:
                places = kept_places = self._places(source, out, instead)
                kept_source, kept_out = weakref.ref(source), weakref.ref(out)
                in_place = np.may_share_memory(source, out)
            if places is None:
                self.ordinary(entry, source, out)
                return
            try:
                parity = (region.step + 1) & 1
                own_places[parity][:] = places
                flat = source if source.ndim == 1 else source.reshape(-1)
                flat_out = out if out.ndim == 1 else out.reshape(-1)
                if places is nothing:
                    self._staged[parity][0].fill(flat)
                enter(digest, context, begin)
                if not in_place:
                    for place, part in own:
                        flat_out[place] = flat[part]
                key = all_places[parity]()
                plan = plans.get(key)
                if plan is None:
                    if key == nobody and instead is not None:
                        self._run(self._staged[parity], flat, flat_out)
                        return
                    begin()
                    if not all(published(region, self._schedule)):
                        self._continue(entry, flat, flat_out)
                        return
                    if len(plans) >= _PLANS:
                        # The newest: arrays that take turns would lose every older one.
                        plans.popitem()
                    find = partial(peer_view, context, region, self._dtype)
                    plan = self._bind(self._schedule.published, find, region.block)
                    plans[key] = plan
                for place, array in plan.copies:
                    flat_out[place] = array
                for step in plan.steps:
                    step(flat_out)
                enter(digest, context, begin)
            except BaseException as error:
                begin()
                context.broke(entry, error)
                raise

        return work

    @functools.cached_property
    def _staged(self) -> Kept:
        """All that goes through the staging buffers, for a first step of either parity."""
        region, todo, me = self._region, self._schedule, self._context.rank
        return region.keep(
            region.keep(rounds(todo, region, me, self._dtype, parity, todo.largest))
            for parity in (0, 1)
        )

    def _run(self, staged: Sequence[Round], source: Array, out: Array) -> None:
        """Stage all but the first pieces, which are staged already, and move all."""
        context, call = self._context, self._call
        for number, each in enumerate(staged):
            if number:
                each.fill(source)
                self._region.enter(call.digest, context, self._begin)
            each.run(source, out, call.reduction)

    def _places(self, source: Array, out: Array, instead: Array | None) -> Array | None:
        """Where the arrays lie that this rank publishes.

        ``instead`` if the others do not see them; None if they overlap, or are too large to keep
        what is done with them.
        """
        flat = source.reshape(-1)
        flat_out = flat if source is out else out.reshape(-1)
        found = separated(flat, flat_out, self._definition, self._call.layout, self._context.rank)
        if found is not flat and found is not flat_out:
            return None
        words: list[int] = []
        needed = self._schedule.publishers.get(self._context.rank, ())
        for which, array in ((INPUT, source), (OUTPUT, out)):
            place = self._region.place(array) if which in needed else NOT_PUBLISHED
            if place is None:
                return instead
            words += place
        keeps = not needed or self._call.nbytes <= _LARGEST
        return np.array(words, np.uint64) if keeps else None

    def _continue(self, entry: OperationEntry, source: Array, out: Array) -> None:
        """Carry a call out the ordinary way, after its first step."""
        context = self._context
        context.entry = entry
        movement, layout = self._definition.movement, self._call.layout
        assert movement is not None, "the algorithm was chosen for what it moves"
        try:
            Call(context, movement, layout, source, out).after_publishing(copied=True)
        finally:
            context.release()


def _nothing() -> Array | None:
    """Stand in for a weak reference to an array."""
    return None
