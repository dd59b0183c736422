"""Carries movements out: binds the names of parts to arrays, and copies and reduces.

Arrays that all ranks can see in place (those of ``backend.empty``; in threads, all) are published:
read and written where they are. Others are staged: they go through the staging buffers in pieces.
Up to ``SMALL`` bytes every input is staged as a whole, and every rank reduces all that it needs:
one step is all. The first step is the check that all ranks call the same (see ``region``). After
arrays were published, the last step tells that nobody uses them any more. Who leaves a call by an
error leaves arrays that others may still read, and an output that they may still write to.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.movements import INPUT, OUTPUT, Movement
from fsdpcore.collectives.output import separated
from fsdpcore.collectives.shared.binding import BoundStep, Find, bind, staged_steps
from fsdpcore.collectives.shared.region import NOT_PUBLISHED, region_of
from fsdpcore.collectives.shared.schedule import ArraySpan, BlockMove, OutputCopy, schedule
from fsdpcore.collectives.spec import Layout, Operation
from fsdpcore.core.buffers import Array

# Up to here every rank reduces everything: cheaper than a second step.
SMALL = 8 * 1024
_EARLY = 8 << 20  # bytes; up to here a rank copies what it has itself while it waits
_LARGEST = 4 << 20  # bytes that are published; there are moves for each 128 to 512 KiB
_LARGEST_STAGED = 32 << 20  # bytes that are staged; there are steps for each 256 KiB and less
_PLANS = 64
_MOVEMENTS = 64  # kinds that a group keeps


class _Plans(dict[bytes, BoundStep]):
    """What to do, by what all ranks have published; it holds parts of the memory."""


class _Staged(dict[int, list[BoundStep]]):
    """What to do with what is staged, by turn; it holds parts of the memory."""


# Begins the call, if that was not done: only who has to wait needs its deadline.
Begin = Callable[[], None]
# Moves the data of a call: the digest, the input and the output of this rank.
Way = Callable[[int, "Begin | None", "Array | None", "Array | None"], None]


class BoundMovement:
    """A movement of arrays of one dtype and size, with all that can be prepared done once.

    Attributes:
        run: carries a call out; ``context`` has begun it, or does when ``begin`` is called. If the
            operation is known, the arrays are contiguous, of any shape, and may overlap in any way.
            If not, they are flat and may overlap as in ``Operation.own_parts`` only.
    """

    def __init__(
        self,
        context: CollectiveContext,
        movement: Movement,
        layout: Layout,
        dtype: np.dtype[Any],
        count: int,
        *,
        stages: bool,
        operation: Operation | None = None,
    ) -> None:
        """Prepare calls.

        Args:
            context: of the group; it has a region.
            movement: what to move.
            layout: root, reduction and bounds.
            dtype: of the arrays.
            count: elements of the input, or of the output of a rank that has none.
            stages: arrays that are not published are staged; if not, another algorithm moves them.
            operation: says which overlap of the arrays is allowed; None if they overlap as allowed.
        """
        region = region_of(context)
        assert region is not None, "chosen for groups that have one"
        self._context, self._region, self._layout = context, region, layout
        self._dtype, self._count, self._stages = dtype, count, stages
        self._operation = operation
        self._schedule = todo = schedule(
            movement,
            context.size,
            context.rank,
            layout.root,
            dtype.itemsize,
            count,
            tuple(layout.bounds),
            tuple(layout.arriving),
            region.turns,
        )
        self._nbytes = todo.largest_input * dtype.itemsize
        self._needed = todo.publishers.get(context.rank, set())
        self.run: Way
        if self._nbytes <= SMALL:
            self.run = self._small()
        elif region.addressed:
            self.run = self._large()
        else:
            self.run = self._among_threads

    def _small(self) -> Way:
        """The way of inputs that are staged as a whole: one step."""
        region, context, todo, me = self._region, self._context, self._schedule, self._context.rank
        enter, dtype, shaped = region.enter, self._dtype, self._operation is not None
        stages = bool(todo.own) or INPUT in self._needed
        staging = region.staging(dtype, SMALL // dtype.itemsize)
        copies, work = todo.whole
        moves = todo.own + copies, work
        steps = region.keep(
            self._bind(moves, partial(_in_buffers, buffers), SMALL) for buffers in staging
        )
        own = region.keep(buffers[me][: self._count] for buffers in staging)

        def run(digest: int, begin: Begin | None, source: Array | None, out: Array | None) -> None:
            parity = (region.step + 1) & 1
            if stages:
                assert source is not None
                own[parity][...] = source if source.ndim == 1 else source.reshape(-1)
            enter(digest, context, begin)
            _, copies, writes, _ = steps[parity]
            if out is not None:
                flat = out if out.ndim == 1 or not shaped else out.reshape(-1)
                for place, array in copies:
                    flat[place] = array
                for write in writes:
                    write(flat)

        return run

    def _large(self) -> Way:
        """The way of arrays that all ranks see in place, or that no rank sees.

        A loop brings the same arrays again and again. So once all ranks have published some, a rank
        keeps what it did with them, under what the ranks have written into their flags.
        """
        region, context, todo = self._region, self._context, self._schedule
        enter, own_places, all_places = region.enter, region.own_places, region.all_places
        own = [(place, span.place) for place, span in todo.own]
        nothing = np.array([*NOT_PUBLISHED, *NOT_PUBLISHED], np.uint64)
        nobody = nothing.tobytes() * context.size
        plans = _Plans()
        region.empty_at_close(plans)
        stages, early = self._stages, self._nbytes <= _EARLY
        shaped = self._operation is not None
        # What came last time.
        kept_source: Callable[[], Array | None] = _nothing
        kept_out: Callable[[], Array | None] = _nothing
        places = nothing
        apart = in_place = False

        def run(digest: int, begin: Begin | None, source: Array | None, out: Array | None) -> None:
            nonlocal kept_source, kept_out, places, apart, in_place
            if kept_source() is not source or kept_out() is not out:
                apart, in_place = self._overlap(source, out)
                places = self._places(source, out, nothing) if apart else nothing
                kept_source = _nothing if source is None else weakref.ref(source)
                kept_out = _nothing if out is None else weakref.ref(out)
            parity = (region.step + 1) & 1
            own_places[parity][:] = places
            flat = source if source is None or source.ndim == 1 else source.reshape(-1)
            flat_out = out if out is None or out.ndim == 1 or not shaped else out.reshape(-1)
            if not apart:
                assert flat is not None
                flat = flat.copy()
            if places is nothing and stages:
                self._first().fill(flat)
            enter(digest, context, begin)
            key = all_places[parity]()
            plan = plans.get(key)
            if plan is None:
                if not (stages and key == nobody):
                    if begin is not None:
                        begin()
                    plan = self._published(plans, key, flat, flat_out, early or in_place)
                if plan is None:
                    self._unpublished(digest, begin, flat, flat_out, key == nobody, in_place)
                    return
            if early and not in_place and flat_out is not None:
                for place, part in own:
                    flat_out[place] = flat[part]  # type: ignore[index]  # its own part
            for place, array in plan.copies:
                flat_out[place] = array  # type: ignore[index]  # who gets nothing copies nothing
            for write in plan.writes:
                write(flat_out)  # type: ignore[arg-type]
            enter(digest, context, begin)

        return run

    def _among_threads(
        self, digest: int, begin: Begin | None, source: Array | None, out: Array | None
    ) -> None:
        """The way of threads, which see all arrays in place."""
        region, context, todo, needed = self._region, self._context, self._schedule, self._needed
        shaped = self._operation is not None
        flat = source if source is None or source.ndim == 1 else source.reshape(-1)
        flat_out = out if out is None or out.ndim == 1 or not shaped else out.reshape(-1)
        apart, in_place = self._overlap(flat, flat_out)
        if not apart:
            assert flat is not None
            flat = flat.copy()
        region.publish(flat if INPUT in needed else None, flat_out if OUTPUT in needed else None)
        copied = in_place or self._nbytes <= _EARLY
        copy = todo.own and copied and not in_place
        region.enter(
            digest, context, begin, partial(self._copy_own, flat, flat_out) if copy else None
        )
        self._bind_published(flat, flat_out, copied).run(flat, flat_out, None)
        if region.moved is not None:
            region.moved = sum(array.nbytes for array in (flat, flat_out) if array is not None)
        region.enter(digest, context, begin)
        region.withdraw()

    def run_unequal(self, digest: int, source: Array, out: Array) -> None:
        """Do as ``run`` where ranks know the sizes of their own parts only: all is staged."""
        if not self._stages:
            self._leave_to_another(source, out)
            return
        region, context = self._region, self._context
        largest = max(region.exchange(context, self._schedule.largest))
        next(self._staged_steps(region.step + 1, 0)).fill(source)
        region.enter(digest, context, None, partial(self._copy_own, source, out))
        self._move_staged(digest, None, source, out, self._staged_steps(region.step, largest))

    # Published.

    def _overlap(self, source: Array | None, out: Array | None) -> tuple[bool, bool]:
        """Whether arrays overlap as they may or not at all, and whether they overlap so."""
        if source is None or out is None or not np.may_share_memory(source, out):
            return True, False
        if self._operation is None:
            return True, True
        flat, flat_out = source.reshape(-1), out.reshape(-1)
        found = separated(flat, flat_out, self._operation, self._layout, self._context.rank)
        apart = found is flat or found is flat_out
        return apart, apart

    def _places(self, source: Array | None, out: Array | None, nothing: Array) -> Array:
        """Where the arrays lie that this rank publishes; ``nothing`` if the others cannot see."""
        words: list[int] = []
        for which, array in ((INPUT, source), (OUTPUT, out)):
            place: tuple[int, int] | None = NOT_PUBLISHED
            if which in self._needed:
                assert array is not None
                place = self._region.place(array) if array.size else (0, 0)
            if place is None:
                return nothing
            words += place
        return np.array(words, np.uint64) if self._needed else nothing

    def _published(
        self, plans: _Plans, key: bytes, source: Array | None, out: Array | None, copied: bool
    ) -> BoundStep | None:
        """What to do with what all ranks have published; None if some have not."""
        region = self._region
        for rank, needed in self._schedule.publishers.items():
            if not all(region.published(rank, array) for array in needed):
                return None
        if self._nbytes > _LARGEST:
            return self._bind_published(source, out, copied)
        if len(plans) >= _PLANS:
            # The newest: arrays that take turns would lose every older one.
            plans.popitem()
        plan = plans[key] = self._bind(self._schedule.published, self._peer_view, region.block)
        return plan

    def _bind_published(self, source: Array | None, out: Array | None, copied: bool) -> BoundStep:
        """Bind what was published for one call.

        Args:
            source, out: of this rank.
            copied: it copies what it has itself before. If not, that has its turn among the rest:
                what the caches do not hold, all ranks read in the same order, so once.
        """
        me = self._context.rank

        def find(span: ArraySpan) -> Array:
            if span.rank != me:
                return self._peer_view(span)
            array = source if span.array == INPUT else out
            assert array is not None
            return array[span.place]

        copies, work = self._schedule.published
        moves = copies if copied else self._schedule.in_order, work
        return self._bind(moves, find, self._region.block)

    def _peer_view(self, span: ArraySpan) -> Array:
        """A part of an array that a rank has published in this step."""
        whole = self._region.peer_view(
            self._context, span.rank, self._dtype, span.length, span.array
        )
        return whole[span.place]

    def _bind(
        self, moves: tuple[Sequence[OutputCopy], Sequence[BlockMove]], find: Find, nbytes: int
    ) -> BoundStep:
        context, reduction = self._context, self._layout.reduction
        return bind(moves, find, context, reduction, max(1, nbytes // self._dtype.itemsize))

    # Staged.

    @functools.cached_property
    def _staged(self) -> _Staged:
        staged = _Staged()
        self._region.empty_at_close(staged)
        return staged

    def _steps(self, number: int) -> Iterable[BoundStep]:
        """All that goes through the staging buffers, if step ``number`` reads the first pieces."""
        if self._nbytes > _LARGEST_STAGED:
            return self._staged_steps(number, self._schedule.largest)
        turn = number % (2 * self._schedule.turns)
        found = self._staged.get(turn)
        if found is None:
            found = list(self._staged_steps(turn, self._schedule.largest))
            self._staged[turn] = found
        return found

    def _staged_steps(self, number: int, largest: int) -> Iterator[BoundStep]:
        rank = self._context.rank
        return staged_steps(self._schedule, self._region, rank, self._dtype, number, largest)

    def _first(self) -> BoundStep:
        """What to stage first, in the step that comes."""
        return next(iter(self._steps(self._region.step + 1)))

    def _unpublished(
        self,
        digest: int,
        begin: Begin | None,
        source: Array | None,
        out: Array | None,
        nobody: bool,
        in_place: bool,
    ) -> None:
        """Go on after the step in which some have not published their arrays."""
        region = self._region
        if not self._stages:
            self._leave_to_another(source, out)
            return
        if not nobody:  # who has published has not staged; all do it in the same step
            self._first().fill(source)
            region.enter(digest, self._context, begin)
        if not in_place:
            self._copy_own(source, out)
        self._move_staged(digest, begin, source, out, self._steps(region.step))

    def _move_staged(
        self,
        digest: int,
        begin: Begin | None,
        source: Array | None,
        out: Array | None,
        steps: Iterable[BoundStep],
    ) -> None:
        """Move pieces of all parts, of which the first ones are staged already."""
        for number, each in enumerate(steps):
            if number:
                each.fill(source)
                self._region.enter(digest, self._context, begin)
            each.run(source, out, self._layout.reduction)

    def _leave_to_another(self, source: Array | None, out: Array | None) -> None:
        """Have another algorithm do it all, where that is faster than staging arrays."""
        context = self._context
        other, definition = context.use_fallback(), context.spec.definition
        assert other is not None
        assert definition is not None
        try:
            other.start(context, definition, self._layout, source, out)
        finally:
            context.release()

    def _copy_own(self, source: Array | None, out: Array | None) -> None:
        for place, span in self._schedule.own:
            assert source is not None
            assert out is not None
            target, part = out[place], source[span.place]
            if not np.may_share_memory(target, part):  # if so, it is in its place already
                target[...] = part


def _bound_movement(
    context: CollectiveContext,
    movement: Movement,
    layout: Layout,
    source: Array | None,
    out: Array | None,
) -> BoundMovement:
    """Return what moves such arrays; the region keeps it for the next call of the kind."""
    array = source if source is not None else out
    assert array is not None, "a rank that neither gives nor takes anything"
    region, stages = region_of(context), context.fallback is None
    assert region is not None, "chosen for groups that have one"
    root, reduction, bounds, arriving = layout
    key = (movement, root, reduction, tuple(bounds), tuple(arriving), array.dtype, array.size)
    found: BoundMovement | None = region.movements.get((key, stages))
    if found is None:
        found = BoundMovement(context, movement, layout, array.dtype, array.size, stages=stages)
        if len(region.movements) >= _MOVEMENTS:
            region.movements.clear()
        region.movements[key, stages] = found
    return found


def move(
    context: CollectiveContext,
    movement: Movement,
    layout: Layout,
    source: Array | None,
    out: Array | None,
) -> None:
    """Carry out a movement of the flat arrays of this rank, as far as it has them.

    They may overlap as in ``Operation.own_parts`` only.
    """
    made = _bound_movement(context, movement, layout, source, out)
    if layout.arriving and context.spec.ragged:  # the ranks have different ``bounds``
        assert source is not None
        assert out is not None
        made.run_unequal(context.spec.digest, source, out)
    else:
        made.run(context.spec.digest, None, source, out)


def _in_buffers(buffers: Sequence[Array], span: ArraySpan) -> Array:
    """What was staged of an input as a whole."""
    return buffers[span.rank][span.place]


def _nothing() -> Array | None:
    """Stand in for a weak reference to an array."""
    return None
