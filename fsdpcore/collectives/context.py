"""``CollectiveContext``: what an algorithm sees of a group while one of its collectives runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from fsdpcore.collectives.fingerprint import compare_calls, refuse_calls
from fsdpcore.collectives.spec import CallSpec, Choice
from fsdpcore.comm.backend import Backend
from fsdpcore.comm.envelope import Envelope
from fsdpcore.core.buffers import Array, byte_view
from fsdpcore.core.errors import CommTimeoutError, CommunicationError, in_words
from fsdpcore.core.text import rank_list
from fsdpcore.core.work import Pending
from fsdpcore.diagnostics.entries import OperationEntry

_KEPT = 64 << 20  # bytes of scratch memory at most
_CHOICES = 64  # of one kind of call


class Region(Protocol):
    """What a context needs of the memory that its ranks share: a ``SharedRegion``."""

    def sync(self, context: Any) -> None:
        """Wait until all ranks have entered the next step; raises as ``agree`` does."""

    def rows(self) -> list[int]:
        """The rows that every rank has entered the step with."""

    def close(self) -> None:
        """Let go of the memory."""


class CollectiveContext:
    """Sends and receives flat contiguous arrays among the ranks of one group.

    A group has one, and begins it anew for every collective: they run one after the other. Both
    sides of every message know its size from the algorithm, so an empty array is not sent at all.
    All messages of a group's collectives travel on one channel, in order.

    Attributes:
        rank, size: this rank and the number of ranks, in the group.
        region: memory that all ranks of the group see, or None.
        inside: the context of the ranks on this host, where the group spans several.
        spec: what is called now; ``entry`` is its record.
        sequence: its number in the group, from 1.
        fallback: of the choice of an algorithm for this call.
        rows: the size of axis 0 of every rank's array, once they have agreed.
        end: of ``time.monotonic``, by when the collective must have ended.
        background: this thread runs asynchronous operations, while others may compute.
    """

    spec: CallSpec
    entry: OperationEntry

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.rank = backend.rank
        self.size = backend.world_size
        self.region: Region | None = None
        self.inside: CollectiveContext | None = None
        self.fallback: Choice | None = None
        self.sequence = 0
        self.rows: list[int] = []
        self.background = False
        self.end = 0.0
        self._limit = 0.0
        self._envelope = Envelope(backend.channel | 1, 0)
        self._posted: list[Pending] = []
        self._scratch: Array = np.empty(0, np.uint8)

    @property
    def regions(self) -> list[Any]:
        """The memory that this rank shares because of the group."""
        contexts = [self] if self.inside is None else [self, self.inside]
        return [each.region for each in contexts if each.region is not None]

    def begin(self, spec: CallSpec, sequence: int, limit: float, background: bool) -> None:
        """Start a collective, which may take ``limit`` seconds."""
        self.background = background
        self.spec = spec
        self.fallback = spec.choice.fallback
        self.sequence = sequence
        self._limit = limit
        self.end = time.monotonic() + limit

    def scratch(self, size: int, dtype: np.dtype[Any]) -> Array:
        """Return a flat array to receive into, until the next call of this.

        The group keeps it: fresh memory costs more, page by page, than what is received into it.
        """
        nbytes = size * dtype.itemsize
        if nbytes > _KEPT:
            return np.empty(size, dtype)
        if nbytes > self._scratch.size:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes].view(dtype)

    @property
    def name(self) -> str:
        """The collective in words, for errors."""
        return f"{self.spec.operation} #{self.sequence}"

    @property
    def hosts(self) -> tuple[int, ...]:
        """The number of each rank's host."""
        return self._backend.hosts

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers that the ranks of the group have in the whole job."""
        return self._backend.ranks

    def global_rank(self, rank: int) -> int:
        """The number that a rank of the group has in the whole job."""
        return self._backend.ranks[rank]

    def choose(self, size: int) -> Choice:
        """Return what carries a call out whose ``size`` only the ranks together know.

        Args:
            size: the n of the cost formulas, the same on all ranks.
        """
        known = self.spec.chosen
        choice = known.get(size)
        if choice is None:
            if len(known) >= _CHOICES:
                known.clear()
            choice = known[size] = self.spec.choose(size)
        self.entry.algorithm = choice.name
        self.fallback = choice.fallback
        return choice

    def use_fallback(self) -> Choice | None:
        """What carries the call out if arrays are not published; None for the algorithm itself."""
        if self.fallback is not None:
            self.entry.algorithm = self.fallback.name
        return self.fallback

    def agree(self) -> list[int]:
        """Wait until all ranks have begun the collective, and check that they all call the same.

        Returns:
            The rows (size of axis 0; 1 for a 0-d array) of every rank's array.

        Raises:
            MismatchError: they do not.
        """
        if self.region is None:
            return compare_calls(self, self.spec.fingerprint) if self.size > 1 else [self.spec.rows]
        self.region.sync(self)
        return self.region.rows()

    def disagree(self) -> None:
        """Raise the error of ranks whose fingerprints differ, once all know that they do."""
        refuse_calls(self, self.spec.fingerprint)

    def isend(self, array: Array, dst: int) -> Pending:
        """Start sending ``array``, which must not change until the result was waited for."""
        if array.size == 0:
            return _NOTHING
        backend = self._backend
        posted = backend.root.post_send(byte_view(array), backend.ranks[dst], self._envelope)
        return self._keep(posted)

    def irecv(self, out: Array, src: int) -> Pending:
        """Start receiving into ``out``."""
        if out.size == 0:
            return _NOTHING
        backend = self._backend
        posted = backend.root.post_recv(byte_view(out), backend.ranks[src], self._envelope)
        return self._keep(posted)

    def send(self, array: Array, dst: int) -> None:
        """Send ``array`` and wait until it may change."""
        self.wait(self.isend(array, dst))

    def recv(self, out: Array, src: int) -> None:
        """Receive into ``out`` and wait for it."""
        self.wait(self.irecv(out, src))

    def exchange(self, array: Array, dst: int, out: Array, src: int) -> None:
        """Send and receive at the same time, and wait for both."""
        receiving = self.irecv(out, src)
        sending = self.isend(array, dst)
        self.wait(receiving, sending)

    def wait(self, *pending: Pending) -> None:
        """Wait for messages.

        Raises:
            CommTimeoutError: the call's deadline has passed; names the ranks that are missing.
        """
        for item in pending:
            if not item.join(self.remaining()):
                raise self.timed_out()
        # A finished message still refers to its array; a long ring would keep all of them.
        self._posted = [item for item in self._posted if not item.finished]

    def wait_all(self) -> None:
        """Wait for every message started so far."""
        self.wait(*self._posted)
        self._posted.clear()

    def remaining(self) -> float:
        """Seconds until the call's deadline, never negative."""
        return max(0.0, self.end - time.monotonic())

    def check(self) -> None:
        """Do what has to be done while waiting without messages: see failures, and the time.

        Raises:
            CommTimeoutError: the call's deadline has passed.
            CommunicationError: the backend is broken.
        """
        root = self._backend.root
        root.progress()
        root.check_usable()
        if time.monotonic() > self.end:
            raise self.timed_out()

    def departed(self, rank: int) -> bool:
        """Whether a rank of the group has left the job."""
        return self._backend.root.departed(self.global_rank(rank))

    def broke(self, entry: OperationEntry, error: BaseException) -> None:
        """Break the backend because the collective was left by an error: ranks may be anywhere."""
        root = self._backend.root
        root.recorder.fail(entry, error)
        if isinstance(error, CommunicationError):
            # After a timeout the others are left time to report their own view of it.
            root.fail(error, tell=not isinstance(error, CommTimeoutError))
        else:
            why = f"{self.name} was left on rank {root.rank}: {in_words(error)}"
            root.fail(CommunicationError(why), tell=True)

    def release(self) -> None:
        """Give up on what was not waited for, so that no buffer is written to any more."""
        if self._posted:
            for item in self._posted:
                if not item.finished:
                    item.cancel()
            self._posted.clear()

    def _keep(self, pending: Pending) -> Pending:
        self._posted.append(pending)
        return pending

    def timed_out(self) -> CommTimeoutError:
        """The error of a call whose deadline has passed; asks the other ranks what they do."""
        backend = self._backend
        report = backend.root.missing_from(backend.ranks, backend.channel, self.sequence)
        return CommTimeoutError(
            f"{self.name} on ranks {rank_list(backend.ranks)} timed out after "
            f"{self._limit:g} s on rank {backend.root.rank}{report}"
        )


_NOTHING = Pending()
_NOTHING.finish()

# Moves the data of a collective.
Body = Callable[[CollectiveContext], Any]
