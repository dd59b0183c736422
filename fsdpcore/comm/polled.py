"""``PolledMessage``: a message whose waiting thread polls, where no other one has to wake."""

from __future__ import annotations

import contextlib
import threading
from typing import Protocol

from fsdpcore.core.work import Pending


class MessagePoller(Protocol):
    """Who looks after the messages of a rank, on the threads that wait for them."""

    def wait(self, message: PolledMessage, seconds: float, /) -> None:
        """Return once the message has finished, or the time is over."""


class PolledMessage(Pending):
    """A message whose waiting thread looks after all messages meanwhile."""

    __slots__ = ("_poller",)

    def __init__(self, poller: MessagePoller) -> None:
        super().__init__()
        self._poller = poller

    def settle(self, seconds: float) -> bool:
        if not self.finished:
            self._poller.wait(self, seconds)
        return self.finished

    def follow(self, seconds: float) -> None:
        """Block until the message has finished, ``poke`` was called, or the time is over."""
        if self._gate.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)) and self.finished:
            with contextlib.suppress(RuntimeError):  # finished between a poke and here
                self._gate.release()

    def poke(self) -> None:
        """Wake one thread that follows."""
        with contextlib.suppress(RuntimeError):  # awake already
            self._gate.release()
