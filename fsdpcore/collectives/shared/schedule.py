"""Where the parts lie that one rank copies and reduces in calls of one kind.

A ``RankSchedule`` is a ``Program`` whose parts have places. Those depend on the sizes of a call.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property, lru_cache
from types import EllipsisType
from typing import NamedTuple

from fsdpcore.collectives.movements import INPUT, OUTPUT, ArrayPart, Move, Movement
from fsdpcore.collectives.shared.program import RESULT, Exchange, exchange, is_own, program
from fsdpcore.collectives.shared.region import staging_bytes
from fsdpcore.core.buffers import bounds_of, split_sizes

_LINE = 64  # bytes; slots of a staging buffer begin at multiples of it

# All of an array is written to faster than a slice that is as long.
Place = slice | EllipsisType


class ArraySpan(NamedTuple):
    """Where a part lies.

    Attributes:
        array, rank: of the part.
        place: in the array.
        length: elements of the whole array.
    """

    array: int
    rank: int
    place: slice
    length: int


class OutputCopy(NamedTuple):
    """A copy to a place in the own output."""

    place: Place
    source: ArraySpan


class BlockMove(NamedTuple):
    """What is done block by block: a reduction, or a share of a divided copy.

    Attributes:
        place: of the first target, if that is the own output.
        targets: all others.
        sources: of equal length.
        prefixes: as of the ``Move``; all targets are in ``targets``.
    """

    place: Place | None
    targets: list[ArraySpan]
    sources: list[ArraySpan]
    prefixes: bool


class PieceMove(NamedTuple):
    """A move of which one piece after the other is staged.

    Attributes:
        start, stop: of the target in the own output; of results, 0 and their size.
        results: where the results go in the own staging buffer; none if the target is the output.
        sources: for each, the rank and where its staging buffer has the piece; or -1 and where the
            part begins in the own input.
    """

    start: int
    stop: int
    results: list[int]
    sources: list[tuple[int, int]]


class RankSchedule:
    """What one rank does in calls of one kind. Only what a way of moving asks for is worked out.

    Attributes:
        publishers: of the ``Exchange``.
        largest_input: elements of the largest input of all ranks.
        largest: elements of the largest part that is staged.
        width: elements of a slot: of a piece.
        turns: so many calls fit into a staging buffer side by side. They take turns there: it is
            slow to write to what other cores have just read, until their caches have let go of it.
        turn_size: elements of the buffer that one of them takes.
    """

    def __init__(
        self,
        movement: Movement,
        size: int,
        rank: int,
        root: int,
        itemsize: int,
        count: int,
        bounds: tuple[int, ...],
        arriving: tuple[int, ...],
        most_turns: int,
    ) -> None:
        """Find out what ``rank``, one of ``size``, does.

        Args:
            movement: what to move.
            size, rank: of the group.
            root: the root rank, or -1.
            itemsize: bytes of an element.
            count: elements of an array where none is cut into chunks.
            bounds: where the chunks of the inputs begin, and the end; or of the outputs, where only
                those are cut. An array that is not cut is as long as its rank's chunk of the other.
            arriving: of the outputs, where both are cut.
            most_turns: a limit for ``turns``.
        """
        # With more ranks it makes no difference.
        fits_twice = size == 2 and 2 * count * itemsize <= staging_bytes(size)
        every = exchange(movement, size, root, fits_twice=fits_twice)
        self._program = program(movement, size, rank, root, fits_twice=fits_twice)
        self._rank = rank
        self._slots = every.slots
        self._chunks = chunks = _Chunks(every, size, count, bounds, arriving)
        self.publishers = every.publishers
        self.largest_input = chunks.inputs[-1] if chunks.inputs else chunks.largest
        undivided = every.divided and not every.results
        self.largest = count if undivided else chunks.largest
        room = staging_bytes(size) // every.slots_each // _LINE * _LINE // itemsize
        line = max(1, _LINE // itemsize)
        wanted = -(-max(1, self.largest) // line) * line
        # Where ranks only know what themselves exchange, that does not tell them a width.
        self.width = room if arriving else min(room, wanted)
        self.turn_size = self.width * every.slots_each
        self.turns = min(most_turns, room // self.width)

    @cached_property
    def own(self) -> list[OutputCopy]:
        """Copies from this rank's input to its output."""
        return [self._chunks.copy(move) for move in self._program.own]

    @cached_property
    def whole(self) -> tuple[list[OutputCopy], list[BlockMove]]:
        """What it does where all inputs are staged as a whole, without ``own``."""
        return self._chunks.sorted(self._program.whole, self._rank)

    @cached_property
    def published(self) -> tuple[list[OutputCopy], list[BlockMove]]:
        """What it does where arrays are published, without ``own``."""
        others = [move for move in self._program.published if not is_own(move)]
        return self._chunks.sorted(others, self._rank)

    @cached_property
    def in_order(self) -> list[OutputCopy]:
        """All copies of ``published`` and ``own``, in the order of all ranks."""
        return [self._chunks.copy(move) for move in self._program.published if _copies(move)]

    @cached_property
    def fills(self) -> list[tuple[int, int, int]]:
        """Of each part that others read: its slot in the staging buffer, its begin and its end."""
        places = [(slot, self._chunks.cut(part)) for part, slot in self._slots[self._rank].items()]
        return [(slot * self.width, place.start, place.stop) for slot, place in places]

    @cached_property
    def staged(self) -> list[list[PieceMove]]:
        """What it does with what was staged, in one step or in two; without ``own``."""
        return [
            [self._chunks.pieces(move, self._slots, self._rank, self.width) for move in moves]
            for moves in self._program.staged
        ]


