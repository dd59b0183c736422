"""What one rank does of a movement, in the two ways in which arrays can be used.

*Published*: a rank reads the others' inputs, and writes to their outputs, where they lie. *Staged*:
a rank reads what the others have copied into their staging buffers. It writes to its own output
only, so what it reduced for others goes through the buffers once more, as a ``RESULT``.

A ``Program`` has the names of parts, and depends on the collective and the ranks only. A
``RankSchedule`` has the places of parts, and depends on the sizes of a call as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import EllipsisType
from typing import NamedTuple

from fsdpcore.collectives.movements import INPUT, OUTPUT, ArrayPart, Move, Movement
from fsdpcore.collectives.shared.region import STAGING
from fsdpcore.core.buffers import bounds_of, split_sizes

RESULT = 2  # what a rank has made for others in its staging buffer; its chunk is a number
_LINE = 64  # bytes; slots of a staging buffer begin at multiples of it


class Program(NamedTuple):
    """What one rank does of a movement.

    Attributes:
        splits, joins: inputs, outputs have a chunk for each rank.
        divided: the ranks divide work.
        publishers: the ranks that have to publish, and what: ``INPUT``, ``OUTPUT``.
        own: copies from this rank's input to its output.
        whole: what it does where all inputs are staged as a whole, without ``own``.
        published: what it does where arrays are published, with ``own``.
        staged: what it does with what was staged, in one step or in two; without ``own``.
        slots: the places that parts of inputs have in the staging buffers of their ranks.
        slots_each: how many places there are in a buffer.
    """

    splits: bool
    joins: bool
    divided: bool
    publishers: dict[int, set[int]]
    own: list[Move]
    whole: list[Move]
    published: list[Move]
    staged: list[list[Move]]
    slots: dict[ArrayPart, int]
    slots_each: int


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
    """

    place: Place | None
    targets: list[ArraySpan]
    sources: list[ArraySpan]


class PieceMove(NamedTuple):
    """A move of which one piece after the other is staged.

    Attributes:
        start, stop: of the target in the own output; of a result, 0 and its size.
        result: where the result goes in the own staging buffer; -1 for none.
        sources: for each, the rank and where its staging buffer has the piece; or -1 and where the
            part begins in the own input.
    """

    start: int
    stop: int
    result: int
    sources: list[tuple[int, int]]


class RankSchedule(NamedTuple):
    """What one rank does in calls of one kind.

    Attributes:
        publishers: of the program.
        largest_input: elements of the largest input of all ranks.
        largest: elements of the largest part.
        own: copies from this rank's input to its output.
        whole: what it does where all inputs are staged as a whole, without ``own``.
        published: what it does where arrays are published, without ``own``.
        in_order: all copies of ``published`` and ``own``, in the order of all ranks.
        fills: of each part that others read, its slot in the staging buffer, where it begins and
            where it ends.
        staged: what it does with what was staged, in one step or in two; without ``own``.
        width: elements of a slot: of a piece.
    """

    publishers: dict[int, set[int]]
    largest_input: int
    largest: int
    own: list[OutputCopy]
    whole: tuple[list[OutputCopy], list[BlockMove]]
    published: tuple[list[OutputCopy], list[BlockMove]]
    in_order: list[OutputCopy]
    fills: list[tuple[int, int, int]]
    staged: list[list[PieceMove]]
    width: int


@lru_cache(maxsize=1024)
def schedule(
    movement: Movement,
    size: int,
    rank: int,
    root: int,
    itemsize: int,
    count: int,
    bounds: tuple[int, ...],
    arriving: tuple[int, ...],
) -> RankSchedule:
    """What ``rank``, one of ``size``, does. Not to be changed: it is cached.

    Args:
        movement: what to move.
        size, rank: of the group.
        root: the root rank, or -1.
        itemsize: bytes of an element.
        count: elements of an array where none is cut into chunks.
        bounds: where the chunks of the inputs begin, and the end; or of the outputs, where only
            those are cut. An array that is not cut is as long as its rank's chunk of the other.
        arriving: of the outputs, where both are cut.
    """
    todo = program(movement, size, rank, root)
    chunks = _Chunks(todo, size, count, bounds, arriving)
    width = STAGING // todo.slots_each // _LINE * _LINE // itemsize
    own = [chunks.copy(move) for move in todo.own]
    return RankSchedule(
        publishers=todo.publishers,
        largest_input=chunks.inputs[-1] if chunks.inputs else chunks.largest,
        largest=chunks.largest,
        own=own,
        whole=chunks.sorted(todo.whole, rank),
        published=chunks.sorted([move for move in todo.published if not is_own(move)], rank),
        in_order=[chunks.copy(move) for move in todo.published if _copies(move)],
        fills=[
            (slot * width, place.start, place.stop)
            for part, slot in todo.slots.items()
            if part.rank == rank
            for place in [chunks.cut(part)]
        ],
        staged=[
            [chunks.pieces(move, todo.slots, rank, width) for move in moves]
            for moves in todo.staged
        ],
        width=width,
    )


