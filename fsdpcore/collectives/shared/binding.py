"""Moves bound to arrays: to those that ranks have published, or to staging buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fsdpcore.collectives.shared.reducing import Reduce, prepare
from fsdpcore.collectives.shared.region import SharedRegion
from fsdpcore.collectives.shared.schedule import (
    ArraySpan,
    BlockMove,
    OutputCopy,
    Place,
    RankSchedule,
)
from fsdpcore.core.buffers import Array
from fsdpcore.core.reductions import Reduction

if TYPE_CHECKING:
    from fsdpcore.collectives.context import CollectiveContext

Find = Callable[[ArraySpan], Array]


class BoundStep(NamedTuple):
    """What one rank does in one step, bound to arrays.

    Attributes:
        fills: what to fill with which part of the own input, before the step.
        copies: places in the own flat output, and what goes there.
        writes: what else there is to do; they take the own flat output.
        pieces: reductions and copies of pieces: where they go, places in the own output or what to
            fill (several for prefixes); with the sources: what others have staged, or parts of the
            own input.
    """

    fills: list[tuple[Array, slice]]
    copies: list[tuple[Place, Array]]
    writes: list[Callable[[Array], Any]]
    pieces: list[tuple[list[slice | Array], list[slice | Array]]]

    def fill(self, source: Array | None) -> None:
        """Stage parts of the input."""
        for buffer, part in self.fills:
            buffer[...] = source[part]  # type: ignore[index]  # who has none fills nothing

    def run(self, source: Array | None, out: Array | None, reduction: Reduction | None) -> None:
        """Do what there is to do in the step; a rank that gets nothing has no output."""
        for place, array in self.copies:
            out[place] = array  # type: ignore[index]
        for write in self.writes:
            write(out)  # type: ignore[arg-type]
        for targets, sources in self.pieces:
            arrays = [
                source[part] if isinstance(part, slice) else part  # type: ignore[index]
                for part in sources
            ]
            results = [
                out[part] if isinstance(part, slice) else part  # type: ignore[index]
                for part in targets
            ]
            if len(results) > 1:
                reduction.scan(arrays, results)  # type: ignore[union-attr]
            elif len(arrays) == 1:
                results[0][...] = arrays[0]
            else:
                reduction.reduce(arrays, results[0])  # type: ignore[union-attr]

    def clear(self) -> None:
        """Let go of the arrays."""
        for each in self:
            each.clear()


def bind(
    moves: tuple[Sequence[OutputCopy], Sequence[BlockMove]],
    find: Find,
    context: CollectiveContext,
    reduction: Reduction | None,
    block: int,
) -> BoundStep:
    """Bind moves to arrays.

    Args:
        moves: what to do.
        find: gives the array of a span.
        context: its scratch memory is used.
        reduction: of the call, if it has one.
        block: elements that are reduced at once.
    """
    copies = [(place, find(source)) for place, source in moves[0]]
    writes: list[Callable[[Array], Any]] = []
    for place, spans, sources, prefixes in moves[1]:
        targets, arrays = [find(span) for span in spans], [find(span) for span in sources]
        if isinstance(place, slice):
            size = place.stop - place.start
        else:  # no array gives the size of rank 0's output in exscan, which is filled at once
            size = next((array.size for array in (*arrays, *targets)), 1)
        for low in range(0, size, block):
            high = min(low + block, size)
            parts = arrays if size <= block else [array[low:high] for array in arrays]
            more = targets if size <= block else [target[low:high] for target in targets]
            if prefixes:
                assert reduction is not None
                writes.append(partial(_scan, reduction, parts, more))
                continue
            write = _reduce(context, reduction, parts)
            if place is None:
                writes.append(partial(_write, write, more))
            elif isinstance(place, slice):
                part = slice(place.start + low, place.start + high)
                writes.append(partial(_write_own, write, part, more))
            elif more or high - low < size:
                writes.append(partial(_write_own, write, slice(low, high), more))
            else:
                writes.append(write)
    return BoundStep([], copies, writes, [])


def _reduce(
    context: CollectiveContext, reduction: Reduction | None, parts: Sequence[Array]
) -> Reduce:
    if len(parts) == 1:
        return partial(_copy, parts[0])
    assert reduction is not None, "several sources are reduced"
    return prepare(context, reduction, parts)


def _scan(reduction: Reduction, parts: Sequence[Array], targets: Sequence[Array], out: Any) -> None:
    reduction.scan(parts, targets)


def _copy(source: Array, target: Array) -> None:
    target[...] = source


def _write(write: Reduce, targets: Sequence[Array], out: Array) -> None:
    first, *others = targets
    write(first)
    for target in others:
        target[...] = first


def _write_own(write: Reduce, place: slice, copies: Sequence[Array], out: Array) -> None:
    target = out[place]
    write(target)
    for copy in copies:
        copy[...] = target


def staged_steps(
    todo: RankSchedule,
    region: SharedRegion,
    me: int,
    dtype: np.dtype[Any],
    step: int,
    largest: int,
) -> Iterator[BoundStep]:
    """Bind what goes through the staging buffers in pieces.

    Args:
        todo: what to do.
        region, me: the buffers, and whose are the own ones.
        dtype: of the arrays.
        step: the number of the one in which the first pieces are read.
        largest: elements of the largest part of all.
    """
    parity, width = step & 1, todo.width
    start = (step >> 1) % todo.turns * todo.turn_size
    buffers = [
        [buffer[start:] for buffer in ranks]
        for ranks in region.staging(dtype, region.staging_bytes // dtype.itemsize)
    ]
    for low in range(0, max(1, largest), width):
        for number, moves in enumerate(todo.staged):
            staged, own = buffers[parity], buffers[1 - parity][me]
            made = BoundStep([], [], [], [])
            for at, start, stop in todo.fills if not number else ():
                size = min(width, stop - start - low)
                if size > 0:
                    part = slice(start + low, start + low + size)
                    made.fills.append((staged[me][at : at + size], part))
            for start, stop, results, sources in moves:
                size = min(width, stop - start - low)
                if size <= 0:
                    continue
                parts = [
                    slice(at + low, at + low + size) if rank < 0 else staged[rank][at : at + size]
                    for rank, at in sources
                ]
                if results:
                    made.pieces.append(([own[at : at + size] for at in results], parts))
                    continue
                place, first = slice(start + low, start + low + size), parts[0]
                if len(parts) == 1 and not isinstance(first, slice):
                    made.copies.append((place, first))
                else:
                    made.pieces.append(([place], parts))
            yield made
            parity = 1 - parity
