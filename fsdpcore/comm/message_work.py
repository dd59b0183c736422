"""A point-to-point message in flight, as a ``Work``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

from fsdpcore.comm.job import Job
from fsdpcore.comm.matching import Receive
from fsdpcore.core.errors import CommTimeoutError, CommunicationError, in_words
from fsdpcore.core.work import Deadline, Pending, Work
from fsdpcore.diagnostics.entries import MessageEntry, MessageRecord
from fsdpcore.diagnostics.status import Group

# How far the withdrawal of a message has come.
_BEGUN, _ENDED = "begun", "ended"


class MessageWork(Work):
    """A point-to-point message in flight.

    Args:
        job, group: whose message it is.
        pending: what the transport made of it.
        entry: what is recorded of it.
        peer: the other rank's number in the group; ``ANY_NUMBER`` for any.
        deliver: called once it is received; returns what ``wait`` does.
    """

    def __init__(
        self,
        job: Job,
        group: Group,
        pending: Pending,
        entry: MessageEntry,
        peer: int,
        deliver: Callable[[Pending], Any] | None,
    ) -> None:
        self._job = job
        self._clock = job.clock
        self._group = group
        self._pending = pending
        self._entry = entry
        self._peer = peer
        self._deliver = deliver
        self._value: Any = None
        self._withdrawal = ""
        entry.work = weakref.ref(self)

    def done(self) -> bool:
        if not self._pending.finished:
            return False
        if self._entry.end == 0:
            recorder = self._job.recorder
            if self._pending.error is None:
                recorder.end(self._entry)
                if self._deliver is not None:
                    self._name_sender()
            else:
                recorder.fail(self._entry, self._pending.error)
        return True

    def _name_sender(self) -> None:
        """Record from whom a message came that could be from any rank, or with any tag."""
        message = self._entry.call
        assert isinstance(message, MessageRecord)
        if message.peer < 0 or message.tag < 0:
            sender, _, tag = cast("Receive", self._pending).key
            self._entry.call = message._replace(peer=sender, tag=tag)

    def _ends(self) -> list[Pending]:
        return [self._pending]

    def _limit(self) -> float:
        return self._job.default_timeout

    def _blocks(self, waiting: bool) -> None:
        self._entry.waiting = waiting

    def wait(self, timeout: float | None = None) -> Any:
        limit = self._job.default_timeout if timeout is None else timeout
        return self.wait_until(Deadline(limit, self._clock))

    def wait_until(self, deadline: Deadline) -> Any:
        """Do as ``wait``, with a deadline that other messages may have, too."""
        self._entry.waiting = True
        start = 0 if self._pending.finished else self._clock.nanoseconds()
        try:
            if not self._pending.join(deadline.remaining()):
                raise self._timed_out(deadline.seconds)
        finally:
            self._entry.waiting = False
            if start:
                self._job.recorder.waited(start)
            self.done()
        if self._deliver is not None:  # once: the caller may have changed the array since
            self._value = self._deliver(self._pending)
            self._deliver = None
        return self._value

    def _timed_out(self, limit: float) -> CommTimeoutError:
        message = self._entry.call
        assert isinstance(message, MessageRecord)
        report = self._job.message_report(message.peer, self._group)
        return CommTimeoutError(f"{self._words()} timed out after {limit:g} s{report}")

    def _words(self) -> str:
        message = self._entry.call
        assert isinstance(message, MessageRecord)
        ranks = self._group.ranks
        where = f"on rank {ranks.index(self._job.rank)} of {len(ranks)}"
        return f"{message.words(self._peer)} {where}"


def finish(starts: Sequence[Callable[[], MessageWork]], deadline: Deadline) -> Any:
    """Start messages and wait for all until a deadline; return what the first brings.

    Before it raises, because the time is over or of an interrupt, all are withdrawn. Python looks
    for interrupts where functions begin and where those written in C return: never between the
    start of a message and the line that notes it, if ``starts`` are written in Python. A second
    interrupt meanwhile breaks the job, and what was left undone is done. A third one, at the moment
    when that begins, may still leave a message under way.
    """
    works: list[MessageWork] = []
    try:
        for start in starts:
            works.append(start())
        for work in works:
            _wait(work, deadline)
    except BaseException as error:
        try:
            for work in works:
                _give_up(work, error)
        except BaseException as interrupt:
            _fail_half_way(works[0], interrupt)
            raise
        raise
    return works[0].wait()


def _wait(work: MessageWork, deadline: Deadline) -> None:
    """Wait for a message; when the time is over, withdraw it and raise, unless it just ended."""
    try:
        work.wait_until(deadline)
    except CommTimeoutError as error:
        work._withdrawal = _BEGUN
        withdrawn = work._pending.cancel()
        if work.done():  # just now: it must not get lost
            return
        recorder = work._job.recorder
        recorder.fail(work._entry, error)
        if not withdrawn:
            error = CommTimeoutError(f"{error}\n  part of it was sent: the job cannot go on")
            work._job.fail(error, tell=True)
        work._withdrawal = _ENDED
        recorder.save(seldom=True)
        raise error from None


def _give_up(work: MessageWork, error: BaseException) -> None:
    """Withdraw a message because of an error; the job breaks if a peer may have half of it.

    Does nothing if the message has ended, or was withdrawn before.
    """
    if work.done() or work._withdrawal == _ENDED:
        return
    if work._withdrawal == _BEGUN:
        _fail_half_way(work, error)
        return
    work._withdrawal = _BEGUN
    withdrawn = work._pending.cancel()
    if work.done():
        return
    work._job.recorder.fail(work._entry, error)
    if not withdrawn:
        left = f"{work._words()} was left half done: {in_words(error)}"
        work._job.fail(CommunicationError(left), tell=True)
    work._withdrawal = _ENDED


def _fail_half_way(work: MessageWork, interrupt: BaseException) -> None:
    """Break the job: nobody knows how far a withdrawal came."""
    why = f"{work._words()} was left half withdrawn: {in_words(interrupt)}"
    work._job.fail(CommunicationError(why), tell=True)
