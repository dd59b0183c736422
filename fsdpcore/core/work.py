"""Handles of operations in flight, and the thread that runs asynchronous ones in issue order."""

from __future__ import annotations

import copy
import functools
import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from fsdpcore.core.clock import WALL, Clock, Lock
from fsdpcore.core.errors import (
    ArgumentError,
    ClosedError,
    CommTimeoutError,
    CommunicationError,
    RendezvousError,
    StateError,
    in_words,
)

_LOG = logging.getLogger("fsdpcore")

# How much may be queued on an executor before starting more of it blocks.
MAX_QUEUED = 1024
MAX_QUEUED_BYTES = 1 << 30

SLICE_SECONDS = Clock.slice_seconds
# Between two looks whether something is still wanted.
_LOOK_SECONDS = 0.02


E = TypeVar("E", bound=BaseException)


def fresh(error: E) -> E:
    """Return a copy of a stored error to raise, so that tracebacks do not pile up on it."""
    again = copy.copy(error)
    again.__cause__ = error.__cause__
    return again.with_traceback(None)


class Deadline:
    """A point in time, on a clock, by which an operation must have ended.

    Args:
        seconds: from now.
        clock: of the job.
        given_up: says why nobody wants the operation any more, and "" as long as somebody does.
            Whoever asks how much time is left gets a RendezvousError with that.
    """

    def __init__(
        self, seconds: float, clock: Clock = WALL, given_up: Callable[[], str] | None = None
    ) -> None:
        try:
            # NumPy's kinds of numbers become one that the system's calls take.
            number = float(seconds) if seconds >= 0 else math.nan
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not number >= 0:
            raise ArgumentError(f"timeout must be a number of seconds >= 0, got {seconds!r}")
        self.seconds = number
        self.clock = clock
        self.given_up = given_up
        self._now = clock.now
        self._end = self._now() + number

    def remaining(self) -> float:
        """Seconds left, never negative."""
        if self.given_up is not None and (why := self.given_up()):
            raise RendezvousError(why)
        return max(0.0, self._end - self._now())

    def patience(self) -> float:
        """Seconds left; and no more than one may wait before it sees that nobody wants it."""
        left = self.remaining()
        return left if self.given_up is None else min(left, _LOOK_SECONDS)

    def longer(self, seconds: float) -> Deadline:
        """Return one that ends so many seconds later."""
        return Deadline(self.remaining() + seconds, self.clock, self.given_up)

    def slice(self) -> float:
        """Seconds left, and no more than a thread may wait at a time."""
        return min(self.remaining(), self.clock.slice_seconds)


