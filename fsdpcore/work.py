"""Handles of operations in flight, and the thread that runs asynchronous ones in issue order."""

from __future__ import annotations

import contextlib
import copy
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from fsdpcore.errors import (
    ArgumentError,
    ClosedError,
    CommTimeoutError,
    CommunicationError,
    StateError,
)


def fresh(error: BaseException) -> BaseException:
    """Return a copy of a stored error to raise, so that tracebacks do not pile up on it."""
    again = copy.copy(error)
    again.__cause__ = error.__cause__
    return again.with_traceback(None)


class Deadline:
    """A point in time by which an operation must have ended."""

    def __init__(self, seconds: float) -> None:
        try:
            # NumPy's kinds of numbers become one that the system's calls take.
            number = float(seconds) if seconds >= 0 else math.nan
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not number >= 0:
            raise ArgumentError(f"timeout must be a number of seconds >= 0, got {seconds!r}")
        self.seconds = number
        self._end = time.monotonic() + number

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())


class Pending:
    """One message that a transport has been asked to move, finished by the transport.

    Once ``finish`` was called, the transport does not touch the message's buffer any more.
    """

    __slots__ = ("_gate", "error", "finished")

    def __init__(self) -> None:
        self.finished = False
        self.error: BaseException | None = None
        # A bare lock, held until the end: waiting on it costs a fraction of a threading.Event.
        self._gate = threading.Lock()
        self._gate.acquire()

    def finish(self, error: BaseException | None = None) -> None:
        """Mark as done, or as failed with ``error``. Only the first call counts."""
        if not self.finished:
            self.error = error
            self.finished = True
            with contextlib.suppress(RuntimeError):  # two threads finished it at once
                self._gate.release()

    def settle(self, seconds: float) -> bool:
        """Wait up to ``seconds``; return whether it finished, well or badly."""
        if not self.finished:
            if not self._gate.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
                return False
            self._gate.release()
        return True

    def join(self, seconds: float) -> bool:
        """Wait up to ``seconds``; return whether it finished, raise the error if it failed."""
        if not self.settle(seconds):
            return False
        if self.error is not None:
            raise fresh(self.error)
        return True

    def cancel(self) -> bool:
        """Give up on the message. On return the transport does not touch its buffer any more.

        Never raises. A message that can no longer be withdrawn because its end is near is waited
        for instead, and is ``finished`` on return.

        Returns:
            True if it has finished, or was withdrawn before any peer knew of it, so that the
            backend stays usable; False if a peer may be left with half of it.
        """
        return self.finished


class Work(ABC):
    """An operation that was started; ``wait`` ends it."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the operation has ended, well or badly; never blocks."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> Any:
        """Block until the operation has ended and return its result, as often as it is called.

        Args:
            timeout: seconds to wait; by default as long as the operation itself may take.

        Raises:
            CommTimeoutError: the time is over; the operation goes on and can be waited for again.
            CommunicationError: the operation failed.
        """

    def result(self) -> Any:
        """Return the result of an operation that has ended.

        Raises:
            StateError: it has not ended yet.
        """
        if not self.done():
            raise StateError("the operation has not ended; call wait() first")
        return self.wait()


class TaskWork(Work):
    """A function that runs on an ``OrderedExecutor``."""

    def __init__(self, task: Callable[[], Any], text: str) -> None:
        self._task: Callable[[], Any] | None = task
        self._text = text
        self._ended = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self, ending: Callable[[], None]) -> None:
        """Run the function on this thread, keep what comes out, call ``ending``, wake waiters."""
        assert self._task is not None
        try:
            self._value = self._task()
        except BaseException as error:  # delivered at wait()
            self._error = error
        ending()
        self._end()

    def fail(self, error: BaseException) -> None:
        """End without running, because of ``error``."""
        self._error = error
        self._end()

    def _end(self) -> None:
        self._task = None  # the arrays that it holds can be freed
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Any:
        limit = math.inf if timeout is None else Deadline(timeout).remaining()
        if not self._ended.wait(min(limit, threading.TIMEOUT_MAX)):
            raise CommTimeoutError(f"{self._text} is not finished after waiting {timeout} s")
        if self._error is not None:
            error = self._error
            raise fresh(error) if isinstance(error, CommunicationError) else error
        return self._value


class OrderedExecutor:
    """Runs tasks one after the other, in the order of their submission, on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[TaskWork | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether everything that was submitted has ended."""
        with self._lock:
            return self._open == 0

    def submit(self, task: Callable[[], Any], text: str) -> TaskWork:
        """Queue ``task``; never blocks. After ``close`` it fails with ``ClosedError``."""
        work = TaskWork(task, text)
        with self._lock:
            if self._closed:
                work.fail(ClosedError(f"{text} was started after its backend was closed"))
            else:
                self._open += 1
                self._tasks.put(work)
        return work

    def _run(self) -> None:
        while (work := self._tasks.get()) is not None:
            work.run(self._count_down)
            del work  # or the last task's arrays would live until the next one

    def _count_down(self) -> None:
        with self._lock:
            self._open -= 1

    def close(self, seconds: float) -> None:
        """Let the queued tasks end, then stop the thread; wait for that up to ``seconds``."""
        with self._lock:
            self._closed = True
            self._tasks.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(min(seconds, threading.TIMEOUT_MAX))
