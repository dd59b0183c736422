"""``mpi``: the ranks are processes that an MPI launcher started, on one host or many.

Messages, groups, deadlines and error reports are those of every transport, carried by MPI's point
to point calls on a communicator of our own. MPI's collectives are offered as algorithms named
``native``. See ``engine.py`` for how messages travel and ``progress.py`` for who drives them.

A job that has broken ends with ``MPI_Abort`` when the first of its processes ends, so a rank that
fails ends them all, wherever they are.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fsdpcore.comm.backend import Backend
from fsdpcore.comm.envelope import Envelope
from fsdpcore.comm.hosts import MAX_BYTES, HostOptions, identity, number, warn_of_containers
from fsdpcore.comm.notices import failure_as_json, failure_from_json, unpack_json
from fsdpcore.comm.status_query import StatusQuery
from fsdpcore.comm.transport import Transport
from fsdpcore.core.buffers import Bytes
from fsdpcore.core.capabilities import Capabilities
from fsdpcore.core.errors import (
    ClosedError,
    CommunicationError,
    ConfigError,
    MismatchError,
    ProtocolError,
    RendezvousError,
    in_words,
)
from fsdpcore.core.wildcard import ANY_NUMBER
from fsdpcore.core.work import Deadline, Pending
from fsdpcore.diagnostics.status import Status

from ..memory.shared import memory_sharing
from .engine import MpiEngine, MpiReceive
from .guard import BlockedCallGuard
from .library import MPI, PROCESS, poll_until, versions
from .native import native_algorithms
from .place import check_place
from .progress import ProgressThread
from .transport import MpiTransport
from .wire import (
    MAX_INLINE,
    MAX_TEXT,
    MpiFrame,
    MpiFrameKind,
    pack,
    pack_notice,
)

if TYPE_CHECKING:
    from fsdpcore.comm.config import TransportConfig
    from fsdpcore.comm.place import RankPlace
    from fsdpcore.core.algorithm import Algorithm

# How long a rank that fails, or closes, waits until its last words are on their way.
_FAILED_SECONDS, _CLOSING_SECONDS = 0.5, 5.0
_BETWEEN_HOSTS = (
    "MPI does not say who may send to a rank over the network between hosts: use zmq, which does"
)


@dataclass(frozen=True)
class MpiOptions(HostOptions):
    """Options of ``mpi://`` URLs: those of ``HostOptions``, and this.

    Attributes:
        eager_bytes: messages up to this size are sent at once, and kept by the receiver.
    """

    eager_bytes: int = 16 * 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.eager_bytes <= MAX_INLINE:
            raise ConfigError(f"eager_bytes must be 0 to 64 KiB, got {self.eager_bytes}")


class MpiBackend(MpiTransport):
    """One rank; made by ``join``."""

    needs_launcher = True
    not_elastic = "MPI's launcher starts all ranks at once, and ends them when one is lost"
    options: ClassVar[type[MpiOptions]] = MpiOptions
    transport_capabilities = Capabilities("mpi", alpha=10e-6, beta=0.13e-9, gamma=0.1e-9)

    def __init__(self, comm: MPI.Intracomm, hosts: Iterable[str], config: TransportConfig) -> None:
        options = config.transport_options
        assert isinstance(options, MpiOptions)
        super().__init__(
            comm.rank, comm.size, config.timeout, hosts=number(hosts), policy=config.policy
        )
        self.comm = comm
        # Within a host, MPI moves bytes through memory of the user's own.
        self.unauthenticated = _BETWEEN_HOSTS if len(set(self.hosts)) > 1 else ""
        self.memory = memory_sharing(options.shm)
        self._eager_bytes = options.eager_bytes
        self.guard = BlockedCallGuard(self.rank, lambda: self.failure)
        self.engine = MpiEngine(comm, self._handle, self._interrupted, self._mismatched)
        self.lock, self.table = self.engine.lock, self.engine.table
        name = f"fsdpcore-mpi-rank{self.rank}"
        self.progress_thread = self.engine.progress_thread = ProgressThread(
            self.engine.poll, lambda: not self.engine.idle, self.guard.check, name
        )
        self._numbers = itertools.count(1)
        self._queries: dict[int, StatusQuery] = {}
        # Peers that post no more messages; peers that know that the job has failed.
        self._left: set[int] = set()
        self._returned: set[int] = set()  # those of them whose program has
        self._aware: set[int] = set()
        self._told = False  # the peers, by this rank, why it fails
        self._leaving = False
        self._released = False
        if self.world_size > 1:
            self.progress_thread.start()

    # Joining.

    @classmethod
    def versions(cls) -> str:
        return versions()

    @classmethod
    def join(cls, place: RankPlace, config: TransportConfig) -> Transport:
        deadline = Deadline(config.rendezvous_timeout)
        PROCESS.start(config.rendezvous_timeout)
        check_place(place)
        comm = PROCESS.duplicate_world(deadline.remaining())
        options = config.transport_options
        assert isinstance(options, MpiOptions)
        hosts = _exchange_identities(comm, identity(options.host_id), deadline)
        if comm.rank == 0 and not options.host_id:
            warn_of_containers(hosts)
        return cls(comm, hosts, config)

    def algorithms(self, backend: Backend) -> Mapping[str, Mapping[str, Algorithm]]:
        return native_algorithms(self, backend)

    # Messages.

    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        with self.lock:
            self.check_usable()
            if dst in self._left or self._leaving:
                self._refuse(dst)
            try:
                size = data.size
                if dst == self.rank:
                    self.engine.send_to_self(data, envelope)
                    return _SENT
                if size > self._eager_bytes:
                    return self.engine.offer(dst, data, envelope)
                channel, tag, signature = envelope
                message = pack(
                    MpiFrameKind.EAGER, self.rank, channel, tag, 0, size, signature, data
                )
                self.engine.control(dst, message)
            except BaseException as error:
                self._interrupted(error)
                raise
        return _SENT

    def post_recv(self, out: Bytes, src: int, envelope: Envelope) -> Pending:
        with self.lock:
            self.check_usable()
            try:
                incoming = self.engine.post(src, out, envelope)
                if src in self._left or src == ANY_NUMBER:
                    self._check_senders(incoming, src, envelope)
            except BaseException as error:
                self._interrupted(error)
                raise
        return incoming

    def post_probe(self, src: int, envelope: Envelope) -> Pending:
        with self.lock:
            self.check_usable()
            probe = self.engine.probe(src, envelope)
            self._check_senders(probe, src, envelope)
        return probe

    def _check_senders(self, incoming: MpiReceive, src: int, envelope: Envelope) -> None:
        """Withdraw a receive, and raise, if nobody is there to send what it waits for."""
        if src == ANY_NUMBER:
            error = self.lonely([envelope.channel])
            if error is not None and self.table.withdraw_receive(incoming):
                raise error
        elif src in self._left and self.table.withdraw_receive(incoming):
            self._refuse(src)

    def departed(self, rank: int) -> bool:
        return rank in self._left

    def has_returned(self, rank: int) -> bool:
        return rank in self._returned

    def progress(self) -> None:
        self.engine.poll()

    def unexpected(self, src: int, channel: int) -> list[int]:
        with self.lock:
            return self.table.unexpected(src, channel)

    def _refuse(self, peer: int) -> None:
        """Raise because of a message to or from a rank that has left, or by one that leaves."""
        if self._leaving:
            raise ClosedError(f"the backend of rank {self.rank} is being closed")
        self._miss(peer)
        self.check_usable()

    def _mismatched(self, error: MismatchError) -> None:
        self.fail(error, tell=True)

    def _interrupted(self, error: BaseException) -> None:
        """Break the backend when Ctrl-C, or a bug, has left a message half handled."""
        if isinstance(error, ProtocolError):
            self.fail(error, tell=True)
        elif not isinstance(error, CommunicationError):
            why = f"rank {self.rank} was interrupted: {in_words(error)}"
            self.fail(CommunicationError(why), tell=True)

    def _handle(self, frame: MpiFrame) -> None:
        kind, peer = frame.kind, frame.source
        if kind is MpiFrameKind.QUERY:
            self._answer(frame)
        elif kind is MpiFrameKind.STATUS:
            self._note_status(frame)
        elif kind is MpiFrameKind.FAIL:
            self._left.add(peer)
            self.engine.control(peer, pack(MpiFrameKind.SEEN, self.rank))
            self._note_failure(frame)
        elif kind is MpiFrameKind.BYE:
            if frame.number:
                self._returned.add(peer)
            self._note_leaving(peer)
        elif kind is MpiFrameKind.SEEN:
            self._aware.add(peer)

    # Failure and leaving.

    def _note_failure(self, frame: MpiFrame) -> None:
        error = failure_from_json(unpack_json(frame), self.world_size)
        self.peer_reported(frame.source, error)

    def _note_leaving(self, peer: int) -> None:
        """A peer posts no more messages; break the backend if any is needed from it."""
        self._left.add(peer)
        if self.table.awaits(peer) or self.engine.offered_to(peer):
            self._miss(peer)
        elif (error := self.lonely(self.table.open_channels())) is not None:
            self.fail(error, tell=True)

    def _miss(self, peer: int) -> None:
        """Break the backend because something was needed of a rank that has left."""
        self.fail(self.missed(peer), tell=True)

    def _fail_pending(self, error: CommunicationError) -> None:
        self.engine.fail_all(error)

    def _tell(self, error: CommunicationError) -> None:
        self._told = True
        self._to_all(pack_notice(MpiFrameKind.FAIL, self.rank, failure_as_json(error, MAX_TEXT)))

    def _to_all(self, message: bytes) -> None:
        with self.lock:
            if self._released:
                return
            for peer in range(self.world_size):
                if peer != self.rank and peer not in self._left:
                    with contextlib.suppress(MPI.Exception):
                        self.engine.control(peer, message)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, SystemExit) and error.code:
            PROCESS.doom(error.code if isinstance(error.code, int) else 1)
        super().__exit__(kind, error, traceback)

    def close(self) -> None:
        if self.forked:
            return
        self._close_executors()  # what they still run needs the messages
        with self.lock:
            leaves = self.failure is None and not self._leaving
            if leaves:
                # Said first, so that nobody waits for a receive that will never be posted, while
                # this rank waits until what it has sent is taken.
                returned = int(self.recorder.returned)
                self._to_all(pack(MpiFrameKind.BYE, self.rank, number=returned))
                self._leaving = True
        if leaves:
            self.progress_thread.until(
                lambda: self.failure or self.engine.idle, self.default_timeout
            )
        super().close()

    def _release(self, flush: bool) -> None:
        with self.lock:
            if self._released:
                return
            if not flush:
                PROCESS.doom(1, following=not self._told)
        if flush:
            self.progress_thread.until(lambda: self.engine.flushed, _CLOSING_SECONDS)
        elif self._told:  # until then they get answers
            self.progress_thread.until(self._all_aware, _FAILED_SECONDS)
        else:
            # This rank heard it from another, which ends the job soon: if it waited here, its
            # last words would come too late. Nor need a rank wait for it that fails as well.
            self._to_all(pack(MpiFrameKind.SEEN, self.rank))
            self.progress_thread.until(lambda: self.engine.flushed, _FAILED_SECONDS)
        self._released = True
        self.progress_thread.stop()
        self.engine.close()

    def _all_aware(self) -> bool:
        return len(self._left | self._aware) >= self.world_size - 1

    # What are the others doing?

    def _query(
        self, ranks: Iterable[int], channel: int, sequence: int, seconds: float
    ) -> dict[int, Status]:
        with self.lock:
            query = StatusQuery(rank for rank in ranks if rank not in self._left)
            query_number = next(self._numbers)
            if self._released:
                return {}
            self._queries[query_number] = query
            for rank in query.open:
                message = pack(
                    MpiFrameKind.QUERY, self.rank, channel, number=query_number, size=sequence
                )
                self.engine.control(rank, message)
        self.progress_thread.until(lambda: not query.open, seconds)
        with self.lock:
            del self._queries[query_number]
        return query.answers

    def _answer(self, frame: MpiFrame) -> None:
        status = self.recorder.status(frame.channel, frame.size)
        content = status.as_json()
        content["text"] = status.text[:MAX_TEXT]
        if len(json.dumps(content)) > MAX_INLINE:  # groups of thousands of ranks
            content["waits"] = []
        message = pack_notice(MpiFrameKind.STATUS, self.rank, content, frame.number)
        self.engine.control(frame.source, message)

    def _note_status(self, frame: MpiFrame) -> None:
        content = unpack_json(frame)
        query = self._queries.get(frame.number)
        if query is not None:
            query.note(frame.source, content)


def _exchange_identities(comm: MPI.Intracomm, own: str, deadline: Deadline) -> list[str]:
    """Tell all ranks on which host this one runs."""
    mine = np.frombuffer(own.encode(errors="replace").ljust(MAX_BYTES, b"\0"), np.uint8)
    every = np.empty((comm.size, MAX_BYTES), np.uint8)
    request = comm.Iallgather([mine, MAX_BYTES, MPI.BYTE], [every, MAX_BYTES, MPI.BYTE])
    if not poll_until(request, max(deadline.remaining(), 1.0)):
        PROCESS.doom(1)
        raise RendezvousError(f"rank {comm.rank}: not all ranks have said on which host they run")
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in every]


_SENT = Pending()
_SENT.finish()
