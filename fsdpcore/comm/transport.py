"""``Transport``: what every transport shares, and what it must implement.

A transport is a ``Backend`` of a whole job. It implements ``post_send`` and ``post_recv`` (never
blocking), and the hooks below; sends and receives that block, collectives, groups, asynchronous
operations, deadlines and error reports come from the base classes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from fsdpcore.comm.backend import Backend, Capabilities
from fsdpcore.core.buffers import Array, Bytes
from fsdpcore.core.device import HOST, Device, Ticket
from fsdpcore.core.errors import ClosedError, CommunicationError, MismatchError, PeerFailedError
from fsdpcore.core.policy import Policy
from fsdpcore.core.work import OrderedExecutor, fresh
from fsdpcore.diagnostics import deadlocks
from fsdpcore.diagnostics.recorder import Recorder
from fsdpcore.diagnostics.status import WORLD_CHANNEL, Group, Status

if TYPE_CHECKING:
    from fsdpcore.collectives.algorithms.table import Algorithm
    from fsdpcore.collectives.run import CallSpec
    from fsdpcore.collectives.shared.region import SharedRegion
    from fsdpcore.launch.config import Config
    from fsdpcore.launch.environment import Place

# How long a rank that gives up waits for the others to say what they are doing.
QUERY_SECONDS = 0.5
_MAX_TAGS = 8


_alive: weakref.WeakSet[Transport] = weakref.WeakSet()


def _disown() -> None:
    """In a forked process, keep what was forked with it from talking in the rank's name."""
    for transport in list(_alive):
        transport.forked = True
        transport._failure = ClosedError(
            f"this process was forked from rank {transport.rank}, and is not that rank"
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)


class Segment(Protocol):
    """Memory that one rank has made for all.

    Attributes:
        number: what the others open it by.
    """

    number: int

    def bytes(self, offset: int, nbytes: int) -> Bytes:
        """An array on a part of it."""

    def close(self) -> None:
        """Let no further rank open it."""


class MemorySharing(Protocol):
    """A way to memory that several ranks see. Arrays on it keep it alive.

    Attributes:
        required: that ranks of one host cannot share memory is an error.
        available: there is such memory.
    """

    required: bool
    available: bool

    def area(self, memory: Bytes, rank: int, size: int) -> SharedRegion:
        """How ``size`` ranks take turns in ``memory``, seen from one of them."""

    def introduce(self) -> bytes:
        """Return at most 64 bytes, not all zero, by which other ranks find this one's memory.

        None at all where no rank needs to be met.

        Raises:
            OSError: there is no such memory; the reason.
        """

    def meet(self, introduction: bytes) -> None:
        """Make sure that the memory of the rank that introduced itself can be opened.

        Raises:
            OSError: it is out of reach; the reason.
        """

    def segment(self, nbytes: int) -> Segment:
        """Make ``nbytes`` zeros; raises OSError if they cannot be had."""

    def open(self, number: int) -> Bytes:
        """Map what another rank has made; raises OSError if it is out of reach."""

    def empty(self, nbytes: int) -> Bytes | None:
        """Return uninitialised memory that ``locate`` knows; None if there is none."""

    def locate(self, array: Array) -> tuple[int, int] | None:
        """Return two numbers of 64 bits by which all ranks find an array; None if they cannot."""

    def attach(self, number: int) -> Bytes:
        """Return the memory that the first of these numbers stands for; the second is an offset."""

    def close(self) -> None:
        """Let nobody map anything any more; arrays stay usable."""


