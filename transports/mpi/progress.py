"""Who drives MPI's progress on a rank: the thread that waits for a message, or one of its own.

MPI moves messages only inside its calls. Of the threads that wait one polls (``comm/polled.py``).
While nobody waits a thread of the rank's own polls, so that transfers go on while Python computes,
peers get answers, and calls that block inside MPI are watched. Whoever polls in vain does so more
and more rarely: ranks may share cores.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from fsdpcore.comm.polled import MAX_SECONDS, LeaderFollowers, PolledMessage

# Polls before the first pause, and seconds of yielding the core before the first sleep.
_SPINS, _YIELD_SECONDS = 30, 0.002
# A sleep is this part of the time waited so far, up to a limit: what has to be waited for long is
# noticed a little late.
_PART, _LONGEST_SECONDS = 1 / 16, 0.001
# The own thread's pauses: while something is under way, while nothing is, while others wait.
_BUSY_SECONDS, _IDLE_SECONDS, _AWAY_SECONDS = 0.001, 0.005, 0.005


class _Pauses:
    """Between polls in vain: none, then giving the core away, then sleeps."""

    def __init__(self) -> None:
        self._vain = 0
        self._since = 0.0

    def reset(self) -> None:
        self._vain = 0

    def rest(self, limit: float) -> None:
        """Pause, for ``limit`` seconds at most."""
        self._vain += 1
        if self._vain < _SPINS:
            return
        now = time.monotonic()
        if self._vain == _SPINS:
            self._since = now
        waited = now - self._since
        if waited < _YIELD_SECONDS:
            os.sched_yield()
        else:
            time.sleep(max(min(waited * _PART, _LONGEST_SECONDS, limit), 0.0))


class _Condition:
    """What ``until`` waits for, in place of a message."""

    def __init__(self, predicate: Callable[[], object]) -> None:
        self._predicate = predicate

    @property
    def finished(self) -> bool:
        return bool(self._predicate())


class ProgressThread(LeaderFollowers):
    """Polls, on the thread of whoever waits or on one of its own.

    Args:
        poll: handles what there is to handle, returns whether there was anything; thread-safe.
        busy: whether a message is under way that needs this rank's polling.
        tick: called by the own thread every few milliseconds.
        name: of the own thread.
    """

    def __init__(
        self,
        poll: Callable[[], bool],
        busy: Callable[[], bool],
        tick: Callable[[], None],
        name: str,
    ) -> None:
        super().__init__()
        self._leading: set[int] = set()  # threads that poll
        self._poll = poll
        self._busy = busy
        self._tick = tick
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the own thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the own thread."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def until(self, predicate: Callable[[], object], seconds: float) -> bool:
        """Block until ``predicate`` holds or the time is over, return whether it holds.

        For rare occasions: it polls beside whoever else does. The caller holds no lock.
        """
        condition = _Condition(predicate)
        self._lead(condition, time.monotonic() + min(seconds, MAX_SECONDS))
        return condition.finished

    def _lead(self, awaited: PolledMessage | _Condition, end: float) -> None:
        pauses = _Pauses()
        thread = threading.get_ident()
        self._leading.add(thread)
        try:
            while not awaited.finished:
                if self._poll():
                    pauses.reset()
                    continue
                remaining = end - time.monotonic()
                if remaining <= 0:
                    return
                pauses.rest(remaining)
        finally:
            self._leading.discard(thread)

    def _run(self) -> None:
        seen, pause = 0, 0.0
        while not self._stop.wait(pause):
            self._tick()
            # Not whether the baton is held: after Ctrl-C it may be, with nobody who polls. Who has
            # waited once will again.
            if self._leading or self._waits != seen:
                seen, pause = self._waits, _AWAY_SECONDS
            elif self._poll():
                pause = 0.0
            else:
                limit = _BUSY_SECONDS if self._busy() else _IDLE_SECONDS
                pause = min(1.5 * pause + 2e-5, limit)