# Those that are in use are kept with what is bound by them, too.
schedule = lru_cache(maxsize=256)(RankSchedule)


def _copies(move: Move) -> bool:
    return len(move.sources) == 1 and not move.divided


class _Chunks:
    """Where the parts of the flat inputs and outputs lie, if those are cut, and how long they are.

    Attributes:
        inputs, outputs: where the chunks begin, and the end.
    """

    def __init__(
        self,
        every: Exchange,
        size: int,
        count: int,
        bounds: Sequence[int],
        arriving: Sequence[int],
    ) -> None:
        self.inputs: Sequence[int] = ()
        self.outputs: Sequence[int] = ()
        if every.splits and every.joins:
            self.inputs, self.outputs = bounds, arriving
        elif every.splits:
            self.inputs = bounds
        elif every.joins:
            self.outputs = bounds
        else:
            even = bounds_of(split_sizes(count, size)) if every.divided else (0, count)
            self.inputs = self.outputs = even
        self.largest = max(
            high - low
            for ends in (self.inputs, self.outputs)
            for low, high in itertools.pairwise(ends)
        )

    def count(self, array: int, rank: int) -> int:
        """The elements of a whole array."""
        own, other = self.inputs, self.outputs
        if array == OUTPUT:
            own, other = other, own
        return own[-1] if own else other[rank + 1] - other[rank]

    def cut(self, part: ArrayPart) -> slice:
        """Where a part lies in its array."""
        if part.chunk is None:
            return slice(0, self.count(part.array, part.rank))
        bounds = self.inputs if part.array == INPUT else self.outputs
        return slice(bounds[part.chunk], bounds[part.chunk + 1])

    def place(self, part: ArrayPart) -> Place:
        """The same as ``cut``, to write to."""
        return ... if part.chunk is None else self.cut(part)

    def span(self, part: ArrayPart) -> ArraySpan:
        count = self.count(part.array, part.rank)
        return ArraySpan(part.array, part.rank, self.cut(part), count)

    def copy(self, move: Move) -> OutputCopy:
        return OutputCopy(self.place(move.targets[0]), self.span(move.sources[0]))

    def sorted(self, moves: Sequence[Move], rank: int) -> tuple[list[OutputCopy], list[BlockMove]]:
        """Moves with places: the copies to the own output, and all others."""
        copies, work = [], []
        for move in moves:
            first, *others = move.targets
            if _copies(move):
                copies.append(self.copy(move))
                continue
            own = (first.array, first.rank) == (OUTPUT, rank) and not move.prefixes
            work.append(
                BlockMove(
                    self.place(first) if own else None,
                    [self.span(part) for part in (others if own else move.targets)],
                    [self.span(part) for part in move.sources],
                    move.prefixes,
                )
            )
        return copies, work

    def pieces(
        self, move: Move, slots: Sequence[dict[ArrayPart, int]], rank: int, width: int
    ) -> PieceMove:
        target = move.targets[0]
        results = [_number(part) * width for part in move.targets if part.array == RESULT]
        place = self.cut(ArrayPart(INPUT, rank, rank) if results else target)
        if results:
            place = slice(0, place.stop - place.start)  # of the chunk that this rank does
        sources = []
        for part in move.sources:
            if part.array == INPUT and part.rank == rank:
                sources.append((-1, self.cut(part).start))
            else:
                slot = _number(part) if part.array == RESULT else slots[part.rank][part]
                sources.append((part.rank, slot * width))
        return PieceMove(place.start, place.stop, results, sources)


def _number(part: ArrayPart) -> int:
    assert part.chunk is not None
    return part.chunk
