"""``zmq``: the ranks are processes, with a ZeroMQ and a TCP connection between each two.

ZeroMQ carries what the ranks tell each other: who is there, who fails or leaves, what they are
doing. Messages go over the TCP connection, straight from the sender's array into the receiver's;
between ranks of one host, the bytes of large ones go through memory (``memory.py``).
Sends start on the caller's thread; whoever waits looks after the connections; while nobody does, a
thread of each rank watches them, so data moves while Python computes.

A rank that dies is noticed by its connections. One that fails or leaves says so first.
"""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import zmq

from fsdpcore.comm.envelope import Envelope
from fsdpcore.comm.hosts import HostOptions, identity, number, warn_of_containers
from fsdpcore.comm.transport import Transport
from fsdpcore.core.buffers import Bytes
from fsdpcore.core.capabilities import Capabilities
from fsdpcore.core.errors import (
    ClosedError,
    CommunicationError,
    ConfigError,
    RendezvousError,
    in_words,
)
from fsdpcore.core.policy import Policy
from fsdpcore.core.work import Deadline, Pending
from fsdpcore.diagnostics.status import Status
from fsdpcore.launch.rendezvous import RankInfo, meet

from ..memory.shared import memory_sharing
from .acceptor import Acceptor
from .channel import PeerChannel
from .connect import (
    Authenticator,
    connect,
    host_of,
    listen,
    meeting_point,
    open_socket,
    own_address,
    proof,
)
from .control import Control
from .messages import ConnectionState, IncomingMessage, MessageSizes
from .peer import Peer
from .poller import Poller
from .wire import MAX_INLINE, MAX_SEGMENT

if TYPE_CHECKING:
    from fsdpcore.comm.config import TransportConfig
    from fsdpcore.comm.place import RankPlace

# How long a rank that closes, and one that failed, waits for the others to have read all it said.
_CLOSING_SECONDS, _FAILED_SECONDS = 5.0, 0.5


@dataclass(frozen=True)
class ZmqOptions(HostOptions):
    """Options of ``zmq://HOST:PORT`` URLs: those of ``HostOptions``, and these.

    HOST:PORT is where rank 0 lets the others meet. Large messages, too, go through shared memory.

    Attributes:
        interface: address of this host at which the ranks listen; by default loopback, or the
            one from which HOST is reached.
        segment_bytes: large messages travel in pieces of this size, between which others get
            their turn.
        eager_bytes: messages up to this size are sent at once, and kept by the receiver.
    """

    interface: str = ""
    segment_bytes: int = 1 << 20
    eager_bytes: int = 64 * 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1024 <= self.segment_bytes <= MAX_SEGMENT:
            raise ConfigError(f"segment_bytes must be 1 KiB to 16 MiB, got {self.segment_bytes}")
        if not 0 <= self.eager_bytes <= MAX_INLINE:
            raise ConfigError(f"eager_bytes must be 0 to 1 MiB, got {self.eager_bytes}")


