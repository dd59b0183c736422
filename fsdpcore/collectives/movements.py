"""What a collective moves, as data: from which parts of the ranks' arrays to which.

Every rank has an input and an output, flat arrays. A collective may cut one of them, or both, into
a chunk for each rank. Its file under ``operations`` has its movement, and ``shared.interpreter``
carries movements out, whatever they move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

INPUT, OUTPUT = 0, 1


class ArrayPart(NamedTuple):
    """A part of a rank's array.

    Attributes:
        array: ``INPUT`` or ``OUTPUT``.
        rank: whose.
        chunk: the rank that the chunk is for or from; None for the whole array.
    """

    array: int
    rank: int
    chunk: int | None = None


class Move(NamedTuple):
    """One step of a movement; they do not depend on each other's results.

    Attributes:
        targets: all get what comes of the sources.
        sources: several are reduced, in this order; a single one is copied; of none, the value
            comes that changes nothing in the reduction.
        divided: targets and sources are whole arrays, and the ranks divide the work: rank c does
            chunk c of it. All moves of a movement are divided, or none.
        prefixes: the last target alone gets what comes of all sources, the one before it what
            comes of all but the last source, and so on. Such a move is divided.
    """

    targets: tuple[ArrayPart, ...]
    sources: tuple[ArrayPart, ...]
    divided: bool = False
    prefixes: bool = False


# The ranks, and the root (-1 for none), to the moves.
Movement = Callable[[range, int], list[Move]]


def inputs(ranks: Iterable[int], chunk: int | None = None) -> tuple[ArrayPart, ...]:
    """The same part of several ranks' inputs."""
    return tuple(ArrayPart(INPUT, rank, chunk) for rank in ranks)


def outputs(ranks: Iterable[int], chunk: int | None = None) -> tuple[ArrayPart, ...]:
    """The same part of several ranks' outputs."""
    return tuple(ArrayPart(OUTPUT, rank, chunk) for rank in ranks)