class Pending:
    """One message that a transport has been asked to move, finished by the transport.

    Once ``finish`` was called, the transport does not touch the message's buffer any more.

    Args:
        lock: makes the lock that is waited on: that of the job's clock.

    Attributes:
        finished: it has ended, well or badly; in the latter case, ``error`` says why.
        polled: who waits for it looks after the messages of the rank meanwhile.
    """

    polled: ClassVar[bool] = False
    __slots__ = ("_gate", "_watchers", "error", "finished")

    def __init__(self, lock: Callable[[], Lock] = threading.Lock) -> None:
        self.finished = False
        self.error: BaseException | None = None
        self._watchers: tuple[Pending, ...] = ()
        # A bare lock, held until the end: waiting on it costs a fraction of a threading.Event.
        self._gate = lock()
        self._gate.acquire()

    def finish(self, error: BaseException | None = None) -> None:
        """Mark as done, or as failed with ``error``. Only the first call counts."""
        if not self.finished:
            self.error = error
            self.finished = True
            try:  # noqa: SIM105 (a context manager would take longer than all the rest)
                self._gate.release()
            except RuntimeError:  # two threads finished it at once
                pass
            for watcher in self._watchers:
                watcher.finish()

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

    def watch(self, signal: Pending) -> None:
        """Have ``signal`` finish as soon as this has, at once if it has already."""
        self._watchers = (*self._watchers, signal)
        if self.finished:
            signal.finish()

    def unwatch(self, signal: Pending) -> None:
        """Forget what ``watch`` was asked for."""
        self._watchers = tuple(each for each in self._watchers if each is not signal)

    def signal(self, lock: Callable[[], Lock]) -> Pending:
        """Make one for ``watch``, which is waited for as this one is: by polling, where that is."""
        return Pending(lock)

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

    _clock: Clock = WALL  # by which it is waited for

    @abstractmethod
    def done(self) -> bool:
        """Return whether the operation has ended, well or badly; never blocks."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> Any:
        """Block until the operation has ended and return its result, as often as it is called.

        What goes wrong with the operation is raised here, at every call, and nowhere else; it is
        not lost where nobody waits: the backend is broken then, so that its next call raises, and
        if there is none, closing it logs the error (logger "fsdpcore").

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

    def _words(self) -> str:
        """What was started, for people."""
        return "an operation"

    # What ``wait_any`` needs to know.

    def _ends(self) -> list[Pending]:
        """What finishes until it has ended; nothing where ``done`` has to be asked again."""
        return []

    def _limit(self) -> float:
        """For how many seconds ``wait`` waits by default."""
        return math.inf

    def _blocks(self, waiting: bool) -> None:  # noqa: B027 (most have nobody to tell)
        """A thread begins, or ceases, to wait for it; said to ranks that ask for this one."""

    def _timed_out(self, limit: float) -> CommTimeoutError:
        """The error of who has waited for ``limit`` seconds."""
        return CommTimeoutError(f"{self._words()} is not finished after waiting {limit:g} s")

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__}: {self._words()}, {'ended' if self.done() else 'under way'}>"
        )


class Failures:
    """Whether anybody has been told of a failure of an executor's tasks, and of which."""

    def __init__(self) -> None:
        self._first = ""  # words, not the error: its traceback would keep arrays alive
        self._told = False

    def note(self, text: str, error: BaseException) -> None:
        """A task has failed."""
        self._first = self._first or f"{text} failed: {in_words(error)}"

    def tell(self) -> None:
        """The failure of a task was raised where somebody waited for it."""
        self._told = True

    def log(self) -> None:
        """Log the first failure, unless a failure was raised or logged before."""
        if self._first and not self._told:
            _LOG.error("Nobody waited for an operation that was started: %s", self._first)
            self._told = True


class TaskWork(Work):
    """A function that runs on an ``OrderedExecutor``."""

    def __init__(
        self,
        task: Callable[[], Any],
        text: str,
        nbytes: int = 0,
        failures: Failures | None = None,
        clock: Clock = WALL,
        waited: Callable[[int], None] | None = None,
    ) -> None:
        self._waited = waited
        self._nbytes = nbytes
        self._task: Callable[[], Any] | None = task
        self._text = text
        self._failures = failures or Failures()
        self._clock = clock
        self._ended = Pending(clock.lock)
        self._value: Any = None
        self._error: BaseException | None = None

    def _run(self, ending: Callable[[], None]) -> None:
        """Run the function on this thread, keep what comes out, call ``ending``, wake waiters."""
        assert self._task is not None
        try:
            self._value = self._task()
        except BaseException as error:  # delivered at wait()
            self._error = error
            self._failures.note(self._text, error)
        self._task = None  # the arrays that it holds can be freed
        ending()
        self._ended.finish()

    def _fail(self, error: BaseException) -> None:
        """End without running, because of ``error``."""
        self._error = error
        self._task = None
        self._ended.finish()

    def done(self) -> bool:
        return self._ended.finished

    def _ends(self) -> list[Pending]:
        return [self._ended]

    def _words(self) -> str:
        return self._text

    def wait(self, timeout: float | None = None) -> Any:
        if not self._ended.finished:
            self._settle(Deadline(math.inf if timeout is None else timeout, self._clock))
        if self._error is not None:
            self._failures.tell()
            error = self._error
            raise fresh(error) if isinstance(error, CommunicationError) else error
        return self._value

    def _settle(self, deadline: Deadline) -> None:
        start = self._clock.nanoseconds()
        while not self._ended.settle(deadline.slice()):
            if not deadline.remaining():
                raise self._timed_out(deadline.seconds)
        if self._waited is not None:
            self._waited(start)


