"""``zmq``: the ranks are processes, with one ZeroMQ connection over TCP between each two.

Small messages are sent at once. A large one is offered first, then sent in segments as far as the
receiver has room, straight from the sender's array into the receiver's. Whoever waits looks after
the sockets; while nobody does, a thread of each rank watches them, so data moves while Python
computes. Sends start on the caller's thread.

A rank that dies is noticed by its connections. One that fails or leaves says so first.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import itertools
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import zmq

from fsdpcore.backend import Capabilities, Envelope
from fsdpcore.buffers import Bytes
from fsdpcore.errors import (
    ClosedError,
    CommunicationError,
    ConfigError,
    MismatchError,
    PeerFailedError,
    ProtocolError,
    RendezvousError,
    in_words,
)
from fsdpcore.host import identity, number
from fsdpcore.policy import Policy
from fsdpcore.rendezvous import Card, meet
from fsdpcore.status import Status
from fsdpcore.transport import Transport
from fsdpcore.work import Deadline, Pending

from .matching import mismatch
from .shared_memory import check_option, memory_sharing
from .zmq_connect import Door, connect, listen, meeting_point, open_socket, own_address, proof
from .zmq_peer import Arrival, Engine, Incoming, Peer
from .zmq_watch import Watch
from .zmq_wire import MAX_INLINE, MAX_SEGMENT, Frame, Kind, pack_json, unpack, unpack_json

if TYPE_CHECKING:
    from fsdpcore.config import Config
    from fsdpcore.environment import Place

_EVENTS = int(zmq.EVENTS)
_POLLIN, _POLLOUT, _NOBLOCK = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.NOBLOCK)

# A connection breaks a moment before the last frames on it have been read; wait for them.
_LAST_WORDS_SECONDS = 0.05
# How long a rank that closes, and one that failed, waits for the others to have read all it said.
_CLOSING_SECONDS, _FAILED_SECONDS = 5.0, 0.5
_MAX_TEXT = 64 * 1024
# Frames that are read before other threads of this rank get their turn.
_FRAMES_AT_ONCE = 8
_WINDOW_SEGMENTS = 8


@dataclass(frozen=True)
class ZmqOptions:
    """Options of ``zmq://HOST:PORT`` URLs, where HOST:PORT is where rank 0 lets the others meet.

    Attributes:
        interface: address of this host at which the ranks listen; by default loopback, or the
            one from which HOST is reached.
        segment_bytes: large messages travel in pieces of this size, of which up to eight are on
            their way from one rank to another.
        eager_bytes: messages up to this size are sent at once, and kept by the receiver.
        shm: "auto" lets collectives among ranks of one host go through shared memory, where that
            is to be had; "off" sends everything over TCP.
    """

    interface: str = ""
    segment_bytes: int = 1 << 20
    eager_bytes: int = 32 * 1024
    shm: str = "auto"

    def __post_init__(self) -> None:
        if not 1024 <= self.segment_bytes <= MAX_SEGMENT:
            raise ConfigError(f"segment_bytes must be 1 KiB to 16 MiB, got {self.segment_bytes}")
        if not 0 <= self.eager_bytes <= MAX_INLINE:
            raise ConfigError(f"eager_bytes must be 0 to 1 MiB, got {self.eager_bytes}")
        check_option(self.shm)


class ZmqBackend(Transport):
    """One rank; made by ``join``."""

    takes_address = True
    options: ClassVar[type[ZmqOptions]] = ZmqOptions
    transport_capabilities = Capabilities("zmq", alpha=60e-6, beta=0.5e-9, gamma=0.1e-9)

    def __init__(
        self, place: Place, timeout: float, options: ZmqOptions, policy: Policy | None = None
    ) -> None:
        super().__init__(place.rank, place.world_size, timeout, policy=policy)
        self.engine = Engine()
        self.lock, self.table = self.engine.lock, self.engine.table
        name = f"fsdpcore-zmq-rank{place.rank}"
        self.watch = self.engine.watch = Watch(self.lock, self._tick, name)
        self.memory = memory_sharing(options.shm)
        self._token = place.token
        self._options = options
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers: dict[int, Peer] = {}
        self._numbers = itertools.count(1)
        self._queries: dict[int, _Query] = {}
        self._introduced = False
        self._leaving = False
        self._released = False

    # Joining.

    @classmethod
    def versions(cls) -> str:
        return f"pyzmq {zmq.pyzmq_version()}, libzmq {zmq.zmq_version()}"

    @classmethod
    def join(cls, place: Place, config: Config) -> Transport:
        options = config.transport_options
        assert isinstance(options, ZmqOptions)
        backend = cls(place, config.timeout, options, config.policy)
        try:
            if place.world_size > 1:
                backend._connect(place, meeting_point(place, config), config.rendezvous_timeout)
        except BaseException as error:
            why = f"rank {place.rank} did not join: {in_words(error)}"
            backend.fail(CommunicationError(why), tell=True)
            backend._release(flush=False)
            raise
        return backend

    def _connect(self, place: Place, address: tuple[str, int], timeout: float) -> None:
        """Listen for the higher ranks, meet all, connect to the lower ones, greet each other."""
        deadline = Deadline(timeout)
        listening = place.rank == 0
        host = self._options.interface or own_address(address, deadline, listening=listening)
        door = Door(self._context)
        endpoints: dict[str, str] = {}
        for rank in range(self.rank + 1, self.world_size):
            sock = self._new_peer(rank, host).socket
            door.expect(sock, rank, proof(self._token, rank, self.rank))
            endpoints[str(rank)] = listen(sock, host, self.rank)
        card: Card = {"endpoints": endpoints, "host": identity()}
        cards = meet(place, address, card, timeout)
        self.hosts = number(str(card.get("host")) for card in cards)
        for rank in range(self.rank):
            sock = self._new_peer(rank, host).socket
            connect(sock, cards[rank], self.rank, rank, self._token)
        self._register(door)
        self._greet_all(timeout, deadline)
        self.watch.start()

    def _new_peer(self, rank: int, host: str) -> Peer:
        sock, segment = open_socket(self._context, host), self._options.segment_bytes
        window, listening = _WINDOW_SEGMENTS * segment, rank > self.rank
        peer = Peer(self.engine, rank, sock, segment, window, listening=listening)
        self._peers[rank] = peer
        return peer

    def _register(self, door: Door) -> None:
        """Tell the watch what to look at."""
        for peer in self._peers.values():
            serve = functools.partial(self._serve, peer)
            self.watch.add(int(peer.socket.getsockopt(zmq.FD)), serve)
            self.watch.add(int(peer.monitor.getsockopt(zmq.FD)), peer.read_monitor, rare=True)
        self.watch.add(door.fileno(), door.answer, rare=True)
        door.answer()

    def _greet_all(self, timeout: float, deadline: Deadline) -> None:
        def all_greeted() -> bool:
            return all(peer.greeted for peer in self._peers.values())

        with self.lock:
            self._introduced = True
            for peer in self._peers.values():
                hello = {"rank": self.rank, "proof": proof(self._token, self.rank, peer.rank)}
                peer.queue(Frame(Kind.HELLO, payload=pack_json(hello)))
                self._serve(peer)
                peer.read_monitor()
            self.watch.until(lambda: self._failure or all_greeted(), deadline.remaining() + 1.0)
            # A job may fail while a slow rank joins; it has joined nonetheless, and learns of the
            # failure by its first call, if only everybody is there.
            if not self.watch.until(all_greeted, _FAILED_SECONDS if self._failure else 0.0):
                self.check_usable()
                silent = [str(peer.rank) for peer in self._peers.values() if not peer.greeted]
                raise RendezvousError(
                    f"rank {self.rank} met all ranks, but could not connect to "
                    f"{', '.join(silent)} within {timeout:g} s; is a firewall between them?"
                )

    # Messages.

    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        with self.lock:
            self.check_usable()
            peer = self._peers[dst]
            if peer.left or self._leaving:
                self._refuse(peer)
            try:
                pending: Pending = _SENT
                if data.size > self._options.eager_bytes:
                    pending = peer.offer(next(self._numbers), data, envelope)
                else:
                    channel, tag, signature = envelope
                    payload = data.tobytes()
                    peer.queue(Frame(Kind.EAGER, channel, tag, 0, 0, 0, signature, payload))
                self._serve(peer)
                self.watch.changed()
            except BaseException as error:
                self._interrupted(error)
                raise
        return pending

    def post_recv(self, out: Bytes, src: int, envelope: Envelope) -> Pending:
        with self.lock:
            self.check_usable()
            peer = self._peers[src]
            incoming = Incoming(peer, out, envelope)
            try:
                if peer.left or peer.lost_at is not None:
                    self._serve(peer)  # its last words
                    self.check_usable()
                arrival = self.table.post(incoming)
                if arrival is not None:
                    self._match(incoming, arrival)
                    if not incoming.finished:
                        self._serve(peer)  # which has been asked for the data
                elif peer.left:
                    self.table.withdraw_receive(incoming)
                    self._refuse(peer)
            except BaseException as error:
                self._interrupted(error)
                raise
        return incoming

    def _refuse(self, peer: Peer) -> None:
        """Raise because of a message to or from a rank that has left, or by one that leaves."""
        if self._leaving:
            raise ClosedError(f"the backend of rank {self.rank} is being closed")
        self._miss(peer)
        self.check_usable()

    def _match(self, incoming: Incoming, arrival: Arrival) -> None:
        peer, frame, envelope = arrival.peer, arrival.frame, incoming.envelope
        fits = frame.signature == envelope.signature and frame.size == incoming.out.size
        if not fits:
            sent = Envelope(frame.channel, frame.tag, frame.signature)
            error = mismatch(peer.rank, sent, frame.size, self.rank, envelope, incoming.out.size)
            assert error is not None
            incoming.finish(error)
            self.fail(error, tell=True)
        elif frame.kind is Kind.EAGER:
            incoming.out.data[:] = frame.payload
            incoming.finish()
        else:
            peer.accept(incoming, frame)

    # Progress.

    def _serve(self, peer: Peer) -> None:
        """Do what there is to do on a socket; see ``zmq_watch`` for why all of it."""
        if self._released:
            return
        sock = peer.socket
        try:
            for _ in range(_FRAMES_AT_ONCE):
                events = int(sock.getsockopt(_EVENTS))
                if events & _POLLIN:
                    if peer.greeted:
                        self._handle(peer, unpack(sock.recv(_NOBLOCK)))
                    else:
                        self._greet(peer)
                elif events & _POLLOUT and not peer.flushed:
                    peer.flush()
                else:
                    return
            self.watch.again(functools.partial(self._serve, peer))
        except ProtocolError as error:
            self.fail(ProtocolError(f"from the connection to rank {peer.rank}: {error}"), tell=True)
        except BaseException as error:
            self._interrupted(error)
            raise

    def _interrupted(self, error: BaseException) -> None:
        """Break the backend when Ctrl-C, or a bug, has left a message half handled."""
        if not isinstance(error, CommunicationError):
            why = f"rank {self.rank} was interrupted: {in_words(error)}"
            self.fail(CommunicationError(why), tell=True)

    def _handle(self, peer: Peer, frame: Frame) -> None:
        kind = frame.kind
        if kind is Kind.EAGER or kind is Kind.OFFER:
            if peer.left:
                raise ProtocolError("a message after the rank has left")
            arrival = Arrival(peer, frame)
            incoming = self.table.arrive(arrival)
            if incoming is not None:
                self._match(incoming, arrival)
        elif kind is Kind.DATA:
            peer.read_data(frame)
        elif kind is Kind.GRANT:
            peer.granted(frame)
        elif kind is Kind.TAKEN:
            peer.taken(frame)
        elif kind is Kind.QUERY:
            answer = self.recorder.status(frame.channel).as_json()
            peer.queue(Frame(Kind.STATUS, message=frame.message, payload=pack_json(answer)))
        elif kind is Kind.STATUS:
            self._note_status(peer, frame)
        elif kind is Kind.FAIL:
            peer.queue(Frame(Kind.SEEN))
            self._note_failure(peer, frame)
        elif kind is Kind.BYE:
            peer.queue(Frame(Kind.SEEN))
            self._note_leaving(peer)
        elif kind is Kind.SEEN:
            peer.has_seen = True
        else:
            raise ProtocolError(f"a second {kind.name} frame")

    def _greet(self, peer: Peer) -> None:
        part = peer.socket.recv(_NOBLOCK, copy=False)
        frame = unpack(part.bytes)
        content = unpack_json(frame) if frame.kind is Kind.HELLO else {}
        shown = str(content.get("proof", "")).encode(errors="replace")
        expected = proof(self._token, peer.rank, self.rank).encode()
        if content.get("rank") != peer.rank or not hmac.compare_digest(shown, expected):
            raise ProtocolError("who is there is not that rank of this job")
        peer.greet(int(part.get(zmq.SRCFD)))

    # Failure and leaving.

    def _note_failure(self, peer: Peer, frame: Frame) -> None:
        content = unpack_json(frame)
        reason, culprit = str(content.get("reason", "no reason given")), content.get("rank")
        peer.left = True
        error = CommunicationError(reason)
        if content.get("kind") == MismatchError.__name__:
            error = MismatchError(reason)
        elif type(culprit) is int and 0 <= culprit < self.world_size:
            error = PeerFailedError(reason, culprit)
        self.peer_reported(peer.rank, error)

    def _note_leaving(self, peer: Peer) -> None:
        """A peer posts no more messages; break the backend if any is needed from it."""
        peer.left = True
        if peer.unwanted() or any(wait.peer is peer for wait in self.table.receives()):
            self._miss(peer)

    def departed(self, rank: int) -> bool:
        return self._peers[rank].left

    def _miss(self, peer: Peer) -> None:
        """Break the backend because something was needed of a rank that has left."""
        self.fail(PeerFailedError(f"rank {peer.rank} has left the job", peer.rank), tell=True)

    def _tick(self) -> float | None:
        """Fail because of peers whose connection broke a while ago without a last word."""
        due = None
        for peer in self._peers.values():
            if peer.lost_at is None or self._failure is not None:
                continue
            wait = peer.lost_at + _LAST_WORDS_SECONDS - time.monotonic()
            if wait > 0:
                due = wait if due is None else min(due, wait)
                continue
            self._serve(peer)
            if peer.left and peer.waits():
                self._miss(peer)
            elif not peer.left:
                why = "the process died, was stopped for long, or the network failed"
                if not peer.greeted:
                    why = "before it said who it was"
                text = f"rank {peer.rank} is lost: its connection broke: {why}"
                self.fail(PeerFailedError(text, peer.rank), tell=True)
        return due

    def _fail_pending(self, error: CommunicationError) -> None:
        with self.lock:
            waits: list[Pending] = list(self.table.receives())
            for peer in self._peers.values():
                waits += peer.waits()
                peer.drop_all()
            self.table.clear()
            for pending in waits:
                pending.finish(error)
            self.watch.changed()

    def _tell(self, error: CommunicationError) -> None:
        content: dict[str, Any] = {"kind": type(error).__name__, "reason": str(error)[:_MAX_TEXT]}
        if isinstance(error, PeerFailedError) and error.rank is not None:
            content["rank"] = error.rank
        self._to_all(Frame(Kind.FAIL, payload=pack_json(content)))

    def _to_all(self, frame: Frame) -> None:
        with self.lock:
            if self._released or not self._introduced:
                return
            for peer in self._peers.values():
                if peer.lost_at is None:
                    with contextlib.suppress(zmq.ZMQError):
                        peer.queue(frame)
                        self._serve(peer)

    def close(self) -> None:
        if self.forked:
            return
        for executor in self._executors:  # what they still run needs the connections
            executor.close(self.default_timeout if self._failure is None else 1.0)
        with self.lock:
            if self._failure is None and not self._leaving:
                # Said first, so that nobody waits for a receive that will never be posted, while
                # this rank waits until what it has sent is taken.
                self._to_all(Frame(Kind.BYE))
                self._leaving = True
                self.watch.until(
                    lambda: self._failure or all(peer.idle for peer in self._peers.values()),
                    self.default_timeout,
                )
        super().close()

    def _release(self, flush: bool) -> None:
        with self.lock:
            if self._released:
                return
            if self._failure is not None and not isinstance(self._failure, ClosedError):
                self._tell(self._failure)
            elif not self._leaving:
                self._to_all(Frame(Kind.BYE))
            # Not left to ZeroMQ's LINGER, which for a peer that is gone waits until it is over.
            self.watch.until(
                lambda: all(peer.has_read_all for peer in self._peers.values()),
                _CLOSING_SECONDS if flush else _FAILED_SECONDS,
            )
            self._released = True
        self.watch.stop()
        for peer in self._peers.values():
            peer.close()
        # Very rarely libzmq never comes back from this, though all sockets are closed: seen after
        # failures, on a loaded machine. What is left then are its own idle threads.
        ending = threading.Thread(target=self._context.destroy, args=(0,), daemon=True)
        ending.start()
        ending.join(_CLOSING_SECONDS if flush else _FAILED_SECONDS)

    # What are the others doing?

    def unexpected(self, src: int, channel: int) -> list[int]:
        with self.lock:
            keys = [arrival.key for arrival in self.table.messages()]
        return [tag for sender, where, tag in keys if (sender, where) == (src, channel)]

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
            self.watch.until(lambda: not query.open, seconds)
            del self._queries[number]
            return query.answers

    def _note_status(self, peer: Peer, frame: Frame) -> None:
        content = unpack_json(frame)
        query = self._queries.get(frame.message)
        if query is not None and peer.rank in query.open:
            query.open.discard(peer.rank)
            query.answers[peer.rank] = Status.from_json(content)


class _Query:
    def __init__(self, ranks: set[int]) -> None:
        self.open = ranks
        self.answers: dict[int, Status] = {}


_SENT = Pending()
_SENT.finish()
