"""``ThreadRegion``: the area of ranks that are threads of one process.

Everything that a rank has is in reach of the others, so every array can be lent. Threads of one
interpreter cannot look at a flag while the one that sets it computes, so they sleep until that
one wakes them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fsdpcore.collectives.shared.region import SOURCE, SharedRegion
from fsdpcore.core.buffers import Array, Bytes

if TYPE_CHECKING:
    from fsdpcore.collectives.context import CollectiveContext
    from fsdpcore.comm.sharing import MemorySharing

_SLICE = 0.05  # seconds after which a sleeping rank sees whether something else has happened
_NOBODY = -1

Lent = tuple["Array | None", "Array | None"]
_NOTHING: Lent = (None, None)


class Meeting:
    """What the ranks of a group have in common.

    Attributes:
        memory: of the area.
        awaited: for each rank, whose flag it sleeps for.
        alarms: for each rank, a lock that is released to wake it.
        lent: for even and odd steps, the arrays that each rank lends.
    """

    def __init__(self, memory: Bytes, size: int) -> None:
        self.memory = memory
        self.awaited = [_NOBODY] * size
        self.alarms = [threading.Lock() for _ in range(size)]
        for alarm in self.alarms:
            alarm.acquire()
        self.lent: list[list[Lent]] = [[_NOTHING] * size for _ in range(2)]


_CLOSED = Meeting(np.zeros(0, np.uint8), 0)


def _locked_interpreter() -> bool:
    return getattr(sys, "_is_gil_enabled", lambda: True)()


class ThreadRegion(SharedRegion):
    """The area of one group, seen from one thread."""

    block = 8 << 20  # threads that compute long do not often ask for the interpreter
    addressed = False

    def __init__(
        self, meeting: Meeting, rank: int, sharing: MemorySharing, before: Callable[[], None] | None
    ) -> None:
        """Take part in a meeting; ``before`` is called ahead of each step."""
        super().__init__(meeting.memory, rank, len(meeting.awaited), sharing)
        self._meeting, self._rank, self._before = meeting, rank, before
        self.wake = self._wake
        # Without fences, since the interpreter's lock orders what threads see of each other.
        self.express = before is None and (self.fence is None or _locked_interpreter())

    def close(self) -> None:
        super().close()
        self._meeting = _CLOSED

    def sync(self, link: CollectiveContext, meanwhile: Callable[[], None] | None = None) -> None:
        if self._before is not None:
            self._before()
        super().sync(link, meanwhile)
        # All have entered this step, so nobody uses what was lent for the last one.
        self._meeting.lent[(self.step - 1) & 1][self._rank] = _NOTHING

    def lend(self, source: Array | None, out: Array | None = None) -> bool:
        self._meeting.lent[(self.step + 1) & 1][self._rank] = (source, out)
        return True

    def lent(self, rank: int, which: int = SOURCE) -> bool:
        return True

    def borrowed(
        self,
        link: CollectiveContext,
        rank: int,
        dtype: np.dtype[Any],
        count: int,
        which: int = SOURCE,
    ) -> Array:
        array = self._meeting.lent[self.step & 1][rank][which]
        assert array is not None, "all ranks are in the same call"
        return array

    def wait(self, at: int, step: int, link: CollectiveContext) -> None:
        meeting, rank, peer = self._meeting, self._rank, self.rank_of(at)
        while True:
            meeting.awaited[rank] = peer
            if self.flags[at] == step:
                meeting.awaited[rank] = _NOBODY
                return
            if not meeting.alarms[rank].acquire(timeout=_SLICE) and self.arrived(at, step, link):
                return

    def _wake(self) -> None:
        meeting, me = self._meeting, self._rank
        for rank, awaited in enumerate(meeting.awaited):
            if awaited == me:
                meeting.awaited[rank] = _NOBODY
                # Whoever it slept for before may have woken it a moment ago.
                with contextlib.suppress(RuntimeError):
                    meeting.alarms[rank].release()
