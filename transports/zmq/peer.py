"""Another rank, as a rank of the ``zmq`` transport sees it, and the ZeroMQ connection to it."""

from __future__ import annotations

import struct
import time
from collections import deque

import zmq

from .channel import PeerChannel
from .wire import Frame

_EVENT = struct.Struct("=Hi")  # what happened, and the descriptor that it happened to
_ACCEPTED, _GONE = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)


class Peer:
    """Another rank; used with the lock of the connections held.

    Attributes:
        rank: its number in the job.
        listening: whether this rank listens for the other; else it connects.
        greeted: its HELLO has come and was right.
        peer_channel: the messages from and to it; None until the data connection is there.
        left: it has said that it leaves, or failed: no new message will come from it.
        has_seen: it has read this rank's FAIL or BYE.
        lost_at: when its connection was seen to break; None while it holds.
        cut_at: when its data connection ended before it had left; None while it holds.
        answered: it was told that all it had to send has come.
    """

    def __init__(self, rank: int, socket: zmq.Socket[bytes], *, listening: bool) -> None:
        self.rank = rank
        self.socket = socket
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        # Without this a connection that was refused would be waited for until the deadline.
        events |= 0 if listening else zmq.EVENT_CLOSED
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(events)
        self.listening = listening
        self.greeted = False
        self.peer_channel: PeerChannel | None = None
        self.left = False
        self.has_seen = False
        self.lost_at: float | None = None
        self.cut_at: float | None = None
        self.answered = False
        self._last: tuple[int, int] | None = None
        self._descriptor = -1
        self._closed: set[int] = set()
        self._queue: deque[bytes] = deque()

    @property
    def joined(self) -> bool:
        """Whether both connections are there, and it is who it should be."""
        return self.greeted and self.peer_channel is not None

    def connect(self, peer_channel: PeerChannel) -> None:
        """Note that the data connection is there."""
        self.peer_channel = peer_channel
        peer_channel.last = self._last

    def expect(self, messages: int, grants: int) -> None:
        """Note how many of them a peer that leaves says it has sent in all."""
        self._last = (messages, grants)
        if self.peer_channel is not None:
            self.peer_channel.last = self._last

    # Control frames.

    def queue(self, frame: Frame) -> None:
        """Send a frame as soon as the socket takes it. The caller serves the socket afterwards."""
        self._queue.append(frame.pack())
        self.flush()

    @property
    def flushed(self) -> bool:
        """Whether all control frames have been handed to ZeroMQ."""
        return not self._queue

    def flush(self) -> None:
        """Hand the queue to the socket as far as it takes it without blocking."""
        while self._queue:
            try:
                self.socket.send(self._queue[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._queue.popleft()

    # Leaving.

    @property
    def idle(self) -> bool:
        """Whether everything for this peer is on its way and wanted, or the peer is lost."""
        idle = self.peer_channel is None or self.peer_channel.idle
        return self.lost_at is not None or (idle and not self._queue)

    @property
    def has_read_all(self) -> bool:
        """Whether the peer has read this rank's last words, or never will."""
        return self.has_seen or not self.greeted or self.lost_at is not None

    def shut(self) -> None:
        """Send no more messages; the peer notices when it has read all."""
        if self.peer_channel is not None:
            self.peer_channel.frame_socket.shut()

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
        """Close the data connection and the monitor; closing the context closes the socket."""
        if self.peer_channel is not None:
            self.peer_channel.frame_socket.close()
        self.socket.disable_monitor()
        self.monitor.close(0)
