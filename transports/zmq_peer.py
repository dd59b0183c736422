"""One connection of the ``zmq`` transport: its socket, its queue, and what is in flight on it."""

from __future__ import annotations

import struct
import threading
import time
from collections import deque

import zmq

from fsdpcore.backend import Envelope
from fsdpcore.buffers import Bytes
from fsdpcore.errors import ProtocolError

from .matching import Key, MatchTable
from .zmq_watch import Waiting, Watch
from .zmq_wire import Frame, Kind

_EVENT = struct.Struct("=Hi")  # what happened, and the descriptor that it happened to
_ACCEPTED, _GONE = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)


class Outgoing(Waiting):
    """A large message that this rank sends: offered, then sent as far as the receiver grants."""

    __slots__ = ("data", "number", "peer", "queued")

    def __init__(self, peer: Peer, number: int, data: Bytes) -> None:
        super().__init__(peer.engine.watch)
        self.peer = peer
        self.number = number
        self.data = data
        self.queued = 0

    def cancel(self) -> bool:
        return self.peer.cancel_send(self)


class Incoming(Waiting):
    """A receive: waiting for its message, or for the rest of it."""

    __slots__ = ("envelope", "granted", "key", "out", "peer", "received")

    def __init__(self, peer: Peer, out: Bytes, envelope: Envelope) -> None:
        super().__init__(peer.engine.watch)
        self.peer = peer
        self.out = out
        self.envelope = envelope
        self.key: Key = (peer.rank, envelope.channel, envelope.tag)
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


