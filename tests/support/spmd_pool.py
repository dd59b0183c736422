"""Fleets of processes that are kept between jobs; jobs at the same time have one each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from support.spmd_job import Job, Outcome
from support.spmd_processes import Fleet

# Jobs of one transport at the same time.
_AT_ONCE = 2
_SMALL, _LARGE = 4, 8


class Pool:
    """Gives every job a fleet.

    Args:
        start: starts a fleet of so many processes.
    """

    def __init__(self, start: Callable[[int], Fleet]) -> None:
        self._start = start
        self._idle: list[Fleet] = []
        self._changed = threading.Condition()
        self._busy = 0
        self._waiting = 0

    def run(self, job: Job, size: int) -> list[Outcome]:
        """Run a job on the first processes of a fleet of ``size``, when it is its turn."""
        with self._turn():
            fleet = self._taken(size) or self._start(size)
            try:
                return fleet.run(job)
            finally:
                if not self._kept(fleet):
                    fleet.close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: self._busy < _AT_ONCE)
            self._waiting -= 1
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify()

    def _taken(self, size: int) -> Fleet | None:
        with self._changed:
            for fleet in self._idle:
                if fleet.size == size:
                    self._idle.remove(fleet)
                    return fleet
        return None

    def _kept(self, fleet: Fleet) -> bool:
        """Keep a fleet: one of a size does for jobs in turn, more only while others wait."""
        with self._changed:
            enough = fleet.size in [other.size for other in self._idle] and not self._waiting
            if fleet.broken or enough:
                return False
            self._idle.append(fleet)
            return True

    def close(self) -> None:
        """End the fleets that are idle."""
        while self._idle:
            self._idle.pop().close()


class ProcessRanks:
    """Runs jobs on fleets of forked processes, each for any smaller number of ranks."""

    def __init__(self, transport: str) -> None:
        self._pool = Pool(lambda size: Fleet(transport, size))

    def run(self, job: Job) -> list[Outcome]:
        assert job.world_size <= _LARGE
        return self._pool.run(job, _SMALL if job.world_size <= _SMALL else _LARGE)

    def close(self) -> None:
        self._pool.close()
