"""The data connection between two ranks of the ``zmq`` transport: frames on a plain TCP socket.

ZeroMQ hands every message over to a thread of its own and back, and copies what has come. Here the
thread that sends or waits makes the system call itself, from the sender's array and into the
receiver's. Nothing blocks: what the kernel does not take stays here, until the poller says that
there is room again.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from .poller import Poller
from .wire import HEADER_BYTES, Frame, unpack_next

# What is read at once where no array waits for it: frames, and the first bytes of payloads.
_READ_BYTES = 4096
# What is dropped at once.
_DROP_BYTES = 1 << 18
# Turns of reading and writing before other threads of this rank get theirs.
_TURNS = 8


class FrameSink(Protocol):
    """Who gets the payload of a frame."""

    def filled(self) -> None:
        """All of it has come."""


class FrameSource(Protocol):
    """Who sends frames straight from memory that has to stay as it is meanwhile.

    Attributes:
        left: bytes for which ``next_segment`` was not called so far.
    """

    left: int

    def next_segment(self) -> list[Any]:
        """Return the parts of the next frame: header and data."""

    def sent(self) -> None:
        """The kernel has taken the frame."""


Room = tuple["FrameSink | None", "memoryview | None"]


class FrameSocket:
    """Frames both ways over one socket; called with the lock of the rank's connections held.

    Args:
        sock: connected; owned by this from now on.
        poller: whose handler of the socket calls ``serve``.
        begin: called for each frame, with the size of its payload; returns who gets that, and room
            of just that size, or two Nones to have it dropped.

    Attributes:
        ended: no more will come, and nothing more can be sent.
    """

    def __init__(
        self, sock: socket.socket, poller: Poller, begin: Callable[[Frame, int], Room]
    ) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.ended = False
        self._sock = sock
        self._poller = poller
        self._begin = begin
        # The payload that comes in now, and bytes that have come and are not decoded.
        self._sink: FrameSink | None = None
        self._room: memoryview | None = None
        self._missing = 0
        self._bytes = bytearray(_READ_BYTES)
        self._view = memoryview(self._bytes)
        self._start = self._end = 0
        # The frame on its way, frames behind it, and what sends segments when there are none.
        self._parts: list[Any] = []
        self._owner: FrameSource | None = None
        self._frames: deque[tuple[list[Any], FrameSource | None]] = deque()
        self._sources: deque[FrameSource] = deque()
        self._blocked = False

    # Writing.

    @property
    def flushed(self) -> bool:
        """Whether the kernel has taken everything, or never will."""
        return self.ended or not (self._parts or self._frames or self._sources)

    def put(self, header: bytes, payload: Any) -> None:
        """Send a frame; what does not go at once is copied, so that ``payload`` may change."""
        if self.ended:
            return
        if self._parts or self._frames:
            self._frames.append(([header, bytes(payload)], None))
            return
        try:
            sent = self._sock.sendmsg((header, payload))
        except BlockingIOError:
            sent = 0
        except OSError:
            self._end_here()
            return
        if sent < len(header) + len(payload):
            self._parts = [(header + bytes(payload))[sent:]]
            self._block(True)

    def post(self, parts: list[Any], owner: FrameSource | None = None) -> None:
        """Send a frame, whose parts belong to ``owner`` and stay as they are until it is told."""
        if self.ended:
            return
        self._frames.append((parts, owner))
        if not self._blocked:
            self.write()

    def add(self, source: FrameSource) -> None:
        """Send all segments of ``source``, as soon as nothing else is to be sent."""
        self._sources.append(source)
        if not self._blocked:
            self.write()

    def withdraw(self, owner: FrameSource) -> None:
        """Touch the memory of ``owner`` no more, and send no more of it than the peer expects."""
        if self._owner is owner:
            self._owner = None
            self._keep()
        with contextlib.suppress(ValueError):
            self._sources.remove(owner)
        self._frames = deque(item for item in self._frames if item[1] is not owner)

    def _keep(self) -> None:
        """Copy the rest of the frame on its way, of which the peer has got the beginning."""
        self._parts = [bytes(part) for part in self._parts]

    def write(self) -> bool:
        """Send what goes in one call; return whether there is more, and perhaps room for it."""
        if self.ended or not (self._parts or self._next()):
            return False
        try:
            sent = self._sock.sendmsg(self._parts)
        except BlockingIOError:
            self._block(True)
            return False
        except OSError:
            self._end_here()
            return False
        self._advance(sent)
        self._block(bool(self._parts))
        return not self._blocked and not self.flushed

    def _next(self) -> bool:
        if self._frames:
            self._parts, self._owner = self._frames.popleft()
        elif self._sources:
            self._owner = source = self._sources[0]
            self._parts = source.next_segment()
            if not source.left:
                self._sources.popleft()
        return bool(self._parts)

    def _advance(self, sent: int) -> None:
        parts = self._parts
        for index, part in enumerate(parts):
            if sent < len(part):
                self._parts = [memoryview(part)[sent:], *parts[index + 1 :]]
                return
            sent -= len(part)
        self._parts = []
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.sent()

    def _block(self, blocked: bool) -> None:
        if blocked is not self._blocked:
            self._blocked = blocked
            self._poller.want_room(self._sock.fileno(), blocked)

    # Reading.

    def divert(self, sink: FrameSink) -> None:
        """Drop what is still to come of a payload that ``sink`` gets."""
        if self._sink is sink:
            self._sink = self._room = None

    def read(self) -> bool:
        """Take in what comes in one call; return whether there may be more."""
        try:
            if not self._missing:
                return self._read_frames()
            return self._drop() if self._room is None else self._read_payload(self._room)
        except BlockingIOError:
            return False
        except (OSError, EOFError):
            self._end_here()
            return False

    def _read_payload(self, room: memoryview) -> bool:
        # Together with what follows, which saves a call.
        got = self._sock.recvmsg_into([room, self._view])[0]
        if got < self._missing:
            self._count(got)
            self._room = room[got:]
            return True
        self._start, self._end = 0, got - self._missing
        full = self._end == _READ_BYTES
        self._fill()
        self._decode()
        return full

    def _drop(self) -> bool:
        self._count(self._sock.recv_into(bytearray(min(self._missing, _DROP_BYTES))))
        return True

    def _count(self, got: int) -> None:
        if not got:
            raise EOFError
        self._missing -= got

    def _read_frames(self) -> bool:
        if self._start:
            rest = self._bytes[self._start : self._end]
            self._start, self._end = 0, len(rest)
            self._view[: self._end] = rest
        got = self._sock.recv_into(self._view[self._end :])
        if not got:
            raise EOFError
        self._end += got
        full = self._end == _READ_BYTES
        self._decode()
        return full or self._missing > 0

    def _decode(self) -> None:
        while found := unpack_next(self._bytes, self._start, self._end):
            frame, inline = found
            self._start += HEADER_BYTES + len(frame.signature)
            self._sink, room = self._begin(frame, inline)
            there = min(inline, self._end - self._start)
            if there and room is not None:
                room[:there] = self._view[self._start : self._start + there]
            self._start += there
            self._missing = inline - there
            if self._missing:
                self._room = None if room is None else room[there:]
                return
            self._fill()

    def _fill(self) -> None:
        sink, self._sink, self._room, self._missing = self._sink, None, None, 0
        if sink is not None:
            sink.filled()

    # Both.

    def serve(self) -> bool:
        """Read and write until neither goes on; False if it would, and others get their turn."""
        for _ in range(_TURNS):
            if self.ended:
                break
            more = self.read()
            if (self._parts or self._frames or self._sources) and self.write():
                more = True
            if not more:
                break
        else:
            return False
        return True

    def shut(self) -> None:
        """Say that nothing more will be sent; what comes is still read."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def _end_here(self) -> None:
        self._parts, self._owner = [], None
        if not self.ended:
            self.ended = True
            self._poller.remove(self._sock.fileno())

    def stop(self) -> None:
        """Read and send no more, because what comes makes no sense."""
        self._end_here()

    def close(self) -> None:
        """Free the socket, once nobody watches it any more."""
        self.ended = True
        self._sock.close()
