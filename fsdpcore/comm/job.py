"""``Job``: what a rank has once for its whole job, whatever groups are made of it.

That is the state of failure, which is the first cause and stays; the threads of asynchronous
operations; and the questions that ranks ask each other when something does not come.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable

from fsdpcore.comm.envelope import Envelope
from fsdpcore.comm.sharing import MappedRegion, MemorySharing
from fsdpcore.core.buffers import Bytes
from fsdpcore.core.capabilities import Capabilities
from fsdpcore.core.clock import WALL, Clock
from fsdpcore.core.device import HOST, Device
from fsdpcore.core.errors import ClosedError, CommunicationError, MismatchError, PeerFailedError
from fsdpcore.core.policy import Policy
from fsdpcore.core.text import name_ranks
from fsdpcore.core.work import OrderedExecutor, Pending, fresh
from fsdpcore.diagnostics import deadlocks
from fsdpcore.diagnostics.recorder import Recorder
from fsdpcore.diagnostics.status import CallAnswer, Group, Status

# How long a rank that gives up waits for the others to say what they are doing. They do at once,
# unless their host is so busy that they do not run for a while; only who is gone costs all of it.
QUERY_SECONDS = 2.0
_MAX_TAGS = 8
_LEFT = "has left the job"

_alive: weakref.WeakSet[Job] = weakref.WeakSet()


def _disown() -> None:
    """In a forked process, keep what was forked with it from talking in the rank's name."""
    for job in list(_alive):
        job.forked = True
        job._failure = ClosedError(
            f"this process was forked from rank {job.rank}, and is not that rank"
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)


