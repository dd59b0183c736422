"""``ThreadRegion``: the region of ranks that are threads of one process.

Everything that a rank has is in reach of the others, so every array can be published. Threads of
one interpreter cannot look at a flag while the one that sets it computes. So they count who has
come to a step, and sleep until the last one wakes them. A step costs a rank the same however many
there are.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.movements import INPUT
from fsdpcore.collectives.shared.region import Enter, SharedRegion
from fsdpcore.comm.sharing import MemorySharing
from fsdpcore.core.buffers import Array, Bytes
from fsdpcore.core.clock import Lock

# Seconds after which a sleeping rank sees whether something else has happened: in a group of up to
# so many ranks. In larger ones it takes longer, so that all of them together look as often.
_SLICE = 0.05
_SLICE_RANKS = 64
_LOOKS = 64  # how many ranks it looks for then
_WOKEN = 16  # by one rank: who is awake waits for the interpreter, in the way of the others
_MOVES = 64  # ranks

Published = tuple["Array | None", "Array | None"]
_NOTHING: Published = (None, None)


class Meeting:
    """What the ranks of a group have in common.

    Attributes:
        memory: of the region.
        size: how many ranks there are.
        lock: held while a rank comes to a step.
        come: how often a rank has come to a step, of all ranks and steps together.
        complete: the last step that all ranks have come to.
        asking: held by the rank that asks all others what they have called, and tells them.
        last: for even and odd steps, the rank that was the last.
        digests: for even and odd steps, of the call of the rank that was the first.
        disagreed: the last step that a rank has come to with another digest than the first.
        left: the ranks that have closed their regions.
        alarms: for each rank, a lock that is released to wake it.
        published: for even and odd steps, the arrays that each rank publishes.
    """

    def __init__(self, memory: Bytes, size: int, lock: Callable[[], Lock]) -> None:
        """Have ``size`` ranks meet; ``lock`` makes what they sleep on, see ``core.clock``."""
        self.memory, self.size = memory, size
        self.lock, self.asking = threading.Lock(), threading.Lock()
        self.come = self.complete = self.disagreed = 0
        self.last, self.digests = [0, 0], [0, 0]
        self.left: list[int] = []
        self.alarms = [lock() for _ in range(size)]
        for alarm in self.alarms:
            alarm.acquire()
        self.published: list[list[Published]] = [[_NOTHING] * size for _ in range(2)]

    def rouse(self) -> None:
        """Have all that sleep see what has happened."""
        for rank in range(self.size):
            self.wake(rank)

    def wake(self, rank: int) -> None:
        """Wake a rank from its sleep, or from the next one if it is awake."""
        try:  # noqa: SIM105 (a context manager would take longer than all the rest)
            self.alarms[rank].release()
        except RuntimeError:  # somebody has just done so
            pass


_CLOSED = Meeting(np.zeros(0, np.uint8), 0, threading.Lock)


class ThreadRegion(SharedRegion):
    """The region of one group, seen from one thread."""

    block = 8 << 20  # threads that compute long do not often ask for the interpreter
    addressed = False

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        peers: MemorySharing,
        before: Callable[[int], None] | None,
    ) -> None:
        """Take part in a meeting; ``before`` is called ahead of each step: see ``SimMemory``."""
        super().__init__(meeting.memory, rank, meeting.size, peers)
        self._meeting, self._before = meeting, before
        self.moved = None if before is None else 0
        # Every rank binds every other's arrays: with more of them, messages are faster.
        self.moves = meeting.size <= _MOVES
        self._sought = (rank + 1) % meeting.size  # whom to look for next in a long wait

    def close(self) -> None:
        super().close()
        meeting, self._meeting = self._meeting, _CLOSED
        with meeting.lock:
            meeting.left.append(self._rank)
            begun = meeting.come > meeting.complete * meeting.size
        if begun:
            meeting.rouse()

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

    @functools.cached_property
    def enter(self) -> Enter:
        meeting, me, size = self._meeting, self._rank, self._size
        flags, own, before, lock = self.flags, self.own, self._before, self._meeting.lock
        digests, sleep, wake = meeting.digests, self._sleep, self._wake
        relays = size > _WOKEN + 1

        def enter(
            digest: int,
            context: CollectiveContext,
            begin: Callable[[], None] | None = None,
            meanwhile: Callable[[], None] | None = None,
        ) -> None:
            if before is not None:
                before(self.moved or 0)
                self.moved = 0
            self.step = step = self.step + 1
            parity = step & 1
            flags[own[parity]] = step
            with lock:
                meeting.come = come = meeting.come + 1
                if come % size == 1:
                    digests[parity] = digest
                elif digests[parity] != digest:
                    meeting.disagreed = step
                if come == step * size:
                    meeting.last[parity] = me
                    meeting.complete = step
            last = meeting.complete == step
            if last:
                wake(parity)
            if meanwhile is not None:
                meanwhile()
            if meeting.complete != step:
                if begin is not None:
                    begin()
                sleep(step, context)
            if relays and not last:
                wake(parity)
            if meeting.disagreed == step:
                if begin is not None:
                    begin()
                with meeting.asking:
                    context.check()
                    context.disagree()

        return enter

    def _wake(self, parity: int) -> None:
        """Wake those whose turn comes after this rank's; they wake others."""
        meeting, size = self._meeting, self._size
        place = (self._rank - meeting.last[parity]) % size
        first = _WOKEN * place + 1
        for other in range(first, min(first + _WOKEN, size)):
            meeting.wake((meeting.last[parity] + other) % size)

    def _sleep(self, step: int, context: CollectiveContext) -> None:
        """Sleep until all ranks have come to a step; raises what ``enter`` does."""
        meeting, alarm = self._meeting, self._meeting.alarms[self._rank]
        slice_seconds = _SLICE * max(1.0, self._size / _SLICE_RANKS)
        while meeting.complete != step:
            # No longer than the call may take, but not for no time at all when that has passed.
            woken = alarm.acquire(timeout=min(slice_seconds, max(_SLICE, context.remaining())))
            # A wake-up of the step before may still be there; it says nothing.
            if meeting.complete != step and (meeting.left or not woken):
                self._look_for_others(step, context)

    def _look_for_others(self, step: int, context: CollectiveContext) -> None:
        """See whether some rank will never come; raises what ``enter`` does."""
        places = self._all[step & 1]
        for rank in self._meeting.left[:_LOOKS]:
            self.arrived(places[rank], step, context)
        for _ in range(_LOOKS):
            if not self.arrived(places[self._sought], step, context):
                return
            self._sought = (self._sought + 1) % self._size
