"""``Links``: the ZeroMQ sockets of a rank, through which everything from and to the others goes.

There are two, whatever the number of ranks: an *inbox*, where the others connect, and an *outbox*,
which connects to them. A link leads from one rank to another; it is made when it is first used, and
carries frames in one direction. So two ranks never connect to each other by the same link, and one
thread can read while another one sends.

ZeroMQ's sockets lose messages without a word: what was queued for a connection that broke, or what
they cannot route. Here every frame of a link has its number, nothing connects a second time, and
no queue of ZeroMQ's has a limit: ``Outlet`` keeps them short. A link that has broken stays broken.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import zmq

from fsdpcore.core.errors import ProtocolError, RendezvousError
from fsdpcore.launch.addresses import is_loopback, join_address
from fsdpcore.launch.endpoints import is_unspecified, own_address

from .keys import JobKeys
from .monitors import InboundConnections, events
from .wire import MAX_PAYLOAD

_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
_NUMBER = struct.Struct("<Q")  # of a frame in its link, before its header
# A connection that breaks has lost data: never reconnect behind the scenes. The value that means
# never, -1, makes libzmq 4.3.5 hang when such a socket is closed at the wrong moment.
_NEVER_MS = 10 * 24 * 3600 * 1000
# Who has connected must have shown that it knows the job's secret within this time.
_HANDSHAKE_MS = 5_000
# How long a link that works needs to take what is on its way, and how often to look.
_RECLAIM_SECONDS, _LOOK_SECONDS = 0.2, 0.5e-3
# The last of these comes alone where not even a socket could be made.
_REFUSED = int(
    zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_CONNECT_RETRIED
)
_BROKEN = int(zmq.EVENT_DISCONNECTED)

Socket = zmq.Socket[bytes]
Reclaim = Callable[[], None]
"""Blocks, shortly, until memory that was sent without copying it is not read any more."""
Address = tuple[str, int]
IO_THREADS = 2


class ReceivedFrame(NamedTuple):
    """A frame that has come: from which rank, its header and signature, and its payload."""

    rank: int
    header: bytes
    payload: memoryview | None


class Links:
    """All links from and to one rank; called with the lock of the links held.

    Args:
        context: of this rank, with ``IO_THREADS``.
        rank, world_size: of this process, in the job.
        keys: of the job.
        encrypted: whether what travels is encrypted.
        heartbeat: seconds after which a connection that is silent counts as broken.
        lost: called with the number of a rank when a link from or to it has broken, and with
            whether it was the one to it.
    """

    def __init__(
        self,
        context: zmq.Context[Socket],
        rank: int,
        world_size: int,
        keys: JobKeys,
        *,
        encrypted: bool,
        heartbeat: float,
        lost: Callable[[int, bool], None],
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._keys, self._encrypted = keys, encrypted
        self._lost = lost
        self._inbox = _socket(context, heartbeat)
        self._outbox = _socket(context, heartbeat)
        # What comes and what goes are encrypted and copied by a thread each.
        self._inbox.setsockopt(zmq.AFFINITY, 1)
        self._outbox.setsockopt(zmq.AFFINITY, 2)
        self._outbox.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._outbox.setsockopt(zmq.CONNECT_TIMEOUT, int(1000 * heartbeat))
        self._inbound = InboundConnections(self._inbox)
        self._outbound: Socket = self._outbox.get_monitor_socket(_REFUSED | _BROKEN)
        for monitor in (self._inbound.monitor, self._outbound):
            events(monitor)  # its descriptor tells of nothing until somebody has looked once
        self._own, self._let_in = "", frozenset[str]()
        self._nonce = b""
        self._addresses: list[Address] = []
        # How many frames have come from each rank, and were sent to it; by the names of the links.
        self._sources: dict[bytes, int] = {}
        self._received: dict[int, int] = {}
        self._sent: dict[int, int] = {}
        self._names: dict[int, bytes] = {}
        self._endpoints: dict[int, str] = {}
        self._by_endpoint: dict[str, int] = {}

    def watched(
        self, receive: Callable[[], None], look: Callable[[], None]
    ) -> list[tuple[int, Callable[[], None]]]:
        """Descriptors to poll for input, each with which of the two to call then."""
        sockets = ((self._inbox, receive), (self._inbound.monitor, look), (self._outbound, look))
        return [(int(sock.getsockopt(zmq.FD)), call) for sock, call in sockets]

    # Beginning.

    def listen(self, listener: socket.socket, address: Address, sources: Iterable[str]) -> None:
        """Let the other ranks connect.

        Args:
            listener: a TCP socket that listens; ZeroMQ's from now on.
            address: where it does.
            sources: addresses that ranks come from; nobody else is let in. Empty for all.
        """
        inbox = self._inbox
        self._own, self._let_in = address[0], frozenset(sources)
        inbox.setsockopt(zmq.IPV6, ":" in address[0])
        for source in self._let_in:
            inbox.setsockopt_string(zmq.TCP_ACCEPT_FILTER, source)
        if self._encrypted:
            inbox.setsockopt(zmq.CURVE_SERVER, 1)
            inbox.setsockopt(zmq.CURVE_SECRETKEY, self._keys.listening(self._rank).secret)
        inbox.setsockopt(zmq.USE_FD, listener.detach())
        inbox.bind(f"tcp://{join_address(*address)}")

    def introduce(self, nonce: bytes, addresses: Iterable[Address]) -> None:
        """Say where the ranks listen, and what rank 0 has drawn for the names of links."""
        self._nonce = nonce
        self._addresses = list(addresses)
        for rank in range(self._world_size):
            if rank != self._rank:
                self._sources[self._keys.link_name(rank, self._rank, nonce)] = rank

    def open(self, rank: int) -> bool:
        """Connect to a rank; return False if that was done before. What is sent meanwhile waits."""
        if rank in self._names:
            return False
        outbox, endpoint = self._outbox, self._endpoint(self._addresses[rank])
        self._names[rank] = to = b"to %d" % rank
        self._sent[rank] = 0
        self._endpoints[rank] = endpoint
        self._by_endpoint[endpoint] = rank
        outbox.setsockopt(zmq.IPV6, "[" in endpoint)
        outbox.setsockopt(zmq.CONNECT_ROUTING_ID, to)
        name = self._keys.link_name(self._rank, rank, self._nonce)
        outbox.setsockopt(zmq.ROUTING_ID, name)
        if self._encrypted:
            public, secret = zmq.curve_keypair()
            outbox.setsockopt(zmq.CURVE_SERVERKEY, self._keys.listening(rank).public)
            outbox.setsockopt(zmq.CURVE_PUBLICKEY, public)
            outbox.setsockopt(zmq.CURVE_SECRETKEY, secret)
        outbox.connect(endpoint)
        return True

    def _endpoint(self, address: Address) -> str:
        """What to connect to; from where this rank listens, if others let in nothing else.

        They know from where a rank came to rank 0, and where it listens. A host that has several
        addresses may choose yet another one on its way to some rank.
        """
        own, there = self._own, join_address(*address)
        # Of another kind, or on the loopback at one end only, they cannot be joined.
        alike = (":" in own) == (":" in address[0]) and is_loopback(own) == is_loopback(address[0])
        if self._let_in and alike and not is_unspecified(own):
            # If there is no way there, or no descriptor is left to ask with, connecting will tell.
            with contextlib.suppress(RendezvousError, OSError):
                if own_address(*address) not in self._let_in:
                    return f"tcp://{join_address(own, 0)};{there}"
        return f"tcp://{there}"

    # Frames.

    def send(
        self, rank: int, header: bytes, payload: Any = None, copy: bool = True
    ) -> Reclaim | None:
        """Send a frame to a rank, connecting first if need be.

        What is sent on a broken link never arrives; ``lost`` was or will be called.

        Args:
            rank: that it goes to.
            header: of the frame.
            payload: an array of bytes, or None.
            copy: whether ZeroMQ copies it. Otherwise it must not change until the other rank has
                it, or what is returned was called.
        """
        name = self._names.get(rank)
        if name is None:
            self.open(rank)
            name = self._names[rank]
        number = self._sent[rank]
        self._sent[rank] = number + 1
        outbox, begun = self._outbox, False
        try:
            outbox.send(name, _MORE | _NOBLOCK)
            begun = True
            if payload is None or not len(payload):
                outbox.send(_NUMBER.pack(number) + header, _NOBLOCK)
                return None
            outbox.send(_NUMBER.pack(number) + header, _MORE | _NOBLOCK)
            if copy:
                outbox.send(payload, _NOBLOCK)
                return None
            tracker = outbox.send(payload, _NOBLOCK, copy=False, track=True)
            return functools.partial(self._reclaim, rank, tracker)
        except zmq.ZMQError as error:
            if not begun and error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return None
            raise
        except BaseException:  # Ctrl-C
            try:
                self._abandon(rank, number, begun, copy)
            except BaseException:  # and again
                self._abandon(rank, number, begun, copy)
                raise
            raise

    def _abandon(self, rank: int, number: int, begun: bool, copy: bool) -> None:
        """End a frame of which nobody knows how many parts were sent; the last one is empty.

        Where ZeroMQ may read its payload without having copied it, break the link.
        """
        try:
            # The first part of a frame would be the name of a link, which this is not.
            self._outbox.send(b"", _MORE | _NOBLOCK)
            self._outbox.send(b"", _NOBLOCK)
        except zmq.ZMQError:
            if not begun:
                self._sent[rank] = number
        if not copy:
            self._cut(rank)

    def _cut(self, rank: int) -> None:
        """Break a link, and drop what waits."""
        self._outbox.setsockopt(zmq.LINGER, 0)
        with contextlib.suppress(zmq.ZMQError):  # it was cut before
            self._outbox.disconnect(self._endpoints[rank])

    def _reclaim(self, rank: int, tracker: zmq.MessageTracker) -> None:
        """Block until ZeroMQ does not read a payload any more; cut the link if that takes long."""
        outbox, end = self._outbox, time.monotonic() + _RECLAIM_SECONDS
        while not tracker.done and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        if not tracker.done:
            self._cut(rank)
        while not tracker.done:
            outbox.getsockopt(zmq.EVENTS)  # has ZeroMQ go on with that
            time.sleep(_LOOK_SECONDS)

    def receive(self) -> ReceivedFrame | None:
        """Return the next frame that has come; None if there is none. Never blocks.

        Raises:
            ProtocolError: a frame is missing before it, or has the wrong number of parts.
        """
        inbox = self._inbox
        while True:
            try:
                name = inbox.recv(_NOBLOCK)
            except zmq.Again:
                return None
            parts = [inbox.recv(copy=False)]
            while parts[-1].more:
                parts.append(inbox.recv(copy=False))
            rank = self._sources.get(name)
            if rank is None:
                continue
            abandoned = len(parts) > 1 and not len(parts[-1])
            number = self._received.get(rank, 0)
            if number == 0:
                self._inbound.know(parts[0], rank)
                self._look_inbound()
            self._received[rank] = number + 1
            if not abandoned:
                return self._checked(rank, number, parts)

    def _checked(self, rank: int, number: int, parts: list[zmq.Frame]) -> ReceivedFrame:
        head = parts[0].bytes
        if len(parts) > 2 or len(head) < _NUMBER.size or _NUMBER.unpack_from(head)[0] != number:
            raise ProtocolError(f"frames from rank {rank} are missing, or are none of ours")
        payload = parts[1].buffer if len(parts) == 2 else None
        return ReceivedFrame(rank, head[_NUMBER.size :], payload)

    # The connections.

    def look(self) -> None:
        """Find links that have broken, and call ``lost`` for them."""
        self._look_inbound()
        for _, _, endpoint in events(self._outbound):
            rank = self._by_endpoint.get(endpoint)
            if rank is not None:
                self._lost(rank, True)

    def _look_inbound(self) -> None:
        for rank in self._inbound.broken():
            self._lost(rank, False)

    def close(self, seconds: float) -> None:
        """Close all connections; what was sent has that long to leave."""
        for sock in (self._inbox, self._outbox):
            sock.disable_monitor()
        for monitor in (self._inbound.monitor, self._outbound):
            monitor.close(0)
        self._inbox.close(0)
        self._outbox.close(int(1000 * seconds))


def _socket(context: zmq.Context[Socket], heartbeat: float) -> Socket:
    sock: Socket = context.socket(zmq.ROUTER)
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD)
    sock.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
    sock.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    # A host that is lost says nothing. ZeroMQ's own threads ask, without the interpreter.
    tenth = int(100 * heartbeat)
    sock.setsockopt(zmq.HEARTBEAT_IVL, tenth)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 9 * tenth)
    return sock
