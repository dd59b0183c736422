"""The memory that ranks share which are threads of one process: all of it."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable

import numpy as np

from fsdpcore.collectives.shared.region import SharedRegion, nbytes
from fsdpcore.collectives.shared.thread_region import Meeting, ThreadRegion
from fsdpcore.core.buffers import Array, Bytes, lined_up
from fsdpcore.core.clock import Lock


class ThreadWorld:
    """What the ranks of one job have in common.

    Attributes:
        lock: held while one of them makes something for all.
        telling: held while one of them tells all others of a failure.
        made: memory that one rank has made, until it is told that all have it.
        meetings: of the groups, by their channels.
        open: the ranks that have waited for a message from any rank.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.telling = threading.RLock()
        self.numbers = itertools.count(1)
        self.made: dict[int, Bytes] = {}
        self.open: dict[int, None] = {}
        self.meetings: weakref.WeakValueDictionary[int, Meeting] = weakref.WeakValueDictionary()


class _ThreadSegment:
    def __init__(self, world: ThreadWorld, nbytes: int) -> None:
        self.number = next(world.numbers)
        self._world = world
        self._memory = world.made[self.number] = lined_up((nbytes,), np.uint8, zeros=True)

    def bytes(self, offset: int, nbytes: int) -> Bytes:
        return self._memory[offset : offset + nbytes]

    def close(self) -> None:
        self._world.made.pop(self.number, None)


class SimMemory:
    """The memory of one rank, as ``MemorySharing``.

    Args:
        before: called ahead of each step that the rank takes in a region, with the bytes of the
            arrays that it has moved since the last one.
        lock: makes what the rank sleeps on.
    """

    required = False
    available = True

    def __init__(
        self, world: ThreadWorld, before: Callable[[int], None] | None, lock: Callable[[], Lock]
    ) -> None:
        self._world, self._before, self._lock = world, before, lock

    def common_region(self, channel: int, rank: int, size: int) -> SharedRegion:
        """How threads take turns: the first one to come makes what they need."""
        with self._world.lock:
            meeting = self._world.meetings.get(channel)
            if meeting is None:
                memory = lined_up((nbytes(size),), np.uint8, zeros=True)
                meeting = self._world.meetings[channel] = Meeting(memory, size, self._lock)
        return ThreadRegion(meeting, rank, self, self._before)

    def region(self, memory: Bytes, rank: int, size: int) -> SharedRegion:
        """Not called, since there is a common one."""
        raise OSError("threads have a common region")

    def introduce(self) -> bytes:
        """Threads know each other."""
        return b""

    def meet(self, introduction: bytes) -> None:
        """Threads know each other."""

    def segment(self, nbytes: int) -> _ThreadSegment:
        """Make ``nbytes`` zeros."""
        return _ThreadSegment(self._world, nbytes)

    def open(self, number: int) -> Bytes:
        """Return what another thread has made."""
        try:
            return self._world.made[number]
        except KeyError:
            raise OSError(f"no thread has made memory number {number}") from None

    def empty(self, nbytes: int) -> None:
        """None: all memory is as good."""

    def locate(self, array: Array) -> None:
        """None: threads publish arrays, not places."""

    def attach(self, number: int) -> Bytes:
        """Not called, since nothing has a place."""
        raise OSError("threads have no places to attach")

    def close(self) -> None:
        """Nothing to close."""
