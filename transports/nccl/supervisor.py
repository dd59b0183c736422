"""The supervisor of one rank's GPU: a thread that looks after what was enqueued.

Nobody waits for a collective on a GPU where it is called, so nobody there would see that it does
not end. The supervisor does: it keeps deadlines, asks NCCL for errors, notices that a rank which is
needed has left, compares what the ranks call (``agree.py``), and keeps the arrays of asynchronous
calls until the GPU has done with them. It looks every 50 ms while something is under way, sooner
while another rank waits for an answer, and sleeps while nothing is to be looked after.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdpcore.comm.backend import Backend
from fsdpcore.comm.transport import Transport
from fsdpcore.core.errors import CommTimeoutError, CommunicationError, PeerFailedError, in_words
from fsdpcore.core.text import rank_list
from fsdpcore.core.work import Deadline
from fsdpcore.diagnostics.deadlocks import SLOW

from .agree import Agreement
from .communicators import BOUND, ERRORS, Communicators, translated
from .cuda_device import CudaDevice, reached

if TYPE_CHECKING:
    from fsdpcore.collectives.context import CollectiveContext
    from fsdpcore.collectives.spec import CallSpec

TICK = 0.05
_SOON = 0.002
# Who waits on the host for the GPU looks again after so long, at first and at most.
_LOOK, _LOOK_AT_MOST = 50e-6, 2e-3

# What else it may be, of which the hosts know nothing.
_ELSEWHERE = (
    "; or what is before it on a GPU's stream has not ended, or the ranks call the collectives of "
    "several groups in different orders, in which GPUs wait for each other"
)

# The stream that every thread has one of its own of: ``cudaStreamPerThread``.
_PER_THREAD = 2


def key_of(stream: int) -> int:
    """A number that tells the streams of a rank apart, by the handle of the current one."""
    return stream if stream != _PER_THREAD else -threading.get_ident()


class Flight(NamedTuple):
    """A collective that was enqueued.

    Attributes:
        event: behind it, on its stream.
        again: the event may be used again.
        group, spec, sequence: which.
        limit: seconds that it has.
        end: of ``time.monotonic``, when these are over.
        held: what it needs until it has ended.
    """

    event: Any
    again: bool
    group: Backend
    spec: CallSpec
    sequence: int
    limit: float
    end: float
    held: object


class Supervisor:
    """Looks after the collectives of one rank.

    Args:
        backend: the rank.
        device: its GPU.
        communicators: of the rank.
        agreement: what the ranks have called.
        chores: called with the supervisor at every look; returns whether another rank waits for it.
    """

    def __init__(
        self,
        backend: Transport,
        device: CudaDevice,
        communicators: Communicators,
        agreement: Agreement,
        chores: Callable[[Supervisor], bool],
    ) -> None:
        self._backend = backend
        self._device = device
        self._communicators = communicators
        self._agreement = agreement
        self._chores = chores
        self._new: deque[tuple[int, Flight]] = deque()
        # By stream: those of one stream end in order.
        self._flights: dict[int, deque[Flight]] = {}
        # Contexts of calls that a thread makes now: NCCL may not return before others call as well.
        self._inside: dict[CollectiveContext, None] = {}
        # Events on the device's background stream, in order, and what is kept until then.
        self._kept: deque[tuple[Any, object]] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._asleep = False
        self._urgent = False
        self._stopped = False
        name = f"fsdpcore-nccl-rank{backend.rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def enter(self, context: CollectiveContext) -> None:
        """Look after a thread that is about to call NCCL, until what it has called is added."""
        self._inside[context] = None
        if self._asleep:
            self._wake.set()

    def leave(self, context: CollectiveContext | None) -> None:
        """The thread has returned from NCCL."""
        if context is not None:
            self._inside.pop(context, None)

    def add(self, stream: int, flight: Flight) -> None:
        """Look after a collective, on a stream; calls of one group come in their order."""
        self._new.append((stream, flight))
        if self._asleep:
            self._wake.set()

    def keep(self, event: Any, held: object) -> None:
        """Keep something until the device's background has come to an event."""
        self._kept.append((event, held))
        if self._asleep:
            self._wake.set()

    def wake(self) -> None:
        """Look now, for the sake of another rank."""
        self._urgent = True
        self._wake.set()

    # What is under way.

    def ended(self, channel: int, sequence: int) -> bool:
        """Whether the first so many calls of a group were made, and have ended."""
        with self._lock:
            self._collect()
            return self._agreement.sequence(channel) >= sequence and not any(
                flight.group.channel == channel and flight.sequence <= sequence
                for flights in self._flights.values()
                for flight in flights
            )

    def calls(self) -> list[tuple[int, tuple[int, ...], int]]:
        """The channels and ranks of groups in which this rank has called something; how often."""
        with self._lock:
            self._collect()
            return self._agreement.calls()

    def forget(self, channel: int) -> None:
        """A group, whose calls have ended, is not used any more."""
        with self._lock:
            self._collect()
            self._agreement.forget(channel)

    def finish(self, seconds: float, channel: int | None = None) -> bool:
        """Wait until the GPU has ended what was enqueued, or the job has failed.

        Args:
            seconds: at most so long.
            channel: of the group whose calls count; None for all.

        Returns:
            Whether all has ended.
        """
        deadline, pause = Deadline(seconds), _LOOK
        while self._busy(channel):
            if self._backend.failure is not None or not deadline.remaining():
                return False
            time.sleep(min(pause, deadline.remaining()))
            pause = min(2 * pause, _LOOK_AT_MOST)
        return True

    def overdue(self, when: str) -> CommTimeoutError:
        """The error of one who has waited in vain; ``when`` in words."""
        with self._lock:
            flights = [flight for queue in self._flights.values() for flight in queue]
        if not flights:  # it has ended this moment
            return CommTimeoutError(f"collectives of GPU arrays had not ended {when}")
        return self._late(min(flights, key=lambda flight: flight.end), when)

    def _busy(self, channel: int | None) -> bool:
        with self._lock:
            with contextlib.suppress(*ERRORS):  # which the thread meets, too, and tells of
                self._collect()
            if channel is None and self._kept:
                return True
            return any(
                channel in (None, flight.group.channel)
                for flights in self._flights.values()
                for flight in flights
            )

    def _collect(self) -> None:
        """Take over what is new, and let go of what has ended; with the lock held."""
        while self._new:
            stream, flight = self._new.popleft()
            self._flights.setdefault(stream, deque()).append(flight)
            self._agreement.called(flight.group, flight.spec, flight.sequence)
        for stream in list(self._flights):
            flights = self._flights[stream]
            for _ in range(_count_ended(flights)):
                flight = flights.popleft()
                if flight.again:
                    self._device.give_event(flight.event)
            if not flights:
                del self._flights[stream]
        while self._kept and reached(self._kept[0][0]):
            self._kept.popleft()

    # The thread.

    def _run(self) -> None:
        self._device.use()
        while not self._stopped:
            busy = waited_for = False
            try:
                busy, waited_for = self._look()
            except CommunicationError as error:
                self._backend.fail(error, tell=True)
            except ERRORS as error:
                what = "work on the GPU, of a collective or of what was enqueued before it,"
                failure = translated(error, what)
                failure.__cause__ = error
                self._backend.fail(failure, tell=True)
            except Exception as error:  # nobody else would tell that nobody looks any more
                failure = CommunicationError(f"the supervisor of the GPU failed: {in_words(error)}")
                failure.__cause__ = error
                self._backend.fail(failure, tell=True)
            if self._backend.failure is not None:
                self._let_go()
                return
            if waited_for:
                self._pause(_SOON)
            elif busy:
                self._pause(TICK)
            else:
                self._sleep()

    def _pause(self, seconds: float) -> None:
        """Wait for the next look, or for the words of another rank."""
        self._wake.wait(seconds)
        self._wake.clear()
        self._urgent = False

    def _sleep(self) -> None:
        """Wait until there is something to look after, and out of the way of him who began it."""
        self._asleep = True
        if not (self._new or self._inside or self._kept or self._stopped):
            self._wake.wait()
        self._asleep = False
        self._wake.clear()
        if not self._urgent and not self._stopped:
            self._wake.wait(TICK)
        self._wake.clear()
        self._urgent = False

    def _look(self) -> tuple[bool, bool]:
        """Look at everything once.

        Returns:
            Whether there is something to look after, and whether another rank waits for it.
        """
        with self._lock:
            self._collect()
            flights = [flight for queue in self._flights.values() for flight in queue]
        inside = list(self._inside)
        if flights or inside:
            self._communicators.check()
        if flights:
            self._check_deadlines(flights)
            self._check_members(flights)
        for context in inside:
            self._check_inside(context)
        with self._lock:
            self._agreement.tell()
            self._agreement.compare()
            waits = self._agreement.waits
        return bool(flights or inside or self._kept or waits), self._chores(self)

    def _check_deadlines(self, flights: list[Flight]) -> None:
        late = min(flights, key=lambda flight: flight.end)
        if late.end < time.monotonic() and self._is_open(late):
            raise self._late(late, f"{late.limit:g} s after it was enqueued")

    def _is_open(self, flight: Flight) -> bool:
        """Whether it has not ended: its event may belong to another one by now."""
        with self._lock:
            self._collect()
            return any(other is flight for queue in self._flights.values() for other in queue)

    def _late(self, flight: Flight, when: str) -> CommTimeoutError:
        group, root = flight.group, self._backend
        report = root.missing_from(group.ranks, group.channel, flight.sequence)
        if report == SLOW:
            report += _ELSEWHERE
        return CommTimeoutError(
            f"{flight.spec.operation} #{flight.sequence} of GPU arrays on ranks "
            f"{rank_list(group.ranks)} had not ended {when} on rank {root.rank}{report}"
        )

    def _check_inside(self, context: CollectiveContext) -> None:
        """The thread itself sees the deadline where it waits for other ranks, but not in NCCL."""
        if time.monotonic() > context.end + TICK and context in self._inside:
            raise context.timed_out()

    def _check_members(self, flights: list[Flight]) -> None:
        """A rank leaves when all has ended that it has called: others wait for it in vain."""
        root = self._backend
        left = {rank for rank in root.ranks if rank != root.rank and root.departed(rank)}
        if not left:
            return
        for flight in flights:
            gone = left.intersection(flight.group.ranks)
            if gone and self._is_open(flight):
                raise PeerFailedError(
                    f"rank {min(gone)} has left the job, without {flight.spec.operation} "
                    f"#{flight.sequence} of GPU arrays on ranks {rank_list(flight.group.ranks)}",
                    min(gone),
                )

    def _let_go(self) -> None:
        """After a failure: keep arrays until nothing uses them any more, for good if need be."""
        if not self._communicators.join(BOUND):
            return
        end = time.monotonic() + BOUND
        while not self._stopped and time.monotonic() < end:
            with self._lock:
                try:
                    self._collect()
                except ERRORS:  # the GPU does not say any more what has ended
                    return
                if not self._flights and not self._kept:
                    return
            time.sleep(_SOON)

    def stop(self) -> None:
        """End the thread, once all has ended or failed."""
        self._stopped = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(BOUND)


def _count_ended(flights: deque[Flight]) -> int:
    """How many of a stream's collectives, which end in order, have ended."""
    low, high = 0, len(flights)
    if not reached(flights[0].event):  # the most frequent answers first
        return 0
    while low < high:
        middle = (low + high) // 2
        if reached(flights[middle].event):
            low = middle + 1
        else:
            high = middle
    return low
