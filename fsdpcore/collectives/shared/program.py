"""What one rank does of a movement, in the two ways in which arrays can be used.

*Published*: a rank reads the others' inputs, and writes to their outputs, where they lie. *Staged*:
a rank reads what the others have copied into their staging buffers. It writes to its own output
only, so what it reduced for others goes through the buffers once more, as a ``RESULT``.

All this depends on the collective and the ranks only; ``schedule`` finds the places of parts.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from fsdpcore.collectives.movements import INPUT, OUTPUT, ArrayPart, Move, Movement

RESULT = 2  # what a rank has made for others in its staging buffer; its chunk is a number


class Exchange(NamedTuple):
    """What all ranks together do of a movement.

    Attributes:
        moves: of the movement.
        splits, joins: inputs, outputs have a chunk for each rank.
        divided: the ranks divide work.
        pulled: for each rank, the moves that its output is a target of, without other targets.
        performed: for each rank, what it does where arrays are published.
        publishers: the ranks that have to publish, and what: ``INPUT``, ``OUTPUT``.
        slots: for each rank, the places of its input's parts in its staging buffer.
        results: how many results a rank makes for others of what was staged.
    """

    moves: list[Move]
    splits: bool
    joins: bool
    divided: bool
    pulled: list[list[Move]]
    performed: list[list[Move]]
    publishers: dict[int, set[int]]
    slots: list[dict[ArrayPart, int]]
    results: int

    @property
    def slots_each(self) -> int:
        """How many places there are in a staging buffer."""
        return max(1, self.results, *map(len, self.slots))


class Program(NamedTuple):
    """What one rank does of a movement.

    Attributes:
        own: copies from this rank's input to its output.
        whole: what it does where all inputs are staged as a whole, without ``own``.
        published: what it does where arrays are published, with ``own``.
        staged: what it does with what was staged, in one step or in two; without ``own``.
    """

    own: list[Move]
    whole: list[Move]
    published: list[Move]
    staged: list[list[Move]]


_building = threading.Lock()


def exchange(movement: Movement, size: int, root: int, *, fits_twice: bool = False) -> Exchange:
    """What ``size`` ranks do. Not to be changed: it is cached, for all ranks of this process.

    Args:
        movement: of the collective.
        size: how many ranks there are.
        root: one of them, or -1.
        fits_twice: of two ranks: a staging buffer has room for two of their inputs.
    """
    with _building:  # ranks that are threads ask for it at the same time
        return _exchange(movement, size, root, fits_twice)


@lru_cache(maxsize=64)  # of 2 MB each among 128 ranks
def _exchange(movement: Movement, size: int, root: int, fits_twice: bool) -> Exchange:
    moves = movement(range(size), root)
    assert len({move.divided for move in moves}) == 1, "all moves are divided, or none"
    found = Exchange(
        moves=moves,
        splits=any(part.chunk is not None for move in moves for part in move.sources),
        joins=any(part.chunk is not None for move in moves for part in move.targets),
        divided=moves[0].divided,
        pulled=[[] for _ in range(size)],
        performed=[[] for _ in range(size)],
        publishers={},
        slots=[{} for _ in range(size)],
        results=sum(_results(_as_staged(move, size, fits_twice)) for move in moves),
    )
    for move in moves:
        for number, target in enumerate(move.targets):
            left_out = len(move.targets) - 1 - number if move.prefixes else 0
            sources = move.sources[: len(move.sources) - left_out]
            found.pulled[target.rank].append(Move((target,), sources, move.divided))
        acts, staged = list(_performed(move, range(size))), _as_staged(move, size, fits_twice)
        for who, act in acts:
            found.performed[who].append(act)
            for part in act.sources if not is_own(act) else ():
                found.publishers.setdefault(part.rank, set()).add(INPUT)
            for part in act.targets:
                if part.rank != who:
                    found.publishers.setdefault(part.rank, set()).add(OUTPUT)
        for who, act in acts if staged is move else _performed(staged, range(size)):
            for part in act.sources:
                if part.rank != who:
                    slots = found.slots[part.rank]
                    slots.setdefault(part, len(slots))
    return found


def _as_staged(move: Move, size: int, fits_twice: bool) -> Move:
    """How a move is made of staged arrays.

    Two ranks do not divide what one of them gets, nor inputs of up to half a staging buffer: that
    is one step, not two. Larger ones they divide: each reads half of its own input, not all of it.
    """
    whole = size == 2 and not move.prefixes and (fits_twice or len(move.targets) == 1)
    return move._replace(divided=False) if whole else move


def _results(move: Move) -> int:
    """How many results a rank makes of its chunk of a move for others."""
    if not move.divided:
        return 0
    return len(move.targets) if move.prefixes else 1


@lru_cache(maxsize=1024)
def program(
    movement: Movement, size: int, rank: int, root: int, *, fits_twice: bool = False
) -> Program:
    """The program of ``rank``, one of ``size``. Not to be changed: it is cached."""
    every = exchange(movement, size, root, fits_twice=fits_twice)
    pulled, published = every.pulled[rank], every.performed[rank]
    found = Program(
        own=[move for move in pulled if is_own(move)],
        whole=[move for move in pulled if not is_own(move)],
        published=published,
        staged=[[move for move in pulled if not is_own(move)]],
    )
    if not every.results:
        return found
    made: list[Move] = []
    copies: list[Move] = []
    numbers = itertools.count()
    for move, act in zip(every.moves, published, strict=True):
        results = [ArrayPart(RESULT, rank, next(numbers)) for _ in range(_results(move))]
        made.append(act._replace(targets=tuple(results)))
        for target, result in zip(move.targets, itertools.cycle(results)):
            if target.rank == rank:
                copies += [
                    Move((target._replace(chunk=chunk),), (result._replace(rank=chunk),))
                    for chunk in range(size)
                ]
    return found._replace(staged=[made, copies])


def is_own(move: Move) -> bool:
    """Whether it is a copy from a rank to itself, in which no other has a share."""
    one = len(move.sources) == 1 and not move.divided
    return one and move.sources[0].rank == move.targets[0].rank


def _performed(move: Move, ranks: range) -> Iterator[tuple[int, Move]]:
    """What each of the ranks does of a move, where all arrays are published."""
    if not move.divided:
        for target in move.targets:
            yield target.rank, Move((target,), move.sources)
        return
    for chunk in ranks:
        targets: Iterable[ArrayPart] = move.targets
        if not move.prefixes:  # a rank begins with its own array, and copies from there
            targets = sorted(targets, key=lambda part: part.rank != chunk)
        yield (
            chunk,
            move._replace(
                targets=tuple(part._replace(chunk=chunk) for part in targets),
                sources=tuple(part._replace(chunk=chunk) for part in move.sources),
            ),
        )
