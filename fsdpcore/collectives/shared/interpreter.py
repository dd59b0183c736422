"""Carries movements out: binds the names of parts to arrays, and copies and reduces.

Arrays that all ranks can see in place (those of ``backend.empty``; in threads, all) are published:
read and written where they are. Others are staged: they go through the staging buffers in pieces.
Up to ``SMALL`` bytes every input is staged as a whole, and every rank reduces all that it needs:
one step is all. The first step is the check that all ranks call the same (see ``region``). After
arrays were published, the last step tells that nobody uses them any more. Who leaves a call by an
error leaves arrays that others may still read, and an output that they may still write to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.movements import INPUT, OUTPUT, Movement
from fsdpcore.collectives.shared.program import Copy, Place, Schedule, Span, Work, schedule
from fsdpcore.collectives.shared.region import STAGING, SharedRegion, region_of
from fsdpcore.collectives.spec import Layout
from fsdpcore.core.buffers import Array
from fsdpcore.core.reductions import Reduction

# Up to here every rank reduces everything: cheaper than a second step.
SMALL = 8 * 1024
_EARLY = 8 << 20  # bytes; up to here a rank copies what it has itself while it waits

Find = Callable[[Span], Array]
# Writes the reduction of arrays to the one that it is given.
Write = Callable[[Array], Any]


class Plan(NamedTuple):
    """What one rank does, bound to arrays.

    Attributes:
        copies: places in the own flat output, and what goes there.
        steps: what else there is to do; they take the own flat output.
    """

    copies: list[tuple[Place, Array]]
    steps: list[Callable[[Array], Any]]

    def run(self, out: Array | None) -> None:
        """Do it; a rank that gets nothing has no output."""
        for place, array in self.copies:
            out[place] = array  # type: ignore[index]
        for step in self.steps:
            step(out)  # type: ignore[arg-type]

    def clear(self) -> None:
        """Let go of the arrays."""
        self.copies.clear()
        self.steps.clear()


def bind(
    moves: tuple[Sequence[Copy], Sequence[Work]],
    find: Find,
    reduce: Callable[[Sequence[Array]], Write],
    block: int,
) -> Plan:
    """Bind moves to arrays.

    Args:
        moves: what to do.
        find: gives the array of a span.
        reduce: makes what reduces arrays.
        block: elements that are reduced at once.
    """
    copies = [(place, find(source)) for place, source in moves[0]]
    steps: list[Callable[[Array], Any]] = []
    for place, spans, sources in moves[1]:
        targets, arrays = [find(span) for span in spans], [find(span) for span in sources]
        size = arrays[0].size
        for low in range(0, size, block):
            high = min(low + block, size)
            parts = [array[low:high] for array in arrays]
            write = reduce(parts) if len(parts) > 1 else partial(_copy, parts[0])
            more = [target[low:high] for target in targets]
            if place is None:
                steps.append(partial(_write, write, more))
            elif isinstance(place, slice):
                part = slice(place.start + low, place.start + high)
                steps.append(partial(_write_own, write, part, more))
            elif more or high - low < size:
                steps.append(partial(_write_own, write, slice(low, high), more))
            else:
                steps.append(write)
    return Plan(copies, steps)


def _copy(source: Array, target: Array) -> None:
    target[...] = source


def _write(write: Write, targets: Sequence[Array], out: Array) -> None:
    first, *others = targets
    write(first)
    for target in others:
        target[...] = first


def _write_own(write: Write, place: slice, copies: Sequence[Array], out: Array) -> None:
    target = out[place]
    write(target)
    for copy in copies:
        copy[...] = target


class Round(NamedTuple):
    """One step of a call whose inputs are staged in pieces, bound to staging buffers.

    Attributes:
        fills: what to fill with which part of the own input, before the step.
        copies: places in the own output, and what goes there.
        work: where reductions and other results go: places in the own output, or what to fill;
            with the sources: what others have staged, or parts of the own input.
    """

    fills: list[tuple[Array, slice]]
    copies: list[tuple[slice, Array]]
    work: list[tuple[slice | Array, list[slice | Array]]]

    def fill(self, source: Array | None) -> None:
        """Stage parts of the input."""
        for buffer, part in self.fills:
            buffer[...] = source[part]  # type: ignore[index]  # who has none fills nothing

    def run(self, source: Array | None, out: Array | None, reduction: Reduction | None) -> None:
        """Do what there is to do in the step."""
        for place, array in self.copies:
            out[place] = array  # type: ignore[index]
        for target, sources in self.work:
            arrays = [
                source[part] if isinstance(part, slice) else part  # type: ignore[index]
                for part in sources
            ]
            result = out[target] if isinstance(target, slice) else target  # type: ignore[index]
            if len(arrays) == 1:
                result[...] = arrays[0]
            else:
                reduction.reduce(arrays, result)  # type: ignore[union-attr]

    def clear(self) -> None:
        """Let go of the arrays."""
        self.fills.clear()
        self.copies.clear()
        self.work.clear()


def rounds(
    todo: Schedule, region: SharedRegion, me: int, dtype: np.dtype[Any], parity: int, largest: int
) -> Iterator[Round]:
    """Bind what goes through the staging buffers in pieces.

    Args:
        todo: what to do.
        region, me: the buffers, and whose are the own ones.
        dtype: of the arrays.
        parity: of the step in which the first pieces are read.
        largest: elements of the largest part of all.
    """
    buffers = region.staging(dtype, STAGING // dtype.itemsize)
    width = todo.width
    for low in range(0, max(1, largest), width):
        for number, moves in enumerate(todo.staged):
            staged, own = buffers[parity], buffers[1 - parity][me]
            made = Round([], [], [])
            for at, start, stop in todo.fills if not number else ():
                size = min(width, stop - start - low)
                if size > 0:
                    part = slice(start + low, start + low + size)
                    made.fills.append((staged[me][at : at + size], part))
            for start, stop, result, sources in moves:
                size = min(width, stop - start - low)
                if size <= 0:
                    continue
                parts = [
                    slice(at + low, at + low + size) if rank < 0 else staged[rank][at : at + size]
                    for rank, at in sources
                ]
                if result >= 0:
                    made.work.append((own[result : result + size], parts))
                    continue
                place, first = slice(start + low, start + low + size), parts[0]
                if len(parts) == 1 and not isinstance(first, slice):
                    made.copies.append((place, first))
                else:
                    made.work.append((place, parts))
            yield made
            parity = 1 - parity


class Call:
    """A movement of the arrays of one call."""

    def __init__(
        self,
        context: CollectiveContext,
        movement: Movement,
        layout: Layout,
        source: Array | None,
        out: Array | None,
    ) -> None:
        """Prepare a call.

        Args:
            context: of the group; it has a region.
            movement: what to move.
            layout: root, reduction and bounds.
            source, out: the flat input and output of this rank, as far as it has them. They may
                overlap as in ``Operation.own_parts`` only.
        """
        array = source if source is not None else out
        assert array is not None, "a rank that neither gives nor takes anything"
        region = region_of(context)
        assert region is not None, "chosen for groups that have one"
        self._context, self._region, self._layout = context, region, layout
        self._source, self._out, self._reduction = source, out, layout.reduction
        self._dtype = dtype = array.dtype
        self._schedule = schedule(
            movement,
            context.size,
            context.rank,
            layout.root,
            dtype.itemsize,
            array.size,
            tuple(layout.bounds),
            tuple(layout.arriving),
        )

    def run(self) -> None:
        """Carry the call out."""
        context, region, todo = self._context, self._region, self._schedule
        nbytes = todo.largest_input * self._dtype.itemsize
        if nbytes <= SMALL:
            self._at_once()
            return
        instead = context.staged is not None
        needed = todo.publishers.get(context.rank, ())
        seen = region.publish(
            self._source if INPUT in needed else None, self._out if OUTPUT in needed else None
        )
        if not (seen or instead):
            self._fill_first()
        # What the caches do not hold, all ranks read in the same order: memory is then read once.
        early = nbytes <= _EARLY and not instead
        region.sync(context, self._copy_own if early else None)
        self.after_publishing(copied=early)

    def run_unequal(self) -> None:
        """Do as ``run`` where ranks know the sizes of their own parts only: all is staged."""
        context, region = self._context, self._region
        if self._left_to_another():
            return
        largest = max(region.exchange(context, self._schedule.largest))
        self._fill_first()
        region.sync(context, self._copy_own)
        self._staged(largest)

    def after_publishing(self, *, copied: bool) -> None:
        """Go on after the step in which arrays were published, or staged.

        Args:
            copied: this rank has copied what it has itself.
        """
        context, region, todo = self._context, self._region, self._schedule
        seen = published(region, todo)
        if all(seen):
            copies, work = todo.published
            moves = copies if copied or self._in_place() else todo.in_order, work
            block = max(1, region.block // self._dtype.itemsize)
            bind(moves, self._find, self._reduce, block).run(self._out)
            region.sync(context)
            region.withdraw()
            return
        if self._left_to_another():
            return
        if any(seen):  # who has published has not staged; all do it in the same step
            self._fill_first()
            region.sync(context)
        if not copied:
            self._copy_own()
        self._staged(todo.largest)

    def _left_to_another(self) -> bool:
        """Have another algorithm do it all, where that is faster than staging arrays."""
        context = self._context
        other = context.otherwise()
        if other is None:
            return False
        definition = context.call.definition
        assert definition is not None
        definition.start(context, other, self._layout, self._source, self._out)
        return True

    def _at_once(self) -> None:
        region, dtype, source = self._region, self._dtype, self._source
        count = SMALL // dtype.itemsize
        if INPUT in self._schedule.publishers.get(self._context.rank, ()):
            assert source is not None
            region.to_fill(dtype, count)[: source.size] = source
        region.sync(self._context, self._copy_own)
        buffers = region.to_read(dtype, count)
        find = partial(in_buffers, buffers)
        bind(self._schedule.whole, find, self._reduce, count).run(self._out)

    def _reduce(self, arrays: Sequence[Array]) -> Write:
        assert self._reduction is not None
        return partial(self._reduction.reduce, arrays)

    def _find(self, span: Span) -> Array:
        """An array that is published, or an own one."""
        if span.rank != self._context.rank:
            return peer_view(self._context, self._region, self._dtype, span)
        array = self._source if span.array == INPUT else self._out
        assert array is not None
        return array[span.place]

    def _in_place(self) -> bool:
        """Whether what this rank has itself is where it belongs: no other overlap is allowed."""
        source, out = self._source, self._out
        return source is not None and out is not None and np.may_share_memory(source, out)

    def _copy_own(self) -> None:
        for place, source in self._schedule.own:
            assert self._source is not None
            assert self._out is not None
            target, part = self._out[place], self._source[source.place]
            if not np.may_share_memory(target, part):  # if so, it is in its place already
                np.copyto(target, part)

    def _rounds(self, parity: int, largest: int) -> Iterator[Round]:
        rank, dtype = self._context.rank, self._dtype
        return rounds(self._schedule, self._region, rank, dtype, parity, largest)

    def _fill_first(self) -> None:
        """Stage the first pieces, for the next step."""
        next(self._rounds((self._region.step + 1) & 1, 0)).fill(self._source)

    def _staged(self, largest: int) -> None:
        """Move pieces of all parts, of which the first ones are staged already."""
        for number, each in enumerate(self._rounds(self._region.step & 1, largest)):
            if number:
                each.fill(self._source)
                self._region.sync(self._context)
            each.run(self._source, self._out, self._reduction)


def published(region: SharedRegion, todo: Schedule) -> list[bool]:
    """Whether those that have to publish have done so in this step, one after the other."""
    return [
        region.published(rank, array)
        for rank, needed in todo.publishers.items()
        for array in needed
    ]


def in_buffers(buffers: Sequence[Array], span: Span) -> Array:
    """What was staged of an input as a whole."""
    return buffers[span.rank][span.place]


def peer_view(
    context: CollectiveContext, region: SharedRegion, dtype: np.dtype[Any], span: Span
) -> Array:
    """A part of an array that a rank has published in this step."""
    return region.peer_view(context, span.rank, dtype, span.length, span.array)[span.place]
