"""``zmq``: the ranks are processes, with one ZeroMQ connection over TCP between each two.

Small messages are sent at once. A large one is offered first, then sent in segments as far as the
receiver has room, straight from the sender's array into the receiver's. A thread of each rank
watches the sockets, so data moves while Python computes; sends start on the caller's thread.

A rank that dies is noticed by its connections. One that fails or leaves says so first.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import select
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import zmq

from fsdpcore import errors
from fsdpcore.backend import Capabilities, Envelope
from fsdpcore.buffers import Bytes
from fsdpcore.errors import (
    CommunicationError,
    ConfigError,
    PeerFailedError,
    ProtocolError,
    RendezvousError,
)
from fsdpcore.rendezvous import meet, split_address
from fsdpcore.transport import Status, Transport
from fsdpcore.work import Deadline, Pending

from .matching import MatchTable, mismatch
from .zmq_peer import Arrival, Incoming, Peer, copy_eager
from .zmq_wire import (
    MAX_INLINE,
    MAX_SEGMENT,
    Frame,
    Kind,
    pack_json,
    unpack,
    unpack_json,
)

if TYPE_CHECKING:
    from fsdpcore.config import Config
    from fsdpcore.environment import Place

# A connection breaks a moment before the last frames on it have been read; wait for them.
_LAST_WORDS_SECONDS = 0.05
_MAX_REASON = 64 * 1024


@dataclass(frozen=True)
class ZmqOptions:
    """Options of ``zmq://HOST:PORT`` URLs, where HOST:PORT is where rank 0 lets the others meet.

    Attributes:
        interface: address of this host at which the ranks listen; by default loopback, or the
            one from which HOST is reached.
        segment_bytes: large messages travel in pieces of this size.
        eager_bytes: messages up to this size are sent at once, and kept by the receiver.
    """

    interface: str = ""
    segment_bytes: int = 1 << 20
    eager_bytes: int = 32 * 1024

    def __post_init__(self) -> None:
        if not 1024 <= self.segment_bytes <= MAX_SEGMENT:
            raise ConfigError(f"segment_bytes must be 1 KiB to 16 MiB, got {self.segment_bytes}")
        if not 0 <= self.eager_bytes <= MAX_INLINE:
            raise ConfigError(f"eager_bytes must be 0 to 1 MiB, got {self.eager_bytes}")


class ZmqBackend(Transport):
    """One rank; made by ``join``."""

    takes_address = True
    options: ClassVar[type[ZmqOptions]] = ZmqOptions
    transport_capabilities = Capabilities("zmq", alpha=60e-6, beta=0.5e-9, gamma=0.1e-9)

    def __init__(self, place: Place, timeout: float, options: ZmqOptions) -> None:
        super().__init__(place.rank, place.world_size, timeout)
        self.lock = threading.RLock()
        self.table: MatchTable[Incoming, Arrival] = MatchTable()
        self._token = place.token
        self._options = options
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers: dict[int, Peer] = {}
        self._numbers = itertools.count(1)
        self._queries: dict[int, _Query] = {}
        self._progress = threading.Condition(self.lock)
        self._wake_in, self._wake_out = socket.socketpair()
        self._stopping = False
        self._released = False
        self._thread = threading.Thread(
            target=self._watch, name=f"fsdpcore-zmq-rank{place.rank}", daemon=True
        )

    # Joining.

    @classmethod
    def versions(cls) -> str:
        return f"pyzmq {zmq.pyzmq_version()}, libzmq {zmq.zmq_version()}"

    @classmethod
    def join(cls, place: Place, config: Config) -> Transport:
        options = config.transport_options
        assert isinstance(options, ZmqOptions)
        backend = cls(place, config.timeout, options)
        try:
            if place.world_size > 1:
                backend._connect(place, _meeting_point(place, config), config.rendezvous_timeout)
        except BaseException:
            backend._release(flush=False)
            raise
        return backend

    def _connect(self, place: Place, address: tuple[str, int], timeout: float) -> None:
        """Listen for the higher ranks, meet all, connect to the lower ones, greet each other."""
        deadline = Deadline(timeout)
        host = self._options.interface or _own_address(address, listening=place.rank == 0)
        ports: dict[str, str] = {}
        for rank in range(self.rank + 1, self.world_size):
            peer = self._new_peer(rank, host)
            try:
                peer.socket.bind(f"tcp://{_bracketed(host)}:*")
            except zmq.ZMQError as error:
                raise RendezvousError(
                    f"rank {self.rank} cannot listen at {host}: {error}"
                ) from error
            ports[str(rank)] = str(peer.socket.getsockopt_string(zmq.LAST_ENDPOINT))
        cards = meet(place, address, {"endpoints": ports}, timeout)
        for rank in range(self.rank):
            endpoint = str(cards[rank]["endpoints"][str(self.rank)])
            self._new_peer(rank, host).socket.connect(endpoint)
        self._thread.start()
        hello = pack_json({"rank": self.rank, "token": self._token})
        with self.lock:
            for peer in self._peers.values():
                peer.queue(Frame(Kind.HELLO, payload=hello))
                self._serve(peer)
            self._progress.wait_for(
                lambda: self._failure or all(p.greeted for p in self._peers.values()),
                deadline.remaining() + 1.0,
            )
            silent = [str(peer.rank) for peer in self._peers.values() if not peer.greeted]
        self.check_usable()
        if silent:
            raise RendezvousError(
                f"rank {self.rank} met all ranks, but could not connect to {', '.join(silent)} "
                f"within {timeout:g} s; is a firewall between them?"
            )

    def _new_peer(self, rank: int, host: str) -> Peer:
        sock: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        sock.setsockopt(zmq.IPV6, ":" in host)
        # A connection that breaks has lost data: never reconnect behind the scenes.
        sock.setsockopt(zmq.RECONNECT_IVL, -1)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_SEGMENT + 4096)
        # The window of each large message and the offers bound what is queued; a limit on the
        # number of frames on top would only stall small ones.
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.RCVHWM, 0)
        sock.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20_000)
        peer = self._peers[rank] = Peer(self, rank, sock, self._options.segment_bytes)
        return peer

    # Messages.

    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        with self.lock:
            self.check_usable()
            peer = self._peers[dst]
            self._check_here(peer)
            if data.size > self._options.eager_bytes:
                outgoing: Pending = peer.offer(next(self._numbers), data, envelope)
            else:
                channel, tag, signature = envelope
                payload = data.tobytes()
                peer.queue(Frame(Kind.EAGER, channel, tag, signature=signature, payload=payload))
                outgoing = Pending()
                outgoing.finish()
            self._serve(peer)
        return outgoing

    def post_recv(self, out: Bytes, src: int, envelope: Envelope) -> Pending:
        with self.lock:
            self.check_usable()
            peer = self._peers[src]
            incoming = Incoming(peer, out, src, envelope)
            arrival = self.table.post(incoming)
            if arrival is not None:
                self._match(incoming, arrival)
            elif peer.left or peer.lost_at is not None:
                self._serve(peer)
                if self.table.withdraw_receive(incoming):
                    self._check_here(peer)
        return incoming

    def _check_here(self, peer: Peer) -> None:
        if peer.left:
            raise PeerFailedError(f"rank {peer.rank} has left the job", peer.rank)

    def _match(self, incoming: Incoming, arrival: Arrival) -> None:
        peer, frame = arrival.peer, arrival.frame
        sent = Envelope(frame.channel, frame.tag, frame.signature)
        error = mismatch(
            peer.rank, sent, frame.size, self.rank, incoming.envelope, incoming.out.size
        )
        if error is not None:
            incoming.finish(error)
            self.fail(error, tell=True)
        elif frame.kind is Kind.EAGER:
            copy_eager(frame, incoming.out)
            incoming.finish()
        else:
            peer.accept(incoming, frame)

    # Progress: whoever holds the lock serves a socket until nothing is left to do on it. Its file
    # descriptor signals changes only, and any use of the socket may swallow such a signal.

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._wake_in, select.POLLIN)
        served: dict[int, Peer] = {}
        for peer in self._peers.values():
            for sock in (peer.socket, peer.monitor):
                descriptor = int(sock.getsockopt(zmq.FD))
                served[descriptor] = peer
                poller.register(descriptor, select.POLLIN)
        while True:
            lost = any(p.lost_at is not None and not p.left for p in self._peers.values())
            waiting = lost and self._failure is None
            ready = poller.poll(_LAST_WORDS_SECONDS * 1000 if waiting else None)
            with self.lock:
                if self._stopping:
                    return
                for peer in {served[d] for d, _ in ready if d in served}:
                    self._serve(peer)
                if lost:
                    self._declare_lost()
                self._progress.notify_all()

    def _serve(self, peer: Peer) -> None:
        if self._released:
            return
        try:
            while True:
                events = int(peer.socket.getsockopt(zmq.EVENTS))
                if events & zmq.POLLIN:
                    self._handle(peer, unpack(peer.socket.recv(zmq.NOBLOCK)))
                elif events & zmq.POLLOUT and not peer.flushed:
                    peer.flush()
                else:
                    break
            while int(peer.monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                peer.monitor.recv_multipart(zmq.NOBLOCK)
                peer.disconnected()
        except ProtocolError as error:
            self.fail(ProtocolError(f"from the connection to rank {peer.rank}: {error}"), tell=True)

    def _handle(self, peer: Peer, frame: Frame) -> None:
        if not peer.greeted:
            self._greet(peer, frame)
            return
        if frame.kind is Kind.DATA:
            peer.read_data(frame)
            return
        if peer.socket.getsockopt(zmq.RCVMORE):
            raise ProtocolError(f"a {frame.kind.name} frame has a second part")
        if frame.kind in (Kind.EAGER, Kind.OFFER):
            arrival = Arrival(peer, frame)
            incoming = self.table.arrive(arrival)
            if incoming is not None:
                self._match(incoming, arrival)
        elif frame.kind is Kind.GRANT:
            peer.granted(frame)
        elif frame.kind is Kind.TAKEN:
            peer.taken(frame)
        elif frame.kind is Kind.QUERY:
            status = self.activity.status(frame.channel)
            payload = pack_json({"text": status.text, "entered": status.entered})
            peer.queue(Frame(Kind.STATUS, message=frame.message, payload=payload))
        elif frame.kind is Kind.STATUS:
            self._note_status(peer, frame)
        elif frame.kind is Kind.FAIL:
            self._note_failure(peer, frame)
        elif frame.kind is Kind.BYE:
            peer.left = True
            self._fail_waits(peer, f"rank {peer.rank} has left the job")
        else:
            raise ProtocolError(f"a second {frame.kind.name} frame")

    def _greet(self, peer: Peer, frame: Frame) -> None:
        content = unpack_json(frame) if frame.kind is Kind.HELLO else {}
        token = str(content.get("token", ""))
        right = content.get("rank") == peer.rank and hmac.compare_digest(token, self._token)
        if not right:
            raise ProtocolError("who connected is not that rank of this job")
        peer.greeted = True

    # Failure and leaving.

    def _note_failure(self, peer: Peer, frame: Frame) -> None:
        content = unpack_json(frame)
        kind = getattr(errors, str(content.get("kind")), CommunicationError)
        same = kind if kind in (errors.MismatchError, CommunicationError) else CommunicationError
        peer.left = True  # it will not answer any more
        self.peer_reported(peer.rank, same(str(content.get("reason", "no reason given"))))

    def _declare_lost(self) -> None:
        """Fail because of peers whose connection broke a while ago without a last word."""
        now = time.monotonic()
        for peer in self._peers.values():
            if peer.lost_at is None or peer.left or now - peer.lost_at < _LAST_WORDS_SECONDS:
                continue
            why = "its connection broke: the process died or the network failed"
            if not peer.greeted:
                why = "its connection broke before it said who it was"
            self.fail(PeerFailedError(f"rank {peer.rank} is lost: {why}", peer.rank))
            peer.left = True

    def _fail_waits(self, peer: Peer, why: str) -> None:
        """A peer has left: break the backend if anything still waits for it."""
        waiting = any(receive.key[0] == peer.rank for receive in self.table.receives())
        if waiting or peer.waits():
            self.fail(PeerFailedError(why, peer.rank))

    def _fail_pending(self, error: CommunicationError) -> None:
        with self.lock:
            waits: list[Pending] = list(self.table.receives())
            for peer in self._peers.values():
                waits += peer.waits()
                peer.drop_all()
            self.table.clear()
            for pending in waits:
                pending.finish(error)
            self._progress.notify_all()

    def _tell(self, error: CommunicationError) -> None:
        content = {"kind": type(error).__name__, "reason": str(error)[:_MAX_REASON]}
        self._to_all(Frame(Kind.FAIL, payload=pack_json(content)))

    def _to_all(self, frame: Frame) -> None:
        with self.lock:
            for peer in self._peers.values():
                if not self._released and not peer.left and peer.lost_at is None:
                    with contextlib.suppress(zmq.ZMQError):
                        peer.queue(frame)

    def close(self) -> None:
        with self.lock:
            if self._failure is None:
                self._progress.wait_for(
                    lambda: self._failure or all(peer.idle for peer in self._peers.values()),
                    self.default_timeout,
                )
        super().close()

    def _release(self, flush: bool) -> None:
        with self.lock:
            if self._released:
                return
            self._to_all(Frame(Kind.BYE))
            self._progress.wait_for(
                lambda: all(
                    p.flushed or p.left or p.lost_at is not None for p in self._peers.values()
                ),
                5.0 if flush else 0.5,
            )
            self._stopping = self._released = True
        self._wake_out.send(b"x")
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        for peer in self._peers.values():
            peer.close(5000 if flush else 500)
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()

    # What are the others doing?

    def _query(self, ranks: Iterable[int], channel: int, seconds: float) -> dict[int, Status]:
        with self.lock:
            number = next(self._numbers)
            query = self._queries[number] = _Query(set(ranks))
            for rank in query.open.copy():
                peer = self._peers[rank]
                if self._released or peer.left or peer.lost_at is not None:
                    query.open.discard(rank)
                else:
                    peer.queue(Frame(Kind.QUERY, channel, message=number))
                    self._serve(peer)
            self._progress.wait_for(lambda: not query.open, seconds)
            del self._queries[number]
            return query.answers

    def _note_status(self, peer: Peer, frame: Frame) -> None:
        content = unpack_json(frame)
        query = self._queries.get(frame.message)
        if query is not None and peer.rank in query.open:
            query.open.discard(peer.rank)
            entered = content.get("entered")
            number = entered if isinstance(entered, int) else 0
            query.answers[peer.rank] = Status(str(content.get("text", "")), number)


class _Query:
    def __init__(self, ranks: set[int]) -> None:
        self.open = ranks
        self.answers: dict[int, Status] = {}


def _meeting_point(place: Place, config: Config) -> tuple[str, int]:
    """Where the ranks meet: what the launcher says, or the address in the URL."""
    if place.rendezvous is not None:
        return split_address(place.rendezvous)
    if config.port:
        return config.host, config.port
    raise ConfigError(
        f"{place.launcher} does not say where the ranks can meet: name an address that rank 0's "
        "host has, as in --transport zmq://HOST:PORT"
    )


def _own_address(address: tuple[str, int], *, listening: bool) -> str:
    """The address of this host at which the ranks reach it: loopback if they meet there."""
    host, port = address
    if listening:
        return socket.gethostbyname(host) if ":" not in host else host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # no packet is sent: the kernel picks a route
        except OSError as error:
            raise RendezvousError(f"no route to rank 0 at {host}:{port}: {error}") from error
        return str(probe.getsockname()[0])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
