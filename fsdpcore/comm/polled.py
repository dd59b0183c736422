"""Messages whose waiting threads poll for them: one thread of a rank leads, the others follow.

A thread that watches for all others would have to wake them: two changes of thread and of the
interpreter's lock for every message.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from fsdpcore.core.clock import Lock
from fsdpcore.core.work import Pending

MAX_SECONDS = 1e6
"""Of a wait; system calls that count milliseconds would overflow beyond."""


class LeaderFollowers(ABC):
    """The threads of a rank that wait for messages.

    The first of them leads: it polls, and handles what comes for anybody. When its own message has
    finished, the first of its followers takes over. (Schmidt et al., 2000, Leader/Followers.)
    """

    def __init__(self) -> None:
        # Held by the leader.
        self._baton = threading.Lock()
        self._followers: list[PolledMessage] = []
        # How often a thread has led: who has waited once will again.
        self._waits = 0

    def wait(self, awaited: PolledMessage, seconds: float) -> None:
        """Block until ``awaited`` has finished or the time is over."""
        end = time.monotonic() + min(seconds, MAX_SECONDS)
        while not awaited.finished:
            if self._baton.acquire(blocking=False):
                try:
                    self._lead(awaited, end)
                finally:
                    self._waits += 1
                    self._baton.release()
                    self._hand_over()
                    self._stepped_down()
            else:
                self._follow(awaited, end)
            if time.monotonic() >= end:
                return

    def _follow(self, awaited: PolledMessage, end: float) -> None:
        self._followers.append(awaited)
        try:
            # Who leads looks for followers after it has put down the baton.
            if self._baton.locked():
                awaited.follow(max(end - time.monotonic(), 0.0))
        finally:
            self._followers.remove(awaited)
            if awaited.finished and not self._baton.locked():
                self._hand_over()  # it may have been poked to lead, and finished just then

    def _hand_over(self) -> None:
        """Wake the first follower that still waits, to lead."""
        waiting = [each for each in self._followers if not each.finished]
        for follower in waiting[:1]:
            follower.poke()

    @abstractmethod
    def _lead(self, awaited: PolledMessage, end: float) -> None:
        """Poll for all until ``awaited`` has finished, or ``time.monotonic()`` is at ``end``."""

    def _stepped_down(self) -> None:  # noqa: B027 (there may be nothing to do)
        """Called when the baton is free again, with or without a follower that takes it."""


class PolledMessage(Pending):
    """A message whose waiting thread looks after all messages meanwhile."""

    polled = True
    __slots__ = ("_poller",)

    def __init__(self, poller: LeaderFollowers) -> None:
        super().__init__()
        self._poller = poller

    def settle(self, seconds: float) -> bool:
        if not self.finished:
            self._poller.wait(self, seconds)
        return self.finished

    def signal(self, lock: Callable[[], Lock]) -> PolledMessage:
        return PolledMessage(self._poller)

    def follow(self, seconds: float) -> None:
        """Block until the message has finished, ``poke`` was called, or the time is over."""
        if self._gate.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)) and self.finished:
            with contextlib.suppress(RuntimeError):  # finished between a poke and here
                self._gate.release()

    def poke(self) -> None:
        """Wake one thread that follows."""
        with contextlib.suppress(RuntimeError):  # awake already
            self._gate.release()