class ZmqBackend(Transport):
    """One rank; made by ``join``."""

    takes_address = True
    options: ClassVar[type[ZmqOptions]] = ZmqOptions
    transport_capabilities = Capabilities("zmq", alpha=60e-6, beta=0.5e-9, gamma=0.1e-9)

    def __init__(
        self, place: RankPlace, timeout: float, options: ZmqOptions, policy: Policy | None = None
    ) -> None:
        super().__init__(place.rank, place.world_size, timeout, policy=policy)
        self.memory = memory = memory_sharing(options.shm)
        self._options = options
        self._token = place.token
        sizes = MessageSizes(options.eager_bytes, options.segment_bytes)
        self.state = ConnectionState(
            place.rank, sizes, memory, functools.partial(self.fail, tell=True)
        )
        self.control = Control(self, self.state, place.token)
        self.lock, self.table = self.state.lock, self.state.table
        name = f"fsdpcore-zmq-rank{place.rank}"
        self.poller = self.state.poller = Poller(self.lock, self.control.tick, name)
        self._peers = self.control.peers
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._acceptor = Acceptor(place.rank, place.token, self._arrived)

    # Joining.

    @classmethod
    def versions(cls) -> str:
        return f"pyzmq {zmq.pyzmq_version()}, libzmq {zmq.zmq_version()}"

    @classmethod
    def join(cls, place: RankPlace, config: TransportConfig) -> Transport:
        options = config.transport_options
        assert isinstance(options, ZmqOptions)
        backend = cls(place, config.timeout, options, config.policy)
        try:
            if place.world_size > 1:
                scheme = cls.transport_capabilities.transport
                address = meeting_point(place, config, scheme)
                backend._connect(place, address, config.rendezvous_timeout)
        except BaseException as error:
            why = f"rank {place.rank} did not join: {in_words(error)}"
            backend.fail(CommunicationError(why), tell=True)
            backend._release(flush=False)
            raise
        return backend

    def _connect(self, place: RankPlace, address: tuple[str, int], timeout: float) -> None:
        """Listen for the higher ranks, meet all, connect to the lower ones, greet each other."""
        deadline = Deadline(timeout)
        listening = place.rank == 0
        host = self._options.interface or own_address(address, deadline, listening=listening)
        authenticator = Authenticator(self._context)
        endpoints = self._listen(authenticator, host)
        rank_info: RankInfo = {"endpoints": endpoints, "host": identity(self._options.host_id)}
        if endpoints:
            here = host_of(next(iter(endpoints.values())))
            rank_info["data"] = self._acceptor.listen(here, self._peers)
        rank_infos = meet(place, address, rank_info, timeout)
        identities = [str(rank_info.get("host")) for rank_info in rank_infos]
        self.hosts = number(identities)
        if self.rank == 0 and not self._options.host_id:
            warn_of_containers(identities)
        for rank in range(self.rank):
            sock = self._new_peer(rank, host).socket
            connect(sock, rank_infos[rank], self.rank, rank, self._token)
        self.poller.add(self._acceptor.fileno(), self._acceptor.answer, rare=True)
        self.poller.add(authenticator.fileno(), authenticator.answer, rare=True)
        for peer in self._peers.values():
            self.control.add(peer)
        authenticator.answer()
        for rank in range(self.rank):
            self._acceptor.call(rank, rank_infos[rank].get("data"), deadline)
        self._greet_all(timeout, deadline)
        self.poller.remove(self._acceptor.fileno())
        self._acceptor.close()
        self.poller.start()

    def _listen(self, authenticator: Authenticator, host: str) -> dict[str, str]:
        endpoints: dict[str, str] = {}
        for rank in range(self.rank + 1, self.world_size):
            sock = self._new_peer(rank, host).socket
            authenticator.expect(sock, rank, proof(self._token, rank, self.rank))
            endpoints[str(rank)] = listen(sock, host, self.rank)
        return endpoints

    def _new_peer(self, rank: int, host: str) -> Peer:
        sock = open_socket(self._context, host)
        peer = self._peers[rank] = Peer(rank, sock, listening=rank > self.rank)
        return peer

    def _arrived(self, rank: int, sock: socket.socket) -> None:
        """Take over the data connection to a rank."""
        peer = self._peers[rank]
        memory = self.state.memory
        near = memory.available and self.hosts[rank] == self.hosts[self.rank]
        serve = functools.partial(self.control.serve_mail, peer)
        peer_channel = PeerChannel(self.state, rank, sock, serve, memory if near else None)
        peer.connect(peer_channel)

    def _greet_all(self, timeout: float, deadline: Deadline) -> None:
        def all_there() -> bool:
            return all(peer.joined for peer in self._peers.values())

        with self.lock:
            self.control.introduce()
            self.poller.until(lambda: self._failure or all_there(), deadline.remaining() + 1.0)
            # A job may fail while a slow rank joins; it has joined nonetheless, and learns of the
            # failure by its first call, if only everybody is there.
            if not self.poller.until(all_there, _FAILED_SECONDS if self._failure else 0.0):
                self.check_usable()
                silent = [str(peer.rank) for peer in self._peers.values() if not peer.joined]
                raise RendezvousError(
                    f"rank {self.rank} met all ranks, but could not connect to "
                    f"{', '.join(silent)} within {timeout:g} s; is a firewall between them?"
                )

    # Messages.

    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        with self.lock:
            self.check_usable()
            peer = self._peers[dst]
            if peer.left or self.control.leaving or peer.peer_channel is None:
                self._refuse(peer)
            assert peer.peer_channel is not None
            try:
                return peer.peer_channel.send(data, envelope)
            except BaseException as error:
                self.control.interrupted(error)
                raise

    def post_recv(self, out: Bytes, src: int, envelope: Envelope) -> Pending:
        with self.lock:
            self.check_usable()
            peer = self._peers[src]
            assert peer.peer_channel is not None, "it has joined"
            incoming = IncomingMessage(peer.peer_channel, out, envelope)
            try:
                if peer.left or peer.lost_at is not None:
                    self.control.serve(peer)  # its last words
                    self.control.serve_mail(peer)
                    self.check_usable()
                posted = peer.peer_channel.receive(incoming)
                if posted and peer.left:
                    self.table.withdraw_receive(incoming)
                    self._refuse(peer)
            except BaseException as error:
                self.control.interrupted(error)
                raise
        return incoming

    def _refuse(self, peer: Peer) -> None:
        """Raise because of a message to or from a rank that has left, or by one that leaves."""
        if self.control.leaving:
            raise ClosedError(f"the backend of rank {self.rank} is being closed")
        self.control.miss(peer)
        self.check_usable()

    def unexpected(self, src: int, channel: int) -> list[int]:
        with self.lock:
            return self.table.unexpected(src, channel)

    # What the ranks tell each other.

    def departed(self, rank: int) -> bool:
        return self._peers[rank].left

    def _tell(self, error: CommunicationError) -> None:
        with self.lock:
            self.control.say_failed(error)

    def _query(
        self, ranks: Iterable[int], channel: int, sequence: int, seconds: float
    ) -> dict[int, Status]:
        with self.lock:
            return self.control.query(ranks, channel, sequence, seconds)

    # Ending.

    def _fail_pending(self, error: CommunicationError) -> None:
        with self.lock:
            waits: list[Pending] = list(self.table.receives())
            for peer in self._peers.values():
                if peer.peer_channel is not None:
                    waits += peer.peer_channel.waits()
                    peer.peer_channel.drop_all()
            self.table.clear()
            for pending in waits:
                pending.finish(error)
            self.poller.changed()

    def close(self) -> None:
        if self.forked:
            return
        self._close_executors()  # what they still run needs the connections
        with self.lock:
            if self._failure is None and not self.control.leaving:
                # Said first, so that nobody waits for a receive that will never be posted, while
                # this rank waits until what it has sent is taken.
                self.control.say_bye()
                self.poller.until(
                    lambda: self._failure or all(peer.idle for peer in self._peers.values()),
                    self.default_timeout,
                )
        super().close()

    def _release(self, flush: bool) -> None:
        with self.lock:
            if self.control.released:
                return
            if self._failure is not None and not isinstance(self._failure, ClosedError):
                self.control.say_failed(self._failure)
            elif not self.control.leaving:
                self.control.say_bye()
            for peer in self._peers.values():
                peer.shut()
            # Not left to ZeroMQ's LINGER, which for a peer that is gone waits until it is over.
            self.poller.until(
                lambda: all(peer.has_read_all for peer in self._peers.values()),
                _CLOSING_SECONDS if flush else _FAILED_SECONDS,
            )
            self.control.released = True
        self.poller.stop()
        self._acceptor.close()
        for peer in self._peers.values():
            peer.close()
        # Very rarely libzmq never comes back from this, though all sockets are closed: seen after
        # failures, on a loaded machine. What is left then are its own idle threads.
        ending = threading.Thread(target=self._context.destroy, args=(0,), daemon=True)
        ending.start()
        ending.join(_CLOSING_SECONDS if flush else _FAILED_SECONDS)
