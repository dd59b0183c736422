"""``Job``: one contestant's way to do a case on one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Job(ABC):
    """Makes its model when it is made; every rank makes its own at the same time."""

    @abstractmethod
    def barrier(self) -> None:
        """Block until all ranks are here."""

    @abstractmethod
    def step(self) -> None:
        """What is timed."""

    def check(self) -> int:
        """Make a step on known values; the number of elements that were wrong on this rank."""
        return 0

    def losses(self, count: int) -> list[float]:
        """Make ``count`` steps; this rank's loss in each, in nats."""
        raise NotImplementedError(f"{type(self).__name__} trains nothing")

    def split(self, count: int) -> list[float]:
        """Make ``count`` steps; their seconds, and how many of these went into computing."""
        raise NotImplementedError(f"{type(self).__name__} does not tell computing apart")

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """Give up what is not just memory."""
