"""One connection of the ``zmq`` transport: its socket, its queue, and what is in flight on it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
import zmq

from fsdpcore.backend import Envelope
from fsdpcore.buffers import Bytes
from fsdpcore.errors import ProtocolError
from fsdpcore.work import Pending

from .matching import Key
from .zmq_wire import Frame, Kind


class Outgoing(Pending):
    """A large message that this rank sends: offered, then sent as far as the receiver grants."""

    __slots__ = ("data", "number", "peer", "queued")

    def __init__(self, peer: Peer, number: int, data: Bytes) -> None:
        super().__init__()
        self.peer = peer
        self.number = number
        self.data = data
        self.queued = 0

    def cancel(self) -> bool:
        return self.peer.cancel_send(self)


class Incoming(Pending):
    """A receive: waiting for its message, or for the rest of it."""

    __slots__ = ("envelope", "granted", "key", "out", "peer", "received")

    def __init__(self, peer: Peer, out: Bytes, src: int, envelope: Envelope) -> None:
        super().__init__()
        self.peer = peer
        self.out = out
        self.envelope = envelope
        self.key: Key = (src, envelope.channel, envelope.tag)
        self.received = 0
        self.granted = 0

    def cancel(self) -> bool:
        return self.peer.cancel_receive(self)


class Arrival:
    """A message that came before its receive: an eager one with its bytes, or an offer."""

    __slots__ = ("frame", "key", "peer")

    def __init__(self, peer: Peer, frame: Frame) -> None:
        self.peer = peer
        self.frame = frame
        self.key: Key = (peer.rank, frame.channel, frame.tag)


class Peer:
    """Another rank, as the engine's lock holder sees it; nothing here locks by itself.

    Attributes:
        rank: its number in the job.
        greeted: its HELLO has come and was right.
        left: it said BYE.
        lost_at: when its connection was seen to break; None while it holds.
    """

    def __init__(self, owner: Any, rank: int, socket: zmq.Socket[bytes], segment: int) -> None:
        self.rank = rank
        self.socket = socket
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.greeted = False
        self.left = False
        self.lost_at: float | None = None
        self._owner = owner
        self._segment = segment
        self._window = 8 * segment
        self._queue: deque[tuple[bytes, Bytes | None, int]] = deque()
        self._sending: dict[int, Outgoing] = {}
        self._receiving: dict[int, Incoming] = {}
        self._dropped: dict[int, int] = {}

    # Sending.

    @property
    def idle(self) -> bool:
        """Whether everything for this peer has been handed to ZeroMQ and been taken."""
        return not self._queue and not self._sending

    @property
    def flushed(self) -> bool:
        """Whether everything for this peer has been handed to ZeroMQ."""
        return not self._queue

    def queue(self, frame: Frame) -> None:
        """Send a frame as soon as the socket takes it."""
        self._queue.append((frame.pack(), None, 0))
        self.flush()

    def offer(self, number: int, data: Bytes, envelope: Envelope) -> Outgoing:
        """Announce a large message."""
        outgoing = self._sending[number] = Outgoing(self, number, data)
        self.queue(
            Frame(
                Kind.OFFER,
                envelope.channel,
                envelope.tag,
                number,
                data.size,
                signature=envelope.signature,
            )
        )
        return outgoing

    def granted(self, frame: Frame) -> None:
        """Queue the segments that the receiver has room for now."""
        outgoing = self._sending.get(frame.message)
        if outgoing is None:
            return  # cancelled here; the receiver learns of it in other ways
        if frame.offset > outgoing.data.size:
            raise ProtocolError(f"rank {self.rank} grants more than was offered")
        while outgoing.queued < frame.offset:
            start = outgoing.queued
            piece = outgoing.data[start : min(start + self._segment, frame.offset)]
            header = Frame(Kind.DATA, message=outgoing.number, size=piece.size, offset=start).pack()
            self._queue.append((header, piece, outgoing.number))
            outgoing.queued = start + piece.size
        self.flush()

    def taken(self, frame: Frame) -> None:
        """The receiver has all of a large message."""
        outgoing = self._sending.pop(frame.message, None)
        if outgoing is not None:
            outgoing.finish()

    def flush(self) -> None:
        """Hand the queue to the socket as far as it takes it without blocking."""
        while self._queue:
            header, piece, _ = self._queue[0]
            try:
                if piece is None:
                    self.socket.send(header, zmq.NOBLOCK)
                else:
                    self.socket.send(header, zmq.NOBLOCK | zmq.SNDMORE)
                    self.socket.send(piece.data, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._queue.popleft()

    def cancel_send(self, outgoing: Outgoing) -> bool:
        """Send no more of a message."""
        with self._owner.lock:
            self._sending.pop(outgoing.number, None)
            self._queue = deque(item for item in self._queue if item[2] != outgoing.number)
        return outgoing.finished

    # Receiving.

    def accept(self, incoming: Incoming, frame: Frame) -> None:
        """Let an offered message come into a receive that was found to fit."""
        self._receiving[frame.message] = incoming
        self._grant(frame.message, incoming)

    def _grant(self, number: int, incoming: Incoming) -> None:
        """Ask for the next stretch, in time so that the sender need not wait."""
        if incoming.granted - incoming.received > self._window // 2:
            return
        until = min(incoming.received + self._window, incoming.out.size)
        if until > incoming.granted:
            incoming.granted = until
            self.queue(Frame(Kind.GRANT, message=number, offset=until))

    def read_data(self, frame: Frame) -> None:
        """Receive the second part of a DATA frame into its place."""
        if not self.socket.getsockopt(zmq.RCVMORE):
            raise ProtocolError(f"rank {self.rank} sent a DATA frame without data")
        incoming = self._receiving.get(frame.message)
        if incoming is None:
            self._discard(frame)
            return
        end = frame.offset + frame.size
        if frame.offset != incoming.received or end > incoming.granted or not frame.size:
            raise ProtocolError(f"rank {self.rank} sent data that it was not asked for")
        got = self.socket.recv_into(incoming.out[frame.offset : end].data)
        if got != frame.size or self.socket.getsockopt(zmq.RCVMORE):
            raise ProtocolError(f"rank {self.rank} sent {got} bytes where it said {frame.size}")
        incoming.received = end
        if end == incoming.out.size:
            del self._receiving[frame.message]
            self.queue(Frame(Kind.TAKEN, message=frame.message))
            incoming.finish()
        else:
            self._grant(frame.message, incoming)

    def _discard(self, frame: Frame) -> None:
        """Read past the data of a receive that was given up."""
        left = self._dropped.get(frame.message, 0) - frame.size
        if left < 0:
            raise ProtocolError(f"rank {self.rank} sent data that it was not asked for")
        self._dropped[frame.message] = left
        self.socket.recv()

    def cancel_receive(self, incoming: Incoming) -> bool:
        """Write no more into a receive's array; whether no peer will notice."""
        with self._owner.lock:
            if self._owner.table.withdraw_receive(incoming):
                return True
            for number, other in list(self._receiving.items()):
                if other is incoming:
                    del self._receiving[number]
                    self._dropped[number] = incoming.granted - incoming.received
        return incoming.finished

    def waits(self) -> list[Pending]:
        """What is in flight with this peer, apart from receives that no message came for."""
        return [*self._sending.values(), *self._receiving.values()]

    def drop_all(self) -> None:
        """Forget what is in flight; frames that are queued still go out."""
        self._sending.clear()
        for number, incoming in self._receiving.items():
            self._dropped[number] = incoming.granted - incoming.received
        self._receiving.clear()
        self._queue = deque(item for item in self._queue if item[1] is None)

    # The connection.

    def disconnected(self) -> None:
        """Note that the connection broke."""
        if self.lost_at is None:
            self.lost_at = time.monotonic()

    def close(self, linger_ms: int) -> None:
        """Close the sockets; what ZeroMQ holds is sent for at most ``linger_ms``."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)


def copy_eager(frame: Frame, out: Bytes) -> None:
    """Copy an eager message, whose size was checked, to its receiver."""
    np.copyto(out, np.frombuffer(frame.payload, np.uint8))
