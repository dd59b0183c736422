"""``ThreadRegion``: the region of ranks that are threads of one process.

Everything that a rank has is in reach of the others, so every array can be published. Threads of
one interpreter cannot look at a flag while the one that sets it computes, so they sleep until that
one wakes them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.movements import INPUT
from fsdpcore.collectives.shared.region import SharedRegion
from fsdpcore.comm.sharing import MemorySharing
from fsdpcore.core.buffers import Array, Bytes
from fsdpcore.core.clock import Lock

_SLICE = 0.05  # seconds after which a sleeping rank sees whether something else has happened
_NOBODY = -1

Published = tuple["Array | None", "Array | None"]
_NOTHING: Published = (None, None)


class Meeting:
    """What the ranks of a group have in common.

    Attributes:
        memory: of the region.
        awaited: for each rank, whose flag it sleeps for.
        alarms: for each rank, a lock that is released to wake it.
        published: for even and odd steps, the arrays that each rank publishes.
    """

    def __init__(self, memory: Bytes, size: int, lock: Callable[[], Lock] = threading.Lock) -> None:
        """Make it on memory for ``size`` ranks, which sleep on locks of their clock."""
        self.memory = memory
        self.awaited = [_NOBODY] * size
        self.alarms = [lock() for _ in range(size)]
        for alarm in self.alarms:
            alarm.acquire()
        self.published: list[list[Published]] = [[_NOTHING] * size for _ in range(2)]


_CLOSED = Meeting(np.zeros(0, np.uint8), 0)


class ThreadRegion(SharedRegion):
    """The region of one group, seen from one thread."""

    block = 8 << 20  # threads that compute long do not often ask for the interpreter
    addressed = False

    def __init__(
        self, meeting: Meeting, rank: int, peers: MemorySharing, before: Callable[[], None] | None
    ) -> None:
        """Take part in a meeting; ``before`` is called ahead of each step."""
        super().__init__(meeting.memory, rank, len(meeting.awaited), peers)
        self._meeting, self._rank, self.before = meeting, rank, before
        self.wake = self._wake

    def close(self) -> None:
        super().close()
        self._meeting = _CLOSED

    def publish(self, source: Array | None, out: Array | None = None) -> bool:
        self._meeting.published[(self.step + 1) & 1][self._rank] = (source, out)
        return True

    def published(self, rank: int, which: int = INPUT) -> bool:
        return True

    def peer_view(
        self,
        context: CollectiveContext,
        rank: int,
        dtype: np.dtype[Any],
        count: int,
        which: int = INPUT,
    ) -> Array:
        array = self._meeting.published[self.step & 1][rank][which]
        assert array is not None, "all ranks are in the same call"
        return array

    def withdraw(self) -> None:
        self._meeting.published[(self.step - 1) & 1][self._rank] = _NOTHING

    def wait(
        self, at: int, step: int, context: CollectiveContext, begin: Callable[[], None] | None
    ) -> None:
        if begin is not None:
            begin()
        meeting, rank, peer = self._meeting, self._rank, self.rank_of(at)
        while True:
            meeting.awaited[rank] = peer
            if self.flags[at] == step:
                meeting.awaited[rank] = _NOBODY
                return
            if not meeting.alarms[rank].acquire(timeout=_SLICE) and self.arrived(at, step, context):
                return

    def _wake(self) -> None:
        meeting, me = self._meeting, self._rank
        for rank, awaited in enumerate(meeting.awaited):
            if awaited == me:
                meeting.awaited[rank] = _NOBODY
                # Whoever it slept for before may have woken it a moment ago.
                with contextlib.suppress(RuntimeError):
                    meeting.alarms[rank].release()