class OrderedExecutor:
    """Runs tasks one after the other, in the order of their submission, on a thread of its own.

    A task that fails does not keep the later ones from running. Its error is raised by ``wait``,
    every time; if nobody has waited for any failed task when the executor is closed, the first
    failure goes to the log (logger "fsdpcore", level ERROR).
    """

    def __init__(
        self,
        name: str,
        max_tasks: int = MAX_QUEUED,
        max_bytes: int = MAX_QUEUED_BYTES,
        clock: Clock = WALL,
        waited: Callable[[int], None] | None = None,
    ) -> None:
        self._waited = waited  # told when a thread has waited for a task, since when
        self._max_tasks = max_tasks
        self._max_bytes = max_bytes
        self._clock = clock
        self._tasks = clock.queue()
        self._lock = threading.Lock()  # of the following; nobody waits while holding it
        self._open = 0
        self._bytes = 0
        self._closed = False
        self._room: Pending | None = None  # finished when there may be more of it
        self._failures = Failures()
        self._thread = clock.start(self._run, name)

    @property
    def idle(self) -> bool:
        """Whether everything that was submitted has ended."""
        with self._lock:
            return self._open == 0

    def make_room(self, nbytes: int, seconds: float, text: str) -> None:
        """Wait until one more task may be submitted, or the executor is closed.

        A task of any size is let in where nothing else is queued. For one caller at a time.

        Args:
            nbytes: memory that the task will hold until it has run.
            seconds: how long to wait at most.
            text: what it is, for the error.

        Raises:
            CommTimeoutError: there was no room for so long.
        """
        deadline = Deadline(seconds, self._clock)
        while True:
            with self._lock:
                if not self._full(nbytes):
                    return
                room = self._room = self._room or Pending(self._clock.lock)
            if not deadline.remaining():
                raise CommTimeoutError(
                    f"{text} was not started: for {seconds:g} s there was no room behind "
                    f"{self._open} operations that have not ended ({self._bytes} bytes; at "
                    f"most {self._max_tasks} operations or {self._max_bytes} bytes may be "
                    "queued); wait() for some before starting more"
                )
            # In slices, so that an interrupt that comes just before a wait is not missed.
            room.settle(deadline.slice())

    def _full(self, nbytes: int) -> bool:
        if self._open == 0 or self._closed:
            return False
        return self._open >= self._max_tasks or self._bytes + nbytes > self._max_bytes

    def submit(self, task: Callable[[], Any], text: str, nbytes: int = 0) -> TaskWork:
        """Queue ``task``; never blocks. After ``close`` it fails with ``ClosedError``.

        Args:
            task: what to run.
            text: what it is, for errors.
            nbytes: memory that it holds until it has run, as told to ``make_room``.
        """
        work = TaskWork(task, text, nbytes, self._failures, self._clock, self._waited)
        with self._lock:
            if self._closed:
                work._fail(ClosedError(f"{text} was started after its backend was closed"))
            else:
                self._open += 1
                self._bytes += nbytes
                self._tasks.put(work)
        return work

    def _run(self) -> None:
        while (work := self._tasks.get()) is not None:
            work._run(functools.partial(self._count_down, work._nbytes))
            del work  # or the last task's arrays would live until the next one

    def _count_down(self, nbytes: int) -> None:
        with self._lock:
            self._open -= 1
            self._bytes -= nbytes
            self._make_known()

    def _make_known(self) -> None:
        """Have whoever waits in ``make_room`` look again; with the lock held."""
        room, self._room = self._room, None
        if room is not None:
            room.finish()

    def close(self, seconds: float) -> None:
        """Let the queued tasks end, then stop the thread; wait for that up to ``seconds``.

        Whoever waits in ``make_room`` goes on at once. Logs a failure that nobody was told of.
        """
        with self._lock:
            self._closed = True
            self._make_known()
            self._tasks.put(None)
        if self._thread is not self._clock.current():
            self._thread.join(min(seconds, threading.TIMEOUT_MAX))
        self._failures.log()
