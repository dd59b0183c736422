"""``Clock``: what time it is for a rank, and how its threads wait.

Code that waits, or that compares times, asks the clock of its job (``job.clock``). That is the
system's, but for ranks that are simulated in virtual time: theirs jumps from one event to the next.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol


class Lock(Protocol):
    """A lock as ``threading.Lock`` makes it."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, and wait for that up to ``timeout`` seconds; return whether it was taken."""

    def release(self) -> None:
        """Give it back, from whichever thread; RuntimeError if nobody has it."""

    def locked(self) -> bool:
        """Whether somebody has it."""

    def __enter__(self) -> bool:
        """Take it."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give it back."""


class Queue(Protocol):
    """A queue as ``queue.SimpleQueue`` is one."""

    def put(self, item: Any) -> None:
        """Add an item; never blocks."""

    def get(self) -> Any:
        """Take the oldest item; blocks until there is one."""


class Task(Protocol):
    """A thread that was started."""

    def join(self, timeout: float) -> None:
        """Wait for its end, no longer than so many seconds."""

    def is_alive(self) -> bool:
        """Whether it has not ended."""


class Clock:
    """The system's time and threads.

    Attributes:
        now: seconds since some moment, the same for all ranks of a host: ``time.monotonic``.
        nanoseconds: the same as an integer.
        sleep: do nothing for so many seconds.
        lock: make a lock, which may be held while its thread waits for something else.
        queue: make a queue between threads.
        slice_seconds: for how long a thread waits at most before it sees whether an interrupt came.
    """

    now: Callable[[], float] = staticmethod(time.monotonic)
    nanoseconds: Callable[[], int] = staticmethod(time.monotonic_ns)
    sleep: Callable[[float], None] = staticmethod(time.sleep)
    lock: Callable[[], Lock] = staticmethod(threading.Lock)
    queue: Callable[[], Queue] = staticmethod(queue.SimpleQueue)

    slice_seconds = 0.2

    def start(self, body: Callable[[], None], name: str) -> Task:
        """Call ``body`` on a thread of its own, which does not keep the process from ending."""
        thread = threading.Thread(target=body, name=name, daemon=True)
        thread.start()
        return thread

    def run(self, tasks: Sequence[Task]) -> None:
        """Have threads go on that nobody else lets do so, until those of a list have ended."""

    def current(self) -> Task:
        """The thread of the caller."""
        return threading.current_thread()


WALL = Clock()
