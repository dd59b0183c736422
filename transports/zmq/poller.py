"""Who looks after the sockets of a rank: the thread that waits for a message, or one of its own.

A message that has to wake a watching thread, which then wakes the waiting one, costs two changes
of thread and of the interpreter lock. So of the threads that wait one takes over and polls the
sockets itself (``comm/polled.py``). The own thread steps aside as long as somebody waits, and a
moment longer, since who has waited once will wait again. It comes back when the program computes,
so that transfers go on meanwhile.

The descriptor of a ZeroMQ socket signals changes only, and any use of the socket may swallow such
a signal. So whoever reads from one goes on until nothing is left to read, or asks to have that
done. Whatever another thread finishes for the polling one wakes it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from fsdpcore.comm.polled import MAX_SECONDS, LeaderFollowers, PolledMessage
from fsdpcore.core.clock import Lock
from fsdpcore.core.errors import CommunicationError

# How long the own thread stays away after somebody has waited; twice as long for every time that
# it looked and somebody had waited again, up to the latter. Longer, and a transfer that runs beside
# a computation stands still for longer; shorter, and it gets in the way of the next wait.
_AWAY_SECONDS, _LONGEST_AWAY_SECONDS = 0.002, 0.02
# How long a waiting thread looks for input before it goes to sleep: as long as an answer takes from
# a rank that is not busy, since being woken takes 20 us more.
_LOOK_SECONDS = 100e-6
# What another thread needs to wake up and take the lock.
_CHANCE_SECONDS = 50e-6


class Waker:
    """A descriptor that one thread polls, and by which others wake it."""

    def __init__(self) -> None:
        self._inside, self._outside = socket.socketpair()
        self._inside.setblocking(False)
        self._outside.setblocking(False)

    def fileno(self) -> int:
        """The descriptor to poll for input."""
        return self._inside.fileno()

    def wake(self) -> None:
        """Wake whoever polls, or whoever will poll next."""
        # It was woken already, many times over; or is closed, by who ended while another thread
        # stepped down.
        with contextlib.suppress(OSError):
            self._outside.send(b"!")

    def clear(self) -> None:
        """Forget the calls of ``wake`` so far."""
        with contextlib.suppress(BlockingIOError):
            self._inside.recv(4096)

    def close(self) -> None:
        """Free the descriptors."""
        self._inside.close()
        self._outside.close()


class AwaitedMessage(PolledMessage):
    """A message whose end the poller hears of, whichever thread comes to it."""

    __slots__ = ()
    _poller: Poller

    def finish(self, error: BaseException | None = None) -> None:
        super().finish(error)
        self._poller.finished(self)

    def signal(self, lock: Callable[[], Lock]) -> AwaitedMessage:
        return AwaitedMessage(self._poller)


class Poller(LeaderFollowers):
    """Polls descriptors and calls what is registered for those that are ready.

    Args:
        lock: held around all calls of handlers and of ``tick``; whoever changes what ``until``
            waits for holds it too.
        tick: called by the own thread after every round; returns after how many seconds it wants
            to be called again, or None if only after the next event.
        ended: called by the own thread with the error by which it ends.
        name: of the own thread.
    """

    def __init__(
        self,
        lock: Any,  # a threading.RLock, which is a function in the type stubs of some versions
        tick: Callable[[], float | None],
        ended: Callable[[BaseException], None],
        name: str,
    ) -> None:
        super().__init__()
        self._lock = lock
        self._tick, self._ended = tick, ended
        self._changed = threading.Condition(lock)
        self._expected = 0
        self._waker, self._own_waker = Waker(), Waker()
        # What a waiting thread polls; the own thread when it is aside; and when it is not.
        self._leaders, self._aside, self._everything = _PollSet(), _PollSet(), _PollSet()
        self._leaders.add(self._waker.fileno(), self._waker.clear)
        self._aside.add(self._own_waker.fileno(), self._own_waker.clear)
        self._everything.add(self._own_waker.fileno(), self._own_waker.clear)
        self._unfinished: list[Callable[[], None]] = []
        self._awaited: PolledMessage | None = None
        self._leading = False
        self._watching = False
        self._asleep = False
        self._rest = _AWAY_SECONDS
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def add(self, descriptor: int, handler: Callable[[], None]) -> None:
        """Register what to call when ``descriptor`` has input; before any thread polls."""
        self._leaders.add(descriptor, handler)
        self._everything.add(descriptor, handler)

    def remind(self) -> None:
        """Have ``tick`` called soon."""
        self._own_waker.wake()

    def start(self) -> None:
        """Start the own thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the own thread, once no other thread polls any more; frees what is owned here.

        All messages must have finished, and no more may be waited for.
        """
        self._stopping = True
        self._own_waker.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._baton.acquire(timeout=1.0)
        self._waker.close()
        self._own_waker.close()

    # Waiting.

    def _lead(self, awaited: PolledMessage, end: float) -> None:
        try:
            self._leading = True
            if self._watching:
                self._own_waker.wake()
            while not awaited.finished:
                remaining = end - time.monotonic()
                # First say what is awaited, then look: finished() does it the other way around.
                self._awaited = awaited
                limit = 0.0 if self._unfinished else max(remaining, 0.0)
                ready = [] if awaited.finished else self._leaders.look(limit)
                self._awaited = None
                self._handle(ready)
                if remaining <= 0:
                    break
        except BaseException:  # Ctrl-C: what was ready then has to be looked at again
            self._awaited = None
            with self._lock:
                self._unfinished += self._leaders.handlers()
            raise
        finally:
            self._leading = False

    def _stepped_down(self) -> None:
        if self._asleep or self._unfinished or self._expected:
            self._own_waker.wake()

    def again(self, handler: Callable[[], None]) -> None:
        """Have ``handler`` called once more, after other threads got their chance at the lock.

        The caller holds the lock.
        """
        self._unfinished.append(handler)
        (self._waker if self._leading else self._own_waker).wake()

    def finished(self, message: PolledMessage) -> None:
        """Note that a message has finished; wakes the thread that waits for it."""
        if self._awaited is message:
            self._waker.wake()

    def until(self, predicate: Callable[[], object], seconds: float) -> bool:
        """Block until ``predicate`` holds or the time is over, return whether it holds.

        It is looked at under the lock whenever something has happened. Before ``start``, the
        calling thread polls.
        """
        seconds = min(seconds, MAX_SECONDS)
        with self._lock:
            if self._thread.ident is None:
                return self._poll_until(predicate, seconds)
            self._expected += 1
            self._own_waker.wake()  # from its rest: perhaps no other thread polls meanwhile
            try:
                return bool(self._changed.wait_for(predicate, seconds))
            finally:
                self._expected -= 1

    def _poll_until(self, predicate: Callable[[], object], seconds: float) -> bool:
        end, due = time.monotonic() + seconds, None
        while not predicate():
            remaining = end - time.monotonic()
            if remaining <= 0:
                return False
            limit = 0.0 if self._unfinished else remaining if due is None else min(due, remaining)
            self._handle(self._everything.poll(limit))
            due = self._tick()
        return True

    def changed(self) -> None:
        """Have ``until`` look again; the caller holds the lock."""
        if self._expected:
            self._changed.notify_all()

    # The own thread.

    def _run(self) -> None:
        try:
            self._look_after_all()
        except BaseException as error:
            self._ended(error)  # who waits would do so for ever
            raise

    def _look_after_all(self) -> None:
        seen, away, due = 0, False, None
        while not self._stopping:
            same = self._waits == seen
            seen = self._waits
            # Away while another thread polls, and until none has for one turn of the loop; but not
            # where somebody waits in ``until``, who does not poll.
            if not self._leading and (same or not away or self._expected):
                away = False
                self._rest = _AWAY_SECONDS
                ready = self._watch_all(due)
                away = self._leading
            else:
                ready = self._stay_away(due, long=same and away)
                away = True
            self._handle(ready)
            with self._lock:
                due = self._tick()

    def _watch_all(self, due: float | None) -> list[Callable[[], None]]:
        self._watching = True
        # A thread that begins to lead after this line sees the flag and wakes.
        limit = 0.0 if self._unfinished else due
        ready = [] if self._leading else self._everything.poll(limit)
        self._watching = False
        return ready

    def _stay_away(self, due: float | None, *, long: bool) -> list[Callable[[], None]]:
        limit: float | None = self._rest
        self._rest = min(2 * self._rest, _LONGEST_AWAY_SECONDS)
        if long:
            # The same wait as a turn ago: sleep until its end, of which the waker will tell.
            self._asleep = True
            if self._leading:
                limit = due
        elif self._unfinished and not self._leading:
            limit = 0.0
        ready = self._aside.poll(limit)
        self._asleep = False
        return ready

    def _handle(self, ready: list[Callable[[], None]]) -> None:
        if self._unfinished:
            time.sleep(_CHANCE_SECONDS)
        with self._lock:
            todo, self._unfinished = [*self._unfinished, *ready], []
            try:
                while todo:
                    todo[0]()
                    del todo[0]
            finally:  # after Ctrl-C they have to be called again
                self._unfinished[:0] = todo
            self.changed()


class _PollSet:
    """A set of descriptors, each with what to call when it has input."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[], None]] = {}
        self._poll = select.poll()

    def add(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, select.POLLIN)

    def handlers(self) -> list[Callable[[], None]]:
        """What is called for all of them."""
        return list(self._handlers.values())

    def look(self, seconds: float) -> list[Callable[[], None]]:
        """As ``poll``, but stay awake for a moment, with the core given away in between."""
        if seconds > 0:
            # A thread that does not get the interpreter back at once does not look again.
            end = time.monotonic() + _LOOK_SECONDS
            while not (ready := self.poll(0.0)):
                if time.monotonic() > end:
                    return self.poll(seconds)
                os.sched_yield()
            return ready
        return self.poll(seconds)

    def poll(self, seconds: float | None) -> list[Callable[[], None]]:
        """Wait up to ``seconds`` for input; return what to call, possibly nothing."""
        try:
            ready = self._poll.poll(None if seconds is None else seconds * 1000)
        except OSError as error:  # pragma: no cover (never seen)
            raise CommunicationError(f"the sockets cannot be polled: {error}") from error
        return [self._handlers[found] for found, _ in ready if found in self._handlers]
