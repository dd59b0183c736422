"""``VirtualClock``: many threads carried by one, on a clock that jumps.

A fiber runs until it waits. When all do, the clock jumps to what happens next: a fiber's sleep is
over, a deadline passes, or something that a transport has put into the calendar. So hours pass in
an instant, and a run depends on nothing but its seed.

With seed 0, fibers go on in the order in which they could. With others the order is drawn, also
that of events at one moment: each seed is another schedule of the same program, and the same one
whenever it is run again.

What a fiber computes takes no time, unless the clock measures it: then it takes as long as the
thread's processor did, and no two runs are quite the same.
"""

from __future__ import annotations

import contextvars
import heapq
import itertools
import math
import random
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from greenlet import getcurrent, greenlet

from fsdpcore.core.clock import Clock, Task
from fsdpcore.core.collector import collector_paused
from fsdpcore.core.errors import StateError

_Event = Callable[[], None]

_LOOK_SECONDS = 1e-6


class _Carrier(greenlet):
    """What runs a fiber, until that ends.

    Nothing keeps it longer, so that no greenlet outlives its thread.
    """

    def __init__(self, fiber: Fiber, body: _Event, hub: greenlet) -> None:
        super().__init__(body, hub)
        self.fiber = fiber
        # As a thread of the system would, it begins with the settings of who starts it.
        self.gr_context = fiber.context


class Fiber:
    """A thread of virtual time; ``VirtualClock.start`` makes it.

    Attributes:
        name: for messages.
        context: the variables with which it begins.
        carrier: what runs it, from its first turn to its end.
        among: the fibers that wait for the same as this one; None while it does not wait.
        woken: that is what ended its last wait, not a deadline.
        deadline: when its wait ends at the latest.
        alarm: the time of its entry in the calendar, which stays there when a wait has ended: the
            next one's deadline is later, as a rule. Infinite where there is none.
    """

    def __init__(self, body: _Event, name: str, clock: VirtualClock) -> None:
        self.name = name
        self.context = contextvars.copy_context()
        self.carrier: _Carrier | None = None
        self.among: deque[Fiber] | None = None
        self.woken = False
        self.deadline = self.alarm = math.inf
        self._body: _Event | None = body
        self._clock = clock
        self._joining: deque[Fiber] = deque()

    def go_on(self, hub: greenlet) -> None:
        """Run until it waits, or ends."""
        if self.carrier is None:
            self.carrier = _Carrier(self, self._run, hub)
        self.carrier.switch()

    def _run(self) -> None:
        body = self._body
        assert body is not None
        try:
            body()
        finally:
            self._body = self.carrier = None
            while self._joining:
                self._clock.wake(self._joining)

    def end(self) -> None:
        """Have it end where it waits."""
        if self.carrier is None:
            self._body = None  # it has not begun
        while self.carrier is not None:
            self.carrier.throw()

    def join(self, timeout: float = math.inf) -> None:
        """Wait for its end, no longer than so many seconds."""
        if not isinstance(getcurrent(), _Carrier):
            return  # nothing goes on while whoever carries all of them waits
        end = self._clock.now() + timeout
        while self.is_alive() and self._clock.now() < end:
            self._clock.suspend(self._joining, end)

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._body is not None


