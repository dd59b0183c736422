"""What is ordered with what, whatever the threads happened to do: it finds missing waits for sure.

Every stream has a clock: how much of every stream's work is certainly done before what is enqueued
on it next. Recording an event keeps the clock, waiting for it takes it over, and so does a host
that synchronises; what it enqueues afterwards comes later. Two accesses of the same memory, one of
which writes, must be ordered that way.

All threads of the host count as one, since how they wait for one another is not seen here. So a
wait may be missed that only another thread did, but none is reported that is there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from support.fake_cuda.queues import Queue

Clock = dict[int, int]


@dataclass
class _Access:
    name: str
    stream: int
    time: int
    begin: int
    end: int
    writes: bool


@dataclass(frozen=True)
class Race:
    """Two pieces of work on the same memory that nothing orders."""

    first: str
    second: str
    first_stream: int
    second_stream: int
    address: int

    def __str__(self) -> str:
        return (
            f"{self.second} on stream {self.second_stream} does not wait for {self.first} on "
            f"stream {self.first_stream}, and both use the memory at {self.address:#x}"
        )


class Order:
    """The clocks of all streams and the accesses of all memory."""

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._lock = threading.Lock()
        self._clocks: dict[int, Clock] = {}
        self._host: Clock = {}
        self._accesses: dict[int, list[_Access]] = {}

    def clock_of(self, queue: Queue) -> Clock:
        """What is done when all that a stream has so far is done."""
        with self._lock:
            return dict(self._clocks.get(queue.number, {}))

    def join(self, queue: Queue, clock: Clock) -> None:
        """Have what is enqueued on a stream from now on come after a clock."""
        with self._lock:
            _raise(self._clocks.setdefault(queue.number, {}), clock)

    def host_saw(self, clock: Clock) -> None:
        """Have what the host does from now on come after a clock."""
        with self._lock:
            _raise(self._host, clock)

    def enqueued(
        self,
        queue: Queue,
        name: str,
        reads: Iterable[tuple[int, NDArray[np.generic]]],
        writes: Iterable[tuple[int, NDArray[np.generic]]],
        after: Iterable[Queue] = (),
    ) -> None:
        """Note a piece of work that reads and writes arrays: (number of the memory, array)."""
        with self._lock:
            clock = self._clocks.setdefault(queue.number, {})
            _raise(clock, self._host)
            for other in after:
                _raise(clock, self._clocks.get(other.number, {}))
            now = clock[queue.number] = clock.get(queue.number, 0) + 1
            for arrays, written in ((reads, False), (writes, True)):
                for memory, array in arrays:
                    if array.size:
                        self._access(clock, memory, _access(name, queue, now, array, written))

    def _access(self, clock: Clock, memory: int, new: _Access) -> None:
        known = self._accesses.setdefault(memory, [])
        kept = []
        for old in known:
            ordered = clock.get(old.stream, 0) >= old.time
            meet = old.begin < new.end and new.begin < old.end
            if meet and not ordered and (old.writes or new.writes):
                self.races.append(Race(old.name, new.name, old.stream, new.stream, new.begin))
            covered = new.begin <= old.begin and old.end <= new.end
            same = old.stream == new.stream and old.writes == new.writes
            # What comes after a write of all of it is after whatever came before that.
            if not (covered and ordered and (new.writes or same)):
                kept.append(old)
        kept.append(new)
        self._accesses[memory] = kept


def _access(
    name: str, queue: Queue, time: int, array: NDArray[np.generic], writes: bool
) -> _Access:
    begin, end = np.lib.array_utils.byte_bounds(array)
    return _Access(name, queue.number, time, begin, end, writes)


def _raise(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time
