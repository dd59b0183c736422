"""A point-to-point message in flight, as a ``Work``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from fsdpcore.comm.job import Job
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import CommTimeoutError, CommunicationError, in_words
from fsdpcore.core.work import Deadline, Pending, Work
from fsdpcore.diagnostics.entries import MessageEntry, MessageRecord
from fsdpcore.diagnostics.status import Group


class MessageWork(Work):
    """A point-to-point message in flight.

    Args:
        job, group: whose message it is.
        pending: what the transport made of it.
        entry: what is recorded of it.
        peer: the other rank's number in the group.
        deliver: called once it is received; returns the caller's array.
    """

    def __init__(
        self,
        job: Job,
        group: Group,
        pending: Pending,
        entry: MessageEntry,
        peer: int,
        deliver: Callable[[], Array] | None,
    ) -> None:
        self._job = job
        self._group = group
        self._pending = pending
        self._entry = entry
        self._peer = peer
        self._deliver = deliver
        self._value: Array | None = None
        entry.work = weakref.ref(self)

    def done(self) -> bool:
        if not self._pending.finished:
            return False
        if self._entry.end == 0:
            recorder = self._job.recorder
            if self._pending.error is None:
                recorder.end(self._entry)
            else:
                recorder.fail(self._entry, self._pending.error)
        return True

    def wait(self, timeout: float | None = None) -> Any:
        limit = self._job.default_timeout if timeout is None else timeout
        deadline = Deadline(limit)
        self._entry.waiting = True
        try:
            if not self._pending.join(deadline.remaining()):
                raise self._timed_out(limit)
        finally:
            self._entry.waiting = False
            self.done()
        if self._deliver is not None:  # once: the caller may have changed the array since
            self._value = self._deliver()
            self._deliver = None
        return self._value

    def _timed_out(self, limit: float) -> CommTimeoutError:
        message = self._entry.call
        assert isinstance(message, MessageRecord)
        report = self._job.message_report(message.peer, self._group.channel)
        return CommTimeoutError(f"{self._words()} timed out after {limit:g} s{report}")

    def _words(self) -> str:
        message = self._entry.call
        assert isinstance(message, MessageRecord)
        ranks = self._group.ranks
        where = f"on rank {ranks.index(self._job.rank)} of {len(ranks)}"
        return f"{message.words(self._peer)} {where}"


def finish(work: MessageWork, timeout: float) -> None:
    """Wait; when the time is over, withdraw the message before raising."""
    try:
        work.wait(timeout)
    except BaseException as error:
        withdrawn = work._pending.cancel()
        recorder = work._job.recorder
        if not isinstance(error, CommTimeoutError):
            recorder.fail(work._entry, error)
            if not withdrawn and not work._pending.finished:  # a peer may have half of it
                left = f"{work._words()} was left half done: {in_words(error)}"
                work._job.fail(CommunicationError(left), tell=True)
            raise
        if work._pending.finished:  # just now: it must not get lost
            work.wait()
            return
        recorder.fail(work._entry, error)
        if not withdrawn:
            error = CommTimeoutError(f"{error}\n  part of it was sent: the job cannot go on")
            work._job.fail(error, tell=True)
            recorder.save(seldom=True)
            raise error
        recorder.save(seldom=True)
        raise