class Engine:
    """What the connections of a rank share.

    Attributes:
        lock: held by whoever touches a connection, its socket or the table.
        table: receives without a message, and messages without a receive.
        watch: who polls the sockets.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.table: MatchTable[Incoming, Arrival] = MatchTable()
        self.watch: Watch


class Peer:
    """Another rank, as the engine's lock holder sees it; only the cancellations lock by themselves.

    Attributes:
        rank: its number in the job.
        listening: whether this rank listens for the other; else it connects.
        greeted: its HELLO has come and was right.
        left: it has said that it leaves, or failed: no new message will come from it.
        has_seen: it has read this rank's FAIL or BYE.
        lost_at: when its connection was seen to break; None while it holds.
    """

    def __init__(
        self,
        engine: Engine,
        rank: int,
        socket: zmq.Socket[bytes],
        segment: int,
        window: int,
        *,
        listening: bool,
    ) -> None:
        self.engine = engine
        self.rank = rank
        self.socket = socket
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        # Without this a connection that was refused would be waited for until the deadline.
        events |= 0 if listening else zmq.EVENT_CLOSED
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(events)
        self.listening = listening
        self.greeted = False
        self.left = False
        self.has_seen = False
        self.lost_at: float | None = None
        self._descriptor = -1
        self._closed: set[int] = set()
        self._segment = segment
        self._window = window
        self._queue: deque[tuple[bytes, Bytes | None, int]] = deque()
        self._sending: dict[int, Outgoing] = {}
        self._receiving: dict[int, Incoming] = {}
        self._dropped: dict[int, int] = {}
        self._asked = 0
        self._hungry: deque[tuple[int, Incoming]] = deque()

    # Sending.

    @property
    def idle(self) -> bool:
        """Whether everything for this peer has been handed to ZeroMQ and been taken, or is lost."""
        return self.lost_at is not None or not (self._queue or self._sending)

    @property
    def flushed(self) -> bool:
        """Whether everything for this peer has been handed to ZeroMQ."""
        return not self._queue

    def queue(self, frame: Frame) -> None:
        """Send a frame as soon as the socket takes it. The caller serves the socket afterwards."""
        self._queue.append((frame.pack(), None, 0))
        self.flush()

    def offer(self, number: int, data: Bytes, envelope: Envelope) -> Outgoing:
        """Announce a large message."""
        outgoing = self._sending[number] = Outgoing(self, number, data)
        channel, tag, signature = envelope
        self.queue(Frame(Kind.OFFER, channel, tag, number, data.size, signature=signature))
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
        """Note that the receiver has all of a large message."""
        outgoing = self._sending.get(frame.message)
        if outgoing is None:
            return
        if outgoing.queued < outgoing.data.size:
            raise ProtocolError(f"rank {self.rank} has taken what was not sent yet")
        del self._sending[frame.message]
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
                    # Without a copy: the array is the sender's until TAKEN. This is what starts
                    # pyzmq's own thread for such buffers, which lives as long as the process.
                    self.socket.send(piece.data, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._queue.popleft()

    def cancel_send(self, outgoing: Outgoing) -> bool:
        """Send no more of a message."""
        with self.engine.lock:
            self._sending.pop(outgoing.number, None)
            self._queue = deque(item for item in self._queue if item[2] != outgoing.number)
        return outgoing.finished

    # Receiving.

    def accept(self, incoming: Incoming, frame: Frame) -> None:
        """Let an offered message come into a receive that was found to fit."""
        if frame.message in self._receiving or frame.message in self._dropped:
            raise ProtocolError(f"rank {self.rank} offers message {frame.message} a second time")
        self._receiving[frame.message] = incoming
        self._hungry.append((frame.message, incoming))
        self._ask()

    def _ask(self) -> None:
        """Ask for what comes next, in time so that the sender need not wait.

        The window limits what is on its way on this connection, whatever the number of messages.
        """
        while self._hungry and self._asked <= self._window // 2:
            number, incoming = self._hungry[0]
            if number not in self._receiving:  # given up
                self._hungry.popleft()
                continue
            more = min(self._window - self._asked, incoming.out.size - incoming.granted)
            incoming.granted += more
            self._asked += more
            if incoming.granted == incoming.out.size:
                self._hungry.popleft()
            self.queue(Frame(Kind.GRANT, message=number, offset=incoming.granted))

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
        self._read_part(frame, incoming.out[frame.offset : end])
        incoming.received = end
        if end == incoming.out.size:
            del self._receiving[frame.message]
            self.queue(Frame(Kind.TAKEN, message=frame.message))
            incoming.finish()
        self._ask()

    def _discard(self, frame: Frame) -> None:
        """Read past the data of a receive that was given up."""
        left = self._dropped.get(frame.message, 0) - frame.size
        if left < 0 or not frame.size:
            raise ProtocolError(f"rank {self.rank} sent data that it was not asked for")
        self._dropped[frame.message] = left
        self._read_part(frame, None)
        self._ask()

    def _read_part(self, frame: Frame, out: Bytes | None) -> None:
        got = self.socket.recv_into(bytearray() if out is None else out.data)
        self._asked -= frame.size
        if got != frame.size or self.socket.getsockopt(zmq.RCVMORE):
            raise ProtocolError(f"rank {self.rank} sent {got} bytes where it said {frame.size}")

    def cancel_receive(self, incoming: Incoming) -> bool:
        """Write no more into a receive's array; return whether no peer will notice."""
        with self.engine.lock:
            if self.engine.table.withdraw_receive(incoming):
                return True
            for number, other in self._receiving.items():
                if other is incoming:
                    self._drop(number)
                    break
        return incoming.finished

    def _drop(self, number: int) -> None:
        incoming = self._receiving.pop(number)
        self._dropped[number] = incoming.granted - incoming.received

    # What is in flight.

    def waits(self) -> list[Waiting]:
        """What is in flight with this peer, apart from receives that no message came for."""
        return [*self._sending.values(), *self._receiving.values()]

    @property
    def has_read_all(self) -> bool:
        """Whether the peer has read this rank's last words, or never will."""
        return self.has_seen or not self.greeted or self.lost_at is not None

    def unwanted(self) -> bool:
        """Whether a large message has been offered that the peer has not asked for so far."""
        return any(outgoing.queued == 0 for outgoing in self._sending.values())

    def drop_all(self) -> None:
        """Forget what is in flight; frames that are queued still go out."""
        self._sending.clear()
        for number in list(self._receiving):
            self._drop(number)
        self._queue = deque(item for item in self._queue if item[1] is None)

    # The connection.

    def greet(self, descriptor: int) -> None:
        """Note that the peer has said who it is, on the connection with that descriptor."""
        self.greeted = True
        self._descriptor = descriptor
        self.read_monitor()

    def read_monitor(self) -> None:
        """Note whether the connection broke. Strangers come and go at a port that listens."""
        while int(self.monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            record = self.monitor.recv_multipart(zmq.NOBLOCK)[0]
            event, value = _EVENT.unpack(record)
            if event & _ACCEPTED:
                self._closed.discard(value)
            elif event & _GONE:
                self._closed.add(value)
        if self._descriptor in self._closed or (self._closed and not self.listening):
            self.lost_at = time.monotonic() if self.lost_at is None else self.lost_at

    def close(self) -> None:
        """Close the monitor; closing the context closes the socket."""
        self.socket.disable_monitor()
        self.monitor.close(0)