class Transport(Backend):
    """Base of the transports; see the module docstring for what a new one implements.

    Attributes:
        ranks_are_threads: ``launch`` starts the ranks as threads, through ``threads``; otherwise
            as processes, each of which calls ``join``.
        needs_launcher: its ranks are processes that a launcher of its own starts, such as mpirun.
        takes_address: its URLs may name ``HOST:PORT``.
        memory: how ranks of one host share memory; None, on all ranks, where a transport has no
            way to.
        options: a frozen dataclass with the options of this transport's URLs and their defaults;
            fields of type int, float, bool and str can be given as text.
        device: where this rank's arrays are best, and whose arrays it moves beside NumPy's.
        policy: how ``algorithm="auto"`` is decided; ``config.policy``, which ``threads`` and
            ``join`` pass on.
        warned: that ranks of a host cannot share memory has been logged.
    """

    ranks_are_threads: ClassVar[bool] = False
    needs_launcher: ClassVar[bool] = False
    takes_address: ClassVar[bool] = False
    options: ClassVar[type[Any]]
    transport_capabilities: Capabilities
    memory: MemorySharing | None = None
    device: Device = HOST
    warned: bool = False

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout: float,
        *,
        hosts: Sequence[int] | None = None,
        policy: Policy | None = None,
    ) -> None:
        group = Group(WORLD_CHANNEL, tuple(range(world_size)))
        super().__init__(group, rank, hosts or [0] * world_size)
        self.default_timeout = timeout
        self.policy = policy or Policy()
        self.recorder = Recorder(self)
        self.recorder.add_group(self.order)
        self._failure: CommunicationError | None = None
        # In a process forked from this rank: connections and memory belong to the rank.
        self.forked = False
        _alive.add(self)
        self._peers_know = False
        self._failure_lock = threading.Lock()
        self._executors: list[OrderedExecutor] = []
        # Those of this rank's groups, to be unmapped at the end.
        self.areas: weakref.WeakSet[SharedRegion] = weakref.WeakSet()

    @property
    def root(self) -> Transport:
        return self

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        shares = self.memory is not None and self.memory.available
        return dataclasses.replace(self.transport_capabilities, shared_window=shares)

    # How ranks come into being.

    @classmethod
    def threads(cls, world_size: int, config: Config) -> list[Transport]:
        """Make the backends of all ranks, for ranks that are threads of this process."""
        raise NotImplementedError(f"{cls.__name__} has no ranks_are_threads")

    @classmethod
    def join(cls, place: Place, config: Config) -> Transport:
        """Become rank ``place.rank``, for ranks that are processes. Blocks until all are there.

        Raises:
            RendezvousError: some did not come in time, or they disagree about the job.
        """
        raise NotImplementedError(f"{cls.__name__} ranks are threads; use launch()")

    @classmethod
    def versions(cls) -> str:
        """Say in a few words which libraries this transport runs on, for ``fsdpcore doctor``."""
        return ""

    @property
    def failure(self) -> CommunicationError | None:
        """What the backend is broken by; a ``ClosedError`` once it was closed."""
        return self._failure

    # Hooks of a transport.

    @abstractmethod
    def _fail_pending(self, error: CommunicationError) -> None:
        """Finish every posted message with ``error``; may be called from any thread."""

    @abstractmethod
    def _tell(self, error: CommunicationError) -> None:
        """Send ``error`` to all peers, which call ``peer_reported``; never blocks, may fail."""

    @abstractmethod
    def _query(self, ranks: Iterable[int], channel: int, seconds: float) -> dict[int, Status]:
        """Ask ``ranks`` for their status; those that do not answer in time are left out."""

    @abstractmethod
    def _release(self, flush: bool) -> None:
        """Free sockets, threads and memory, with ``flush`` once all sent data is on its way."""

    # What a transport may add.

    def algorithms(self, backend: Backend) -> Mapping[str, Mapping[str, Algorithm]]:
        """Return this transport's own algorithms by collective and name, for a group of its ranks.

        Equal on all ranks of the group; does not communicate. Their functions have the signature
        of those in ``collectives/direct.py`` and its siblings, and may communicate by other means
        than the link that they are given.
        """
        return {}

    def device_algorithms(self, group: Backend) -> Mapping[str, Mapping[str, Algorithm]]:
        """Do as ``algorithms`` for arrays of ``device``, which the general ones do not move.

        Their functions enqueue what they do where the calling thread does, and do not wait for it.
        The link is for arrays of the host. The first one of a collective that supports a call is
        what ``auto`` takes.
        """
        return {}

    def enqueued(
        self,
        group: Backend,
        call: CallSpec,
        sequence: int,
        limit: float,
        ticket: Ticket | None,
        held: object,
    ) -> None:
        """Take note of a collective that was enqueued.

        Args:
            group, call, sequence: which.
            limit: seconds within which it must end.
            ticket: of the background; None where it was enqueued with everything else.
            held: with a ticket, what keeps its arrays, to be kept until it is done.
        """

    def keep(self, ticket: Ticket, held: object) -> None:
        """Keep what is used in the background of ``device`` until the ticket is done."""

    def device_group(self) -> AbstractContextManager[None]:
        """Have what algorithms that are not canonical enqueue in the block begin at its end."""
        return contextlib.nullcontext()

    def was_split(self, group: Backend, made: Backend | None) -> None:
        """Take note of a ``split``, which all ranks of ``group`` called, and what it made here."""

    def group_closed(self, group: Backend) -> None:
        """Free what there is of a group that moves arrays of ``device``; not of the whole job."""

    def departed(self, rank: int) -> bool:
        """Whether a rank has closed its backend; for those who wait by looking at memory."""
        return False

    def progress(self) -> None:
        """Handle what has arrived, without waiting; for those who wait by looking at memory."""

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

    def peer_reported(self, rank: int, error: CommunicationError) -> None:
        """Break the backend because ``rank`` told of ``error``, as it told all ranks."""
        with self._failure_lock:
            self._peers_know = True
        if isinstance(error, MismatchError):
            self.fail(error)
        elif isinstance(error, PeerFailedError) and error.rank not in (rank, self.rank):
            self.fail(PeerFailedError(f"{error} (reported by rank {rank})", error.rank))
        else:
            self.fail(PeerFailedError(f"rank {rank} failed: {error}", rank))

    def abort(self, reason: str) -> None:
        if isinstance(self._failure, PeerFailedError):
            error: CommunicationError = PeerFailedError(reason, self._failure.rank)
        else:
            error = CommunicationError(reason)
        self.fail(error, tell=True)

    def close(self) -> None:
        if self.forked:
            return
        broken = self._failure is not None
        if self._failure is not None:
            self.fail(self._failure, tell=True)  # in case that nobody has heard of it
        for executor in self._executors:
            executor.close(1.0 if broken else self.default_timeout)
        self._executors.clear()
        if not isinstance(self._failure, ClosedError):
            self.recorder.save()
        with self._failure_lock:
            self._peers_know = True  # that this rank has left, through _release
        self.fail(ClosedError(f"the backend of rank {self.rank} was closed"))
        self._release(flush=not broken)
        for area in list(self.areas):  # the collector may take others meanwhile
            area.close()
        self.areas.clear()
        if self.memory is not None:
            self.memory.close()

    # Services for groups.

    def new_executor(self, name: str) -> OrderedExecutor:
        """Make a thread for the asynchronous operations of a group; ``close`` ends it."""
        executor = OrderedExecutor(name)
        self._executors.append(executor)
        return executor

    def end_executor(self, executor: OrderedExecutor) -> None:
        """Let a group's asynchronous operations end, and forget its thread."""
        executor.close(self.default_timeout)
        with contextlib.suppress(ValueError):  # it was ended before
            self._executors.remove(executor)

    def unexpected(self, src: int, channel: int) -> list[int]:
        """The tags of messages from ``src`` that have come and that nobody has asked for."""
        return []

    def message_report(self, peer: int, channel: int) -> str:
        """Say what ``peer`` (of the whole job) does, for the error of a message that timed out."""
        report = deadlocks.unmatched(self.rank, peer, channel, self._ask)
        tags = sorted(set(self.unexpected(peer, channel)))
        if tags:
            shown = ", ".join(map(str, tags[:_MAX_TAGS])) + (", ..." if tags[_MAX_TAGS:] else "")
            report += f"\n  rank {peer} has sent messages that nobody receives, with tag {shown}"
        return report

    def missing_from(self, ranks: Iterable[int], channel: int, sequence: int) -> str:
        """Say which of ``ranks`` have not begun collective ``sequence`` of a group, and why."""
        group = self.recorder.group(channel) or Group(channel, tuple(ranks))
        return deadlocks.missing(self.rank, group, sequence, self._ask)

    def _ask(self, ranks: Iterable[int], channel: int) -> dict[int, Status]:
        """Get the status of ranks, of this one too; those that do not answer are left out."""
        others = list(ranks)
        found = {}
        if self.rank in others:
            others.remove(self.rank)
            found[self.rank] = self.recorder.status(channel)
        if others:
            found.update(self._query(others, channel, QUERY_SECONDS))
        return found