def _copies(move: Move) -> bool:
    return len(move.sources) == 1 and not move.divided


class _Chunks:
    """Where the parts of the flat inputs and outputs lie, if those are cut, and how long they are.

    Attributes:
        inputs, outputs: where the chunks begin, and the end.
    """

    def __init__(
        self,
        program: Program,
        size: int,
        count: int,
        bounds: Sequence[int],
        arriving: Sequence[int],
    ) -> None:
        self.inputs: Sequence[int] = ()
        self.outputs: Sequence[int] = ()
        if program.splits and program.joins:
            self.inputs, self.outputs = bounds, arriving
        elif program.splits:
            self.inputs = bounds
        elif program.joins:
            self.outputs = bounds
        else:
            even = bounds_of(split_sizes(count, size)) if program.divided else (0, count)
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
            own = (first.array, first.rank) == (OUTPUT, rank)
            work.append(
                BlockMove(
                    self.place(first) if own else None,
                    [self.span(part) for part in (others if own else move.targets)],
                    [self.span(part) for part in move.sources],
                )
            )
        return copies, work

    def pieces(self, move: Move, slots: dict[ArrayPart, int], rank: int, width: int) -> PieceMove:
        target, result = move.targets[0], -1
        if target.array == RESULT:
            assert target.chunk is not None
            place, result = self.cut(ArrayPart(INPUT, rank, rank)), target.chunk * width
            place = slice(0, place.stop - place.start)  # of the chunk that this rank does
        else:
            place = self.cut(target)
        sources = []
        for part in move.sources:
            if part.array == INPUT and part.rank == rank:
                sources.append((-1, self.cut(part).start))
            else:
                slot = part.chunk if part.array == RESULT else slots[part]
                assert slot is not None
                sources.append((part.rank, slot * width))
        return PieceMove(place.start, place.stop, result, sources)


@lru_cache(maxsize=1024)
def program(movement: Movement, size: int, rank: int, root: int) -> Program:
    """The program of ``rank``, one of ``size``. Not to be changed: it is cached."""
    ranks, moves = range(size), movement(range(size), root)
    assert len({move.divided for move in moves}) == 1, "all moves are divided, or none"
    found = Program(
        splits=any(part.chunk is not None for move in moves for part in move.sources),
        joins=any(part.chunk is not None for move in moves for part in move.targets),
        divided=any(move.divided for move in moves),
        publishers={},
        own=[],
        whole=[],
        published=[],
        staged=[[], []],
        slots={},
        slots_each=1,
    )
    for move in moves:
        mine = [target for target in move.targets if target.rank == rank]
        for target in mine:
            pulled = move._replace(targets=(target,))
            (found.own if is_own(pulled) else found.whole).append(pulled)
    used = [0] * size
    results = 0
    read: set[ArrayPart] = set()  # by moves that are divided: a scan reads the same in all of them
    for move in moves:
        for _, act in _performed(move, [rank]):
            found.published.append(act)
            if move.divided:
                found.staged[0].append(act._replace(targets=(ArrayPart(RESULT, rank, results),)))
            elif not is_own(act):
                found.staged[0].append(act)
        fresh = move._replace(sources=tuple(part for part in move.sources if part not in read))
        if move.divided:
            read.update(move.sources)
        for who, act in _performed(fresh, ranks):
            for part in act.sources if not is_own(act) else ():
                found.publishers.setdefault(part.rank, set()).add(INPUT)
                if part.rank != who and part not in found.slots:
                    found.slots[part] = used[part.rank]
                    used[part.rank] += 1
            for part in act.targets:
                if part.rank != who:
                    found.publishers.setdefault(part.rank, set()).add(OUTPUT)
        if move.divided:
            found.staged[1].extend(
                Move((target._replace(chunk=chunk),), (ArrayPart(RESULT, chunk, results),))
                for target in move.targets
                if target.rank == rank
                for chunk in ranks
            )
            results += 1
    phases = found.staged if results else found.staged[:1]
    return found._replace(staged=phases, slots_each=max(1, results, *used))


def is_own(move: Move) -> bool:
    """Whether it is a copy from a rank to itself, in which no other has a share."""
    one = len(move.sources) == 1 and not move.divided
    return one and move.sources[0].rank == move.targets[0].rank


def _performed(move: Move, ranks: Sequence[int]) -> Iterator[tuple[int, Move]]:
    """What each of some ranks does of a move, where all arrays are published."""
    if not move.divided:
        for target in move.targets:
            if target.rank in ranks:
                yield target.rank, Move((target,), move.sources)
        return
    for chunk in ranks:  # a rank begins with its own array, and copies from there
        targets = sorted(move.targets, key=lambda part: part.rank != chunk)
        yield (
            chunk,
            move._replace(
                targets=tuple(part._replace(chunk=chunk) for part in targets),
                sources=tuple(part._replace(chunk=chunk) for part in move.sources),
            ),
        )
