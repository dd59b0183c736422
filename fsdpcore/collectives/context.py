"""``CollectiveContext``: what an algorithm sees of a group while one of its collectives runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from fsdpcore.collectives.agreement import (
    FREE_CALLS,
    PATIENCE,
    add_call,
    differ,
    refuse,
    tag_of,
)
from fsdpcore.collectives.dissemination import exchange_numbers
from fsdpcore.collectives.spec import CallSpec, Choice
from fsdpcore.comm.backend import Backend
from fsdpcore.comm.envelope import Envelope
from fsdpcore.core.algorithm import Comparison
from fsdpcore.core.buffers import Array, byte_view
from fsdpcore.core.errors import (
    CommTimeoutError,
    CommunicationError,
    PeerFailedError,
    in_words,
)
from fsdpcore.core.text import rank_list
from fsdpcore.core.work import Pending
from fsdpcore.diagnostics.entries import OperationEntry

_KEPT = 64 << 20  # bytes of scratch memory at most
_CHOICES = 64  # of one kind of call
# Ranks that a rank asks at once what they call, and for how long it waits for their answers.
_ASKED, _ANSWER_SECONDS = 64, 2.0


class Region(Protocol):
    """What a context needs of the memory that its ranks share: a ``SharedRegion``."""

    def sync(self, context: Any) -> None:
        """Wait until all ranks have entered the next step; raises as ``meet`` does."""

    def rows(self) -> list[int]:
        """The rows that every rank has entered the step with."""

    def close(self) -> None:
        """Let go of the memory."""


class CollectiveContext:
    """Sends and receives flat contiguous arrays among the ranks of one group.

    A group has one, and begins it anew for every collective: they run one after the other. Both
    sides of every message know its size from the algorithm, so an empty array is not sent at all.
    All messages of a group's collectives travel on one channel, those of one call in order, and
    with a mark by which none is taken in another call: see ``agreement``.

    Attributes:
        rank, size: this rank and the number of ranks, in the group.
        region: memory that all ranks of the group see, or None.
        comparison: how the calls of the ranks can be compared while data moves.
        inside: the context of the ranks on this host, where the group spans several.
        spec: what is called now; ``entry`` is its record.
        sequence: its number in the group, from 1.
        fallback: of the choice of an algorithm for this call.
        rows: the size of axis 0 of every rank's array, once they have met for a ragged call.
        end: by the job's clock, by when the collective must have ended.
        background: this thread runs asynchronous operations, while others may compute.
    """

    spec: CallSpec
    entry: OperationEntry

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.rank = backend.rank
        self.size = backend.world_size
        self.region: Region | None = None
        on_host = backend.moves.on_host
        self.comparison = Comparison.BY_MESSAGES if on_host else Comparison.NOT_AT_ALL
        self.inside: CollectiveContext | None = None
        self.fallback: Choice | None = None
        self.sequence = 0
        self.rows: list[int] = []
        self.background = False
        self.end = 0.0
        self._limit = 0.0
        self._look_at = 0.0  # as ``end``: when to look again after those that this rank waits for
        self._met = False
        self._history = 0  # a digest of the group's calls so far
        self._channel = backend.channel | 1
        self._envelope = Envelope(self._channel, 0)
        self._posted: list[tuple[Pending, int]] = []  # with the peers, as numbers in the job
        self._note = backend.order.note
        self._now = backend.root.clock.now
        self._scratch: Array = np.empty(0, np.uint8)

    @property
    def regions(self) -> list[Any]:
        """The memory that this rank shares because of the group."""
        contexts = [self] if self.inside is None else [self, self.inside]
        return [each.region for each in contexts if each.region is not None]

    def share(self, region: Region) -> None:
        """Go by memory that all ranks of the group see from now on."""
        self.region, self.comparison = region, Comparison.IN_MEMORY
        self._backend.root.regions.add(region)

    def begin(self, spec: CallSpec, sequence: int, limit: float, background: bool) -> None:
        """Start a collective, which may take ``limit`` seconds."""
        self.background = background
        self.spec = spec
        self.fallback = spec.choice.fallback
        self.sequence = sequence
        self._limit = limit
        now = self._now()
        self.end = now + limit
        # In shared memory all compare their calls in every step that they wait in.
        asks = limit > PATIENCE and self.region is None
        self._look_at = now + PATIENCE if asks else self.end
        self._note(sequence, self._history, spec.fingerprint)

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
        label = self.spec.fingerprint.label
        return f"{self.spec.operation} #{self.sequence}{label and f' ({label})'}"

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
        if not self._met and choice.comparison is not self.comparison:
            self.meet()
        return choice

    def use_fallback(self) -> Choice | None:
        """What carries the call out if arrays are not published; None for the algorithm itself."""
        if self.fallback is not None:
            self.entry.algorithm = self.fallback.name
        return self.fallback

    def enter(self) -> None:
        """Begin to move data, by messages that tell the call; meet first where it takes that."""
        spec, possible = self.spec, self.comparison
        self._met = False
        needed = spec.meets or spec.choice.comparison is not possible
        if possible is Comparison.BY_MESSAGES:
            self._mark()
            needed = needed or self.sequence % FREE_CALLS == 0
        if needed and not spec.met:
            self.meet()
            # Among GPUs the host does not wait for the others at every call: see ``on_device``.
            again = spec.meets or spec.chooses_late
            spec.met = possible is Comparison.NOT_AT_ALL and not again

    def meet(self) -> None:
        """Wait until all ranks have begun the collective; tell each other the rows of a ragged one.

        That is the size of axis 0, or 1 for a 0-d array.

        Raises:
            MismatchError: they do not call the same.
        """
        self._met = True
        if self.region is not None:
            self.region.sync(self)
            if self.spec.ragged:
                self.rows = self.region.rows()
            return
        if self.comparison is Comparison.NOT_AT_ALL:
            self._mark()
        self.rows = exchange_numbers(self, self.spec.rows)

    def _mark(self) -> None:
        """Have the messages from now on tell what this rank calls, and has called."""
        self._history = history = add_call(self._history, self.spec.digest)
        self._envelope = Envelope(self._channel, tag_of(history))

    def disagree(self) -> NoReturn:
        """Raise the error of ranks that call different things, and tell it to all."""
        backend = self._backend
        try:
            refuse(backend.root, backend.group, self.sequence)
        except CommunicationError as error:
            raise backend.root.fail_with(error) from None

    def isend(self, array: Array, dst: int) -> Pending:
        """Start sending ``array``, which must not change until the result was waited for."""
        if array.size == 0:
            return _NOTHING
        backend = self._backend
        posted = backend.root.post_send(byte_view(array), backend.ranks[dst], self._envelope)
        self._posted.append((posted, backend.ranks[dst]))
        return posted

    def irecv(self, out: Array, src: int) -> Pending:
        """Start receiving into ``out``."""
        if out.size == 0:
            return _NOTHING
        backend = self._backend
        posted = backend.root.post_recv(byte_view(out), backend.ranks[src], self._envelope)
        self._posted.append((posted, backend.ranks[src]))
        return posted

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
            MismatchError: other ranks call something else.
        """
        for item in pending:
            while not item.join(max(0.0, self._look_at - self._now())):
                self.look([peer for posted, peer in self._posted if not posted.finished])
        # A finished message still refers to its array; a long ring would keep all of them.
        self._posted = [item for item in self._posted if not item[0].finished]

    def wait_all(self) -> None:
        """Wait for every message started so far."""
        self.wait(*(posted for posted, _ in self._posted))
        self._posted.clear()

    def look(self, awaited: Sequence[int]) -> None:
        """See to it in a long wait that it is not for ever: look at the time, and at the others.

        Args:
            awaited: the ranks that this one waits for, as numbers in the job.

        Raises:
            CommTimeoutError: the call's deadline has passed.
            MismatchError: they call something else.
        """
        now = self._now()
        waited = now - (self.end - self._limit)
        seconds = min(waited / 2, _ANSWER_SECONDS)
        root, group, sequence = self._backend.root, self._backend.group, self.sequence
        asked = {root.rank, *awaited[:_ASKED]}
        if differ(root.calls_of(asked, group.channel, sequence, seconds)):
            self.disagree()
        if now >= self.end:
            raise self.timed_out()
        self._look_at = min(now + waited, self.end)

    def remaining(self) -> float:
        """Seconds until the call's deadline, never negative."""
        return max(0.0, self.end - self._now())

    def check(self) -> None:
        """Do what has to be done while waiting without messages: see failures, and the time.

        Raises:
            CommTimeoutError: the call's deadline has passed.
            CommunicationError: the backend is broken.
        """
        root = self._backend.root
        root.progress()
        root.check_usable()
        if self._now() > self._look_at:
            self.look(self.ranks)

    def departed(self, rank: int) -> bool:
        """Whether a rank of the group has left the job."""
        return self._backend.root.departed(self.global_rank(rank))

    def missed(self, rank: int) -> PeerFailedError:
        """The error of a call for which a rank of the group is needed that has left."""
        return self._backend.root.missed(self.global_rank(rank))

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
            for item, _ in self._posted:
                if not item.finished:
                    item.cancel()
            self._posted.clear()

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
