"""``StateJob``: one contestant's way to store a state on one rank, and to get it back."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from checkpoint_bench import model
from checkpoint_bench.cases import COPY, LOAD, SAVE, STALL
from checkpoint_bench.model import Array
from fsdpcore.bench.harness.member import CaseRunner, timed_calls
from fsdpcore.bench.harness.memory import peak_rss, reset_peak

Wait = Callable[[], object]


class OwnPart(NamedTuple):
    """What a rank has of an array: elements from ``start`` on, flat, writable."""

    name: str
    start: int
    array: Array


class StateJob(CaseRunner):
    """Makes its state when it is made; every rank makes its own at the same time.

    ``folder`` is one that all ranks see, of this contestant alone; ``step`` numbers what is in it.
    """

    threads = 1
    """That write a rank's files, where the contestant has a choice."""

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
    def parts(self) -> Iterable[OwnPart]:
        """Yield this rank's share."""

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

    def turn(self, operation: str, folder: str, step: int, threads: int) -> list[float]:
        """Do an operation after a barrier; its seconds.

        A save in the background gives those until the state may change, and until it was durable.
        """
        place = Path(folder)
        if operation == STALL:
            return self._stall(place, step)
        self.threads = threads
        calls: dict[str, Callable[[], object]] = {
            SAVE: lambda: self.save(place, step),
            LOAD: lambda: self.load(place, step),
            COPY: self.copy,
        }
        return [timed_calls(self.barrier, calls[operation], self.finish, 0, 1)]

    def copy(self) -> None:
        """Copy this rank's share within memory."""
        raise NotImplementedError(f"{type(self).__name__} only saves and loads")

    def added(self, **turn: Any) -> float:
        """Take a turn; bytes that it added to the resident set at its peak."""
        reset_peak()
        before = peak_rss()
        self.turn(**turn)
        return float(peak_rss() - before)

    def _stall(self, folder: Path, step: int) -> list[float]:
        self.barrier()
        began = time.perf_counter()
        wait = self.save_async(folder, step)
        stall = time.perf_counter() - began
        self.spoil()  # as a training would; what is stored is not to notice
        wait()
        durable = time.perf_counter() - began
        self.fill()
        return [stall, durable]
