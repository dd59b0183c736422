"""``CallOrder``: the order in which a rank issues the collectives of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdpcore.comm.job import Job
from fsdpcore.core.errors import ClosedError, CommunicationError, in_words
from fsdpcore.core.text import rank_list
from fsdpcore.core.work import Deadline, OrderedExecutor
from fsdpcore.diagnostics.status import CallAnswer, ComparedCall, Group

# Calls that a rank can say what they were; more than any rank is ahead of another.
_REMEMBERED = 128
_WORDS = 240  # of a call, and of the policy


class CallOrder:
    """Numbers this rank's collectives of one group, and runs them one after the other.

    All ranks issue the collectives of a group in the same order, so that equal numbers mean the
    same call on all of them.

    Attributes:
        group: whose collectives these are.
        lock: held while a collective gets its number and, if it blocks, until it has ended.
        issued, begun: how many collectives this rank has called, and how many of them have begun.
        executor: runs asynchronous collectives; None before the first.
        closed: the group was closed by its user.
    """

    __slots__ = (
        "__weakref__",
        "_calls",
        "_job",
        "begun",
        "closed",
        "executor",
        "group",
        "issued",
        "lock",
    )

    def __init__(self, job: Job, group: Group) -> None:
        self._job = job
        self.group = group
        self.lock = job.clock.lock()
        self.issued = 0
        self.begun = 0
        self.executor: OrderedExecutor | None = None
        self.closed = False
        # By number, the lower digits of which are the place: another thread may read.
        self._calls: list[tuple[int, int, ComparedCall | None]] = [(0, 0, None)] * _REMEMBERED

    def note(self, sequence: int, before: int, call: ComparedCall) -> None:
        """Remember for a while what this rank calls, for ranks that ask."""
        self._calls[sequence % _REMEMBERED] = sequence, before, call

    def called(self, sequence: int) -> CallAnswer | None:
        """What this rank has called under a number; None if it has not, or was not noted."""
        number, before, call = self._calls[sequence % _REMEMBERED]
        if number != sequence or call is None:
            return None
        return CallAnswer(before, call.digest, str(call)[:_WORDS], call.policy[:_WORDS])

    def check_open(self) -> None:
        """Raise the first cause if the job is broken, or ``ClosedError`` if the group is closed."""
        self._job.check_usable()
        if self.closed:
            ranks = self.group.ranks
            raise ClosedError(
                f"rank {ranks.index(self._job.rank)} has closed this group "
                f"(ranks {rank_list(ranks)}); make a new one with sub()"
            )

    def acquire_sequence(self) -> int:
        """Take the next number for a blocking collective; 0 if others are queued.

        Called, and the collective run, with ``lock`` held.
        """
        if self.closed or self._job.failure is not None:
            self.check_open()
        if self.executor is not None and not self.executor.idle:
            return 0
        self.issued = sequence = self.issued + 1
        return sequence

    def abandon(self, before: int, what: str, error: BaseException) -> None:
        """Break the job if ``error`` ended a collective that was issued after number ``before``.

        Most errors have broken it already. A signal's may come between any two instructions; then
        nobody else knows that the others wait, or that they have gone on.
        """
        job = self._job
        if self.issued != before and job.failure is None:
            why = f"{what} #{self.issued} was left on rank {job.rank}: {in_words(error)}"
            job.fail(CommunicationError(why), tell=True)

    def issue(
        self,
        text: str,
        task: Callable[[int, bool], Any],
        *,
        async_op: bool,
        nbytes: int = 0,
        timeout: float | None = None,
    ) -> Any:
        """Run ``task(sequence, background)`` as this group's next collective, in calling order.

        Args:
            text: the operation in words.
            task: runs it; ``background`` is whether on the executor's thread, not the caller's.
            async_op: do not wait for it. Where too much is queued already (``work.MAX_QUEUED``
                operations or ``work.MAX_QUEUED_BYTES``), wait until some of that has run.
            nbytes: memory that the task holds while it is queued, beyond the caller's arrays.
            timeout: seconds to wait for room in the queue; by default the job's.

        Returns:
            What ``task`` returns or, with ``async_op``, a ``Work`` for it.

        Raises:
            CommTimeoutError: the queue stayed full for ``timeout`` seconds; nothing was begun.
        """
        job = self._job
        with self.lock:
            if not async_op:
                before = self.issued
                try:
                    if sequence := self.acquire_sequence():
                        return task(sequence, False)
                except BaseException as error:
                    self.abandon(before, text, error)
                    raise
            limit = Deadline(job.default_timeout if timeout is None else timeout).seconds
            self.check_open()
            if self.executor is None:
                self.executor = job.new_executor(f"fsdpcore-rank{job.rank}")
            self.executor.make_room(nbytes, limit, text)
            self.check_open()  # it may have been closed, or have failed, while this one waited
            self.issued = sequence = self.issued + 1
            work = self.executor.submit(lambda: task(sequence, True), text, nbytes)
        return work if async_op else work.wait()

    def close(self) -> None:
        """Let no further collective begin, and let the asynchronous ones end."""
        if not self.closed:
            self._job.recorder.close_group(self)
        self.closed = True
        if self.executor is not None:
            self._job.end_executor(self.executor)
