"""What a member of an elastic job tells its driver."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpcore.elastic.generation import Generation


@dataclass(frozen=True)
class Install:
    """A generation begins.

    Attributes:
        generation: with its seats on all hosts.
        ranks: of this host's seats, by their numbers.
        dropped: numbers of this host's living seats that were in the last generation and aren't in
            this one: those that had asked to leave go, the others must end.
    """

    generation: Generation
    ranks: dict[int, int]
    dropped: tuple[int, ...]


@dataclass(frozen=True)
class Change:
    """The ranks shall hand over at the next commit."""

    reason: str


@dataclass(frozen=True)
class Finished:
    """The ranks of the job have ended their program."""


@dataclass(frozen=True)
class Stop:
    """This host cannot go on: its ranks must end.

    Attributes:
        reason: in words.
        goes_on: the job may do so without this host, which may join it anew.
    """

    reason: str
    goes_on: bool = False


@dataclass(frozen=True)
class Note:
    """What a user should know, in words: what this host waits for."""

    text: str


Event = Install | Change | Finished | Stop | Note
