"""``Transport``: what every transport shares, and what it must implement.

A transport is a ``Backend`` of a whole job. It implements ``post_send`` and ``post_recv`` (never
blocking), and the hooks below; sends and receives that block, collectives, groups, asynchronous
operations, deadlines and error reports come from the base classes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fsdpcore.backend import Backend, Capabilities
from fsdpcore.errors import ClosedError, CommunicationError, MismatchError, PeerFailedError
from fsdpcore.work import OrderedExecutor, fresh

if TYPE_CHECKING:
    from fsdpcore.collectives.algorithms import Algorithm
    from fsdpcore.config import Config
    from fsdpcore.environment import Place

WORLD_CHANNEL = 0

# How long a rank that gives up waits for the others to say what they are doing.
QUERY_SECONDS = 0.5


@dataclass(frozen=True)
class Status:
    """What a rank is doing: its last collective, and how far it is on one channel."""

    text: str
    entered: int


class Activity:
    """The last collective of this rank, kept for the error reports of all ranks."""

    def __init__(self) -> None:
        self._entered: dict[int, int] = {}
        self._text = ""
        self._since = time.monotonic()
        self._running = False

    def begin(self, channel: int, sequence: int, text: str) -> None:
        """Note that collective number ``sequence`` of a group starts."""
        self._entered[channel] = sequence
        self._text, self._since, self._running = text, time.monotonic(), True

    def end(self) -> None:
        """Note that the collective noted last has ended."""
        self._since, self._running = time.monotonic(), False

    def status(self, channel: int) -> Status:
        """Describe the last operation, and the last one begun on ``channel`` (0 for none)."""
        ago = time.monotonic() - self._since
        if not self._text:
            text = "no collective so far"
        elif self._running:
            text = f"in {self._text} for {ago:.1f} s"
        else:
            text = f"finished {self._text} {ago:.1f} s ago"
        return Status(text, self._entered.get(channel, 0))


class Transport(Backend):
    """Base of the transports; see the module docstring for what a new one implements.

    Attributes:
        ranks_are_threads: ``launch`` starts the ranks as threads, through ``threads``; otherwise
            as processes, each of which calls ``join``.
        takes_address: its URLs may name ``HOST:PORT``.
        options: a frozen dataclass with the options of this transport's URLs and their defaults;
            fields of type int, float, bool and str can be given as text.
    """

    ranks_are_threads: ClassVar[bool] = False
    takes_address: ClassVar[bool] = False
    options: ClassVar[type[Any]]
    transport_capabilities: Capabilities

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout: float,
        *,
        hosts: Sequence[int] | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__(range(world_size), rank, WORLD_CHANNEL, hosts or [0] * world_size)
        self.default_timeout = timeout
        self.deterministic = deterministic
        self.activity = Activity()
        self._failure: CommunicationError | None = None
        self._peers_know = False
        self._failure_lock = threading.Lock()
        self._executors: list[OrderedExecutor] = []

    @property
    def root(self) -> Transport:
        return self

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
        with self._failure_lock:
            first = self._failure is None
            if first:
                self._failure = error
            tell = tell and not self._peers_know
            self._peers_know = self._peers_know or tell
        if tell:
            self._tell(error)
        if first:
            self._fail_pending(error)

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
        broken = self._failure is not None
        if self._failure is not None:
            self.fail(self._failure, tell=True)  # in case that nobody has heard of it
        for executor in self._executors:
            executor.close(1.0 if broken else self.default_timeout)
        self._executors.clear()
        with self._failure_lock:
            self._peers_know = True  # that this rank has left, through _release
        self.fail(ClosedError(f"the backend of rank {self.rank} was closed"))
        self._release(flush=not broken)

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

    def last_operations(self, ranks: Iterable[int]) -> str:
        """Say what ``ranks`` (of the whole job) did last, for a timeout's message."""
        ranks = [rank for rank in ranks if rank != self.rank]
        known = self._query(ranks, WORLD_CHANNEL, QUERY_SECONDS)
        silent = "no answer: it is gone, or busy outside of NumPy and this library"
        lines = [f"  rank {r}: {known[r].text if r in known else silent}" for r in ranks]
        return "\n".join([":", *lines]) if lines else ""

    def missing_from(self, ranks: Iterable[int], channel: int, sequence: int) -> str:
        """Say which of ``ranks`` have not begun collective ``sequence`` of a group, and why."""
        ranks = [rank for rank in ranks if rank != self.rank]
        known = self._query(ranks, channel, QUERY_SECONDS)
        lines = []
        for rank in ranks:
            if rank not in known:
                lines.append(f"  rank {rank} is missing: no answer; gone or busy elsewhere")
            elif known[rank].entered < sequence:
                lines.append(f"  rank {rank} is missing: {known[rank].text}")
        if not lines:
            return "; every rank has begun it: the data is slow, raise the timeout"
        return "\n".join([":", *lines])