class _Lock:
    """A lock between fibers; see ``core.clock.Lock``."""

    __slots__ = ("_clock", "_held", "_waiting")

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._held = False
        self._waiting: deque[Fiber] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._held and blocking:
            self._clock.catch_up()
        if not self._held:
            self._held = True
            return True
        if not blocking:
            return False
        clock = self._clock
        if timeout == 0:  # a look takes time, or who looks again and again would for ever
            clock.sleep(_LOOK_SECONDS)
            return self.acquire(blocking=False)
        # Whoever gives it back hands it to the one that it wakes.
        return clock.suspend(self._waiting, math.inf if timeout < 0 else clock.now() + timeout)

    def release(self) -> None:
        if not self._held:
            raise RuntimeError("release unlocked lock")
        if self._waiting:
            self._clock.wake(self._waiting)
        else:
            self._held = False

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class _Queue:
    """A queue between fibers; see ``core.clock.Queue``."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._items: deque[Any] = deque()
        self._waiting: deque[Fiber] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting:
            self._clock.wake(self._waiting)

    def get(self) -> Any:
        if not self._items:
            self._clock.catch_up()
        while not self._items:
            self._clock.suspend(self._waiting, math.inf)
        return self._items.popleft()


class VirtualClock(Clock):
    """The time of ranks that are fibers; see the module's docstring.

    The thread that makes it carries them, in ``run``.

    Args:
        seed: of the schedule.
        computing: seconds that pass for each one that a fiber computes.

    Attributes:
        computing: as given.
        random: what the schedule is drawn from; None with seed 0.
        turns: how often a fiber has gone on, or an event has happened.
        digest: of all of these, in their order: of two runs with equal digests each went as the
            other did.
    """

    def __init__(self, seed: int = 0, computing: float = 0.0) -> None:
        self.computing = computing
        self.slice_seconds = math.inf
        self.random = random.Random(seed) if seed else None  # noqa: S311 (to be drawn again)
        self.turns = 0
        self.digest = 0
        self._time = 0.0
        self._began = math.inf  # by the processor's time, the turn of the fiber that goes on
        self._hub: greenlet | None = None  # while all of them go on
        self._fibers: dict[Fiber, None] = {}  # that have not ended
        self._ready: deque[Fiber] = deque()
        self._calendar: list[tuple[float, float, int, _Event]] = []
        self._numbers = itertools.count()
        # Callables of the instance, in the place of the system's.
        self.now = self._now if computing else lambda: self._time
        self.nanoseconds = lambda: round(self.now() * 1e9)
        self.sleep = self._sleep
        self.lock = lambda: _Lock(self)
        self.queue = lambda: _Queue(self)

    def start(self, body: _Event, name: str) -> Fiber:
        fiber = Fiber(body, name, self)
        self._fibers[fiber] = None
        self._ready.append(fiber)
        return fiber

    def current(self) -> Fiber:
        carrier = getcurrent()
        if isinstance(carrier, _Carrier) and carrier.fiber._clock is self:
            return carrier.fiber
        raise StateError(
            "something waits in virtual time that is no rank of it: there, a rank's program runs "
            "on one thread, and starts no others that use its backend"
        )

    def at(self, time: float, event: _Event) -> None:
        """Have ``event`` called at a time; it must not wait."""
        order = 0.0 if self.random is None else self.random.random()
        heapq.heappush(self._calendar, (time, order, next(self._numbers), event))

    def run(self, tasks: Sequence[Task]) -> None:
        """Have all fibers go on until those of a list have ended.

        Raises:
            StateError: one of them waits for something that cannot happen any more.
        """
        self._hub = getcurrent()
        try:
            # The collector would look at all fibers, again and again. With several jobs on threads
            # of one process, Python has crashed once while it did.
            with collector_paused():
                self._run(tasks)
                # What is left in the background has nobody to do anything for.
                for fiber in [*self._fibers]:
                    fiber.end()
                self._fibers.clear()
                self._calendar.clear()
                self._ready.clear()
        finally:
            self._hub = None

    def _run(self, tasks: Sequence[Task]) -> None:
        going = list(tasks)
        while True:
            while self._ready:
                self._take_turn()
            while going and not going[-1].is_alive():
                going.pop()
            if not going:
                return
            if not self._calendar:
                alive = [task for task in tasks if task.is_alive()]
                waiting = [task.name for task in alive if isinstance(task, Fiber)]
                raise StateError(
                    f"nothing can happen any more in virtual time, and {waiting[0]} waits without "
                    f"a deadline{f', as do {len(waiting) - 1} others' if waiting[1:] else ''}"
                )
            time, _, number, event = heapq.heappop(self._calendar)
            self._time = time
            self._note(b"event %d %r" % (number, time))
            event()

    def _take_turn(self) -> None:
        """Have one fiber go on."""
        if self.random is not None and len(self._ready) > 1:
            self._ready.rotate(-self.random.randrange(len(self._ready)))
        fiber = self._ready.popleft()
        self._note(fiber.name.encode())
        assert self._hub is not None, "what takes turns does so in run()"
        if self.computing:
            self._began = time.thread_time()
        fiber.go_on(self._hub)
        self._began = math.inf
        if not fiber.is_alive():
            self._fibers.pop(fiber, None)

    def _note(self, what: bytes) -> None:
        self.turns += 1
        self.digest = zlib.crc32(what, self.digest)

    def _now(self) -> float:
        """The time for the fiber that goes on; for others, that of the last event."""
        return self._time + self.computing * max(0.0, time.thread_time() - self._began)

    def catch_up(self) -> None:
        """Let the time pass in which the calling fiber has computed."""
        if self.now() > self._time:
            self._sleep(0.0)

    def _sleep(self, seconds: float) -> None:
        if not 0 <= seconds < math.inf:
            raise ValueError(f"sleep length must be finite and non-negative, got {seconds}")
        fiber = self.current()
        self.at(self.now() + seconds, lambda: self._ready.append(fiber))
        self._switch()

    def _switch(self) -> None:
        """Have the others go on, until the calling fiber's turn comes again."""
        assert self._hub is not None, "a fiber goes on in run()"
        self._hub.switch()

    # For locks and queues.

    def suspend(self, among: deque[Fiber], deadline: float) -> bool:
        """Have the calling fiber wait among others until it is woken; False if never."""
        fiber = self.current()
        if deadline <= self.now():
            return False
        fiber.among, fiber.woken, fiber.deadline = among, False, deadline
        among.append(fiber)
        if deadline < fiber.alarm:
            self._set_alarm(fiber)
        self._switch()
        return fiber.woken

    def wake(self, among: deque[Fiber]) -> None:
        """Have the first of some fibers go on."""
        fiber = among.popleft()
        fiber.among, fiber.woken = None, True
        now = self.now()
        if now > self._time:  # when whoever wakes it has computed what it did before
            self.at(now, lambda: self._ready.append(fiber))
        else:
            self._ready.append(fiber)

    def _set_alarm(self, fiber: Fiber) -> None:
        fiber.alarm = alarm = fiber.deadline
        self.at(alarm, lambda: self._look(fiber, alarm))

    def _look(self, fiber: Fiber, alarm: float) -> None:
        """End a fiber's wait if its deadline has come."""
        if alarm != fiber.alarm:
            return  # an earlier one was set meanwhile
        fiber.alarm = math.inf
        if fiber.among is None:
            return
        if fiber.deadline <= self._time:
            fiber.among.remove(fiber)
            fiber.among = None
            self._ready.append(fiber)
        elif fiber.deadline < math.inf:
            self._set_alarm(fiber)