class Job(ABC):
    """A rank's part in a job: what its groups and their collectives need of the transport.

    Attributes:
        rank, world_size: of this rank, in the whole job.
        hosts: the number of each rank's host; equal for ranks that share one.
        default_timeout: seconds that an operation may take where the call does not say.
        policy: how ``algorithm="auto"`` is decided.
        recorder: the last operations of this rank.
        clock: by which this rank's deadlines are, and its threads wait.
        reduce_rate: bytes per second that this rank reduces, by a clock of virtual time; None where
            it takes the time that it does.
        device: where this rank's arrays are best, and whose arrays it moves beside NumPy's.
        memory: how ranks of one host share memory; None, on all ranks, where a transport has no
            way to.
        regions: the memory that this rank shares because of its groups, unmapped at the end.
        unauthenticated: why a message may be from somebody who is no rank of the job; empty if it
            cannot. The same on all ranks.
        warned: that ranks of a host cannot share memory has been logged.
        forked: this process was forked from the rank's; connections and memory belong to the rank.
    """

    rank: int
    world_size: int
    hosts: tuple[int, ...]
    memory: MemorySharing | None = None
    clock: Clock = WALL
    reduce_rate: float | None = None
    device: Device = HOST
    unauthenticated: str = "this transport does not say that nobody else can send to a rank"
    warned: bool = False

    def __init__(self, timeout: float, policy: Policy | None) -> None:
        self.default_timeout = timeout
        self.policy = policy or Policy()
        self.recorder = Recorder(self)
        self.regions: weakref.WeakSet[MappedRegion] = weakref.WeakSet()
        self.forked = False
        self._failure: CommunicationError | None = None
        self._peers_know = False
        self._failure_lock = threading.Lock()
        self._executors: list[OrderedExecutor] = []
        _alive.add(self)

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What the transport can do."""

    # Messages among all ranks.

    @abstractmethod
    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        """Start sending ``data`` (flat, contiguous) to rank ``dst`` of the job.

        Never blocks on the peer. ``data`` belongs to the transport until the returned ``Pending``
        has finished. What a rank sends to itself is copied, into its own table of messages: such a
        send has finished at once.

        Raises:
            CommunicationError: the backend is broken or closed.
        """

    @abstractmethod
    def post_recv(self, out: Bytes, src: int, envelope: Envelope) -> Pending:
        """Ask for the next message from rank ``src`` that matches ``envelope``; never blocks.

        ``src`` and the envelope's tag may be ``ANY_NUMBER``, its signature one of ``pack_room``;
        the returned ``Receive`` has the message's own key and envelope then. Nothing is written to
        ``out`` behind what comes.

        ``out`` belongs to the transport until the returned ``Pending`` has finished; that fails
        with ``MismatchError`` if the message has another size or signature.

        Raises:
            CommunicationError: the backend is broken or closed.
        """

    @abstractmethod
    def post_probe(self, src: int, envelope: Envelope) -> Pending:
        """Ask which message ``post_recv`` would take, without taking it; never blocks.

        Returns:
            A ``Receive`` that has finished if there is one, and else does when there is, with the
            message's own key and envelope.

        Raises:
            CommunicationError: the backend is broken or closed.
        """

    # What a transport does when something goes wrong, and at the end.

    @abstractmethod
    def _fail_pending(self, error: CommunicationError) -> None:
        """Finish every posted message with ``error``; may be called from any thread."""

    @abstractmethod
    def _tell(self, error: CommunicationError) -> None:
        """Send ``error`` to all peers, which call ``peer_reported``; never blocks, may fail."""

    @abstractmethod
    def _query(
        self, ranks: Iterable[int], channel: int, sequence: int, seconds: float
    ) -> dict[int, Status]:
        """Ask ``ranks`` for ``recorder.status(channel, sequence)``.

        Those that do not answer in time are left out.
        """

    @abstractmethod
    def _release(self, flush: bool) -> None:
        """Free sockets, threads and memory, with ``flush`` once all sent data is on its way."""

    def departed(self, rank: int) -> bool:
        """Whether a rank has closed its backend; for those who wait by looking at memory."""
        return False

    def has_returned(self, rank: int) -> bool:
        """Whether a rank that has left is known to have ended its program well."""
        return False

    def progress(self) -> None:  # noqa: B027 (most have nothing to do)
        """Handle what has arrived, without waiting; for those who wait by looking at memory."""

    @property
    def failure(self) -> CommunicationError | None:
        """What the job is broken by; a ``ClosedError`` once it was closed."""
        return self._failure

    # Failure: the first cause wins, and stays. The peers are told once, by whoever can first.

    def check_usable(self) -> None:
        """Raise the first cause if the backend is broken or closed."""
        if self._failure is not None:
            raise fresh(self._failure)

    def fail(self, error: CommunicationError, *, tell: bool = False) -> None:
        """Break the backend because of ``error``, unless it is broken already.

        Args:
            error: what every later call raises.
            tell: let the peers know, whose calls then raise as well; also where this rank was
                broken before, but by something that they have not heard of, such as a timeout.
        """
        if self.forked:
            return
        try:
            self._fail(error, tell)
        except BaseException:  # Ctrl-C: nobody else would do what it left undone
            self._failure = self._failure or fresh(error)
            if tell:
                self._peers_know = True
                self._tell(error)
            self._fail_pending(error)
            raise

    def _fail(self, error: CommunicationError, tell: bool) -> None:
        with self._failure_lock:
            first = self._failure is None
            if first:
                # Without its traceback, whose frames hold arrays.
                self._failure = fresh(error)
            tell = tell and not self._peers_know
            self._peers_know = self._peers_know or tell
        if tell:
            self._tell(error)
        if first:
            self._fail_pending(error)
            if not isinstance(error, ClosedError):
                self.recorder.save()

    def fail_with(self, error: CommunicationError) -> CommunicationError:
        """Break the backend because of ``error``, tell the peers, and return what to raise.

        That is the first cause: another thread may have broken the backend meanwhile.
        """
        self.fail(error, tell=True)
        return error if self._failure is None else fresh(self._failure)

    def peer_reported(self, rank: int, error: CommunicationError) -> None:
        """Break the backend because ``rank`` told of ``error``, as it told all ranks."""
        with self._failure_lock:
            self._peers_know = True
        if isinstance(error, MismatchError):
            self.fail(error)
        elif isinstance(error, PeerFailedError) and (
            error.pair is not None or error.rank not in (rank, self.rank)
        ):
            text = f"{error} (reported by rank {rank})"
            self.fail(PeerFailedError(text, error.rank, pair=error.pair, said=error.said))
        else:
            self.fail(PeerFailedError(f"rank {rank} failed: {error}", rank, said=True))

    def missed(self, rank: int, how: str = _LEFT) -> PeerFailedError:
        """The error of this rank, which needs another that is gone: who, why, and for what."""
        said = how == _LEFT
        if self.has_returned(rank):
            how += f" (it has returned from {self.recorder.program})"
        if waits := self.recorder.waits():
            how += f" while rank {self.rank} waits in {waits}"
        return PeerFailedError(f"rank {rank} {how}", rank, said=said)

    def abort(self, reason: str) -> None:
        """Break the whole job at once; see ``Backend.abort``."""
        if isinstance(self._failure, PeerFailedError):
            error: CommunicationError = PeerFailedError(reason, self._failure.rank)
        else:
            error = CommunicationError(reason)
        self.fail(error, tell=True)

    def _end_operations(self) -> None:
        """Let what runs end, tell the peers what they have not heard of, and stay closed."""
        broken = self._failure
        if broken is not None:
            self.fail(broken, tell=True)  # in case that nobody has heard of it
        self._close_executors()
        self._executors.clear()
        self.recorder.closed = True
        if not isinstance(self._failure, ClosedError):
            self.recorder.save()
        with self._failure_lock:
            self._peers_know = True  # that this rank has left, through _release
        self.fail(ClosedError(f"the backend of rank {self.rank} was closed"))

    # Services for groups.

    def new_executor(self, name: str) -> OrderedExecutor:
        """Make a thread for the asynchronous operations of a group; ``close`` ends it."""
        executor = OrderedExecutor(name, clock=self.clock, waited=self.recorder.waited)
        self._executors.append(executor)
        return executor

    def end_executor(self, executor: OrderedExecutor) -> None:
        """Let a group's asynchronous operations end, and forget its thread."""
        executor.close(self.default_timeout)
        with contextlib.suppress(ValueError):  # it was ended before
            self._executors.remove(executor)

    def _close_executors(self) -> None:
        """Let asynchronous operations end; for a moment only where the job is broken."""
        for executor in self._executors:
            executor.close(self.default_timeout if self._failure is None else 1.0)

    def lonely(self, channels: Iterable[int]) -> PeerFailedError | None:
        """Why nothing can come from any rank of a group: all others have left; None if it can.

        Args:
            channels: of the groups in which a message from any rank is waited for.
        """
        for channel in channels:
            group = self.recorder.group(channel)
            others = [rank for rank in group.ranks if rank != self.rank] if group else []
            if others and all(self.departed(rank) for rank in others):
                left = "has left the job" if len(others) == 1 else "have left the job"
                return PeerFailedError(f"{name_ranks(others)} {left}, all that could send")
        return None

    def unexpected(self, src: int, channel: int) -> list[int]:
        """The tags of messages from ``src`` that have come and that nobody has asked for."""
        return []

    def message_report(self, peer: int, group: Group) -> str:
        """Say what ``peer`` (of the whole job) does, for the error of a message that timed out.

        ``ANY_NUMBER`` stands for all others of the group whose message it is.
        """
        peers = [rank for rank in group.ranks if rank != self.rank] if peer < 0 else [peer]
        report = deadlocks.unmatched(self.rank, peers, group.channel, self._ask)
        for rank in peers[: deadlocks.MAX_SHOWN]:
            tags = sorted(set(self.unexpected(rank, group.channel)))
            if tags:
                more = ", ..." if tags[_MAX_TAGS:] else ""
                shown = ", ".join(map(str, tags[:_MAX_TAGS])) + more
                report += (
                    f"\n  rank {rank} has sent messages that nobody receives, with tag {shown}"
                )
        return report

    def missing_from(self, ranks: Iterable[int], channel: int, sequence: int) -> str:
        """Say which of ``ranks`` have not begun collective ``sequence`` of a group, and why."""
        group = self.recorder.group(channel) or Group(channel, tuple(ranks))
        return deadlocks.missing(self.rank, group, sequence, self._ask)

    def calls_of(
        self, ranks: Iterable[int], channel: int, sequence: int, seconds: float = QUERY_SECONDS
    ) -> dict[int, CallAnswer]:
        """Get what ranks have called as collective ``sequence`` of a group.

        Those that have not come to it, or do not answer in time, are left out.
        """
        found = self._ask(ranks, channel, sequence, seconds)
        return {rank: status.call for rank, status in found.items() if status.call is not None}

    def _ask(
        self,
        ranks: Iterable[int],
        channel: int,
        sequence: int = 0,
        seconds: float = QUERY_SECONDS,
    ) -> dict[int, Status]:
        """Get the status of ranks, of this one too; those that do not answer are left out."""
        others = list(ranks)
        found = {}
        if self.rank in others:
            others.remove(self.rank)
            found[self.rank] = self.recorder.status(channel, sequence)
        if others:
            found.update(self._query(others, channel, sequence, seconds))
        return found
