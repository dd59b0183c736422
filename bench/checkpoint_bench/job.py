"""``Job``: one contestant's way to store a state on one rank, and to get it back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from checkpoint_bench import model
from checkpoint_bench.model import Array

Wait = Callable[[], object]


class Part(NamedTuple):
    """What a rank has of an array: elements from ``start`` on, flat, writable."""

    name: str
    start: int
    array: Array


class Job(ABC):
    """Makes its state when it is made; every rank makes its own at the same time.

    ``folder`` is one that all ranks see, of this contestant alone; ``step`` numbers what is in it.
    """

    threads = 1
    """That write a rank's files, where the contestant has a choice."""

    @abstractmethod
    def barrier(self) -> None:
        """Block until all ranks are here."""

    @abstractmethod
    def save(self, folder: Path, step: int) -> None:
        """Store the state, durably."""

    @abstractmethod
    def load(self, folder: Path, step: int) -> None:
        """Read it back, into the same memory; also what another number of ranks has saved."""

    @abstractmethod
    def save_async(self, folder: Path, step: int) -> Wait:
        """Begin to store the state as it is now; return as soon as it may change.

        What is returned blocks until it is durable.
        """

    @abstractmethod
    def parts(self) -> Iterable[Part]:
        """Yield this rank's share."""

    def close(self) -> None:  # noqa: B027 (not everyone has something to give up)
        """Leave."""

    def fill(self) -> None:
        """Give the state its known values."""
        for name, start, array in self.parts():
            model.fill(name, start, array)

    def spoil(self) -> None:
        """Give it others, none of which is right."""
        for part in self.parts():
            part.array[...] = -1.0

    def wrong(self) -> int:
        """Count the elements of this rank that do not have their known values."""
        return sum(model.wrong(*part) for part in self.parts())
