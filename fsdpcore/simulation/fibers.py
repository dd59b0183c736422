"""``VirtualClock``: many threads carried by one, on a clock that jumps.

A fiber runs until it waits. When all do, the clock jumps to what happens next: a fiber's sleep is
over, a deadline passes, or something that a transport has put into the calendar. So hours pass in
an instant, and a run depends on nothing but its seed.

With seed 0, fibers go on in the order in which they could. With others the order is drawn, also
that of events at one moment: each seed is another schedule of the same program, and the same one
whenever it is run again.
"""

from __future__ import annotations

import contextvars
import heapq
import itertools
import math
import random
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from greenlet import getcurrent, greenlet

from fsdpcore.core.clock import Clock, Task
from fsdpcore.core.errors import StateError

_Event = Callable[[], None]


class Fiber(greenlet):
    """A thread of virtual time; ``VirtualClock.start`` makes it.

    Attributes:
        name: for messages.
        among: the fibers that wait for the same as this one; None while it does not wait.
        woken: that is what ended its last wait, not a deadline.
        deadline: when its wait ends at the latest.
        alarm: the time of its entry in the calendar, which stays there when a wait has ended: the
            next one's deadline is later, as a rule. Infinite where there is none.
    """

    def __init__(self, body: _Event, name: str, clock: VirtualClock, hub: greenlet) -> None:
        super().__init__(body, hub)
        self.name = name
        self.among: deque[Fiber] | None = None
        self.woken = False
        self.deadline = self.alarm = math.inf
        self._clock = clock
        self._joining: deque[Fiber] = deque()
        # As a thread of the system would, it begins with the settings of who starts it.
        self.gr_context = contextvars.copy_context()

    def join(self, timeout: float = math.inf) -> None:
        """Wait for its end, no longer than so many seconds."""
        if getcurrent() is self.parent:
            return  # nothing goes on while whoever carries all of them waits
        end = self._clock.now() + timeout
        while self.is_alive() and self._clock.now() < end:
            self._clock.suspend(self._joining, end)

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not self.dead

    def ends(self) -> None:
        """Wake who waits for its end, which is about to come."""
        while self._joining:
            self._clock.wake(self._joining)


class _Lock:
    """A lock between fibers; see ``core.clock.Lock``."""

    __slots__ = ("_clock", "_held", "_waiting")

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._held = False
        self._waiting: deque[Fiber] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._held:
            self._held = True
            return True
        if not blocking or timeout == 0:
            return False
        clock = self._clock
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
        while not self._items:
            self._clock.suspend(self._waiting, math.inf)
        return self._items.popleft()


class VirtualClock(Clock):
    """The time of ranks that are fibers; see the module's docstring.

    The thread that makes it carries them, in ``run``.

    Args:
        seed: of the schedule.

    Attributes:
        random: what the schedule is drawn from; None with seed 0.
        turns: how often a fiber has gone on, or an event has happened.
        digest: of all of these, in their order: of two runs with equal digests each went as the
            other did.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed) if seed else None  # noqa: S311 (to be drawn again)
        self.turns = 0
        self.digest = 0
        self._time = 0.0
        self._hub = getcurrent()
        self._ready: deque[Fiber] = deque()
        self._calendar: list[tuple[float, float, int, _Event]] = []
        self._numbers = itertools.count()
        # Callables of the instance, in the place of the system's.
        self.now = lambda: self._time
        self.nanoseconds = lambda: round(self._time * 1e9)
        self.sleep = self._sleep
        self.lock = lambda: _Lock(self)
        self.queue = lambda: _Queue(self)

    def start(self, body: _Event, name: str) -> Fiber:
        def run() -> None:
            try:
                body()
            finally:
                fiber.ends()

        fiber = Fiber(run, name, self, self._hub)
        self._ready.append(fiber)
        return fiber

    def current(self) -> Fiber:
        fiber = getcurrent()
        if isinstance(fiber, Fiber) and fiber._clock is self:
            return fiber
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
        going = list(tasks)
        while True:
            while self._ready:
                self._take_turn()
            while going and not going[-1].is_alive():
                going.pop()
            if not going:
                return
            if not self._calendar:
                waiting = [
                    task.name for task in tasks if isinstance(task, Fiber) and task.is_alive()
                ]
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
        fiber.switch()

    def _note(self, what: bytes) -> None:
        self.turns += 1
        self.digest = zlib.crc32(what, self.digest)

    def _sleep(self, seconds: float) -> None:
        fiber = self.current()
        self.at(self._time + seconds, lambda: self._ready.append(fiber))
        self._hub.switch()

    # For locks and queues.

    def suspend(self, among: deque[Fiber], deadline: float) -> bool:
        """Have the calling fiber wait among others until it is woken; False if never."""
        fiber = self.current()
        if deadline <= self._time:
            return False
        fiber.among, fiber.woken, fiber.deadline = among, False, deadline
        among.append(fiber)
        if deadline < fiber.alarm:
            self._set_alarm(fiber)
        self._hub.switch()
        return fiber.woken

    def wake(self, among: deque[Fiber]) -> None:
        """Have the first of some fibers go on."""
        fiber = among.popleft()
        fiber.among, fiber.woken = None, True
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
