"""A switch in user space, for what the kernel's bridge cannot do: it delays frames, and loses some.

It also writes down what passes.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import BinaryIO

from support.hosts.namespaces import be_punctual

_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING = 263, 15, 23
_EVERY_PROTOCOL = 3
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
# In front of each frame the kernel says what is left to do for it: checksums, cutting into packets.
# So whole segments of up to 64 KiB pass, as they do through the bridge.
VNET_HEADER = 10
_LONGEST = VNET_HEADER + 14 + 65536
_AT_ONCE = 16  # frames of one port before the others get their turn
# Of a port, in bytes: what comes while it is full is lost.
_IN_BUFFER, _OUT_BUFFER = 64 << 20, 4 << 20


def port(interface: str) -> socket.socket:
    """A socket for all that a host sends to the interface, and for what the host is to get."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    sock.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    sock.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    for option, size in ((_SO_RCVBUFFORCE, _IN_BUFFER), (_SO_SNDBUFFORCE, _OUT_BUFFER)):
        with contextlib.suppress(PermissionError):  # in a namespace of users
            sock.setsockopt(socket.SOL_SOCKET, option, size)
    sock.bind((interface, _EVERY_PROTOCOL))
    sock.setblocking(False)
    return sock


class Switch(threading.Thread):
    """Forwards frames between ports by the last byte of the address that they are sent to.

    Attributes:
        delay: of each frame, in seconds.
        loss: part of the frames that is lost, at random.
    """

    def __init__(self, ports: Mapping[int, socket.socket], delay: float, loss: float) -> None:
        super().__init__(daemon=True)
        self.delay, self.loss = delay, loss
        self._ports = dict(ports)
        self._waiting: deque[tuple[float, socket.socket, bytes]] = deque()

    def run(self) -> None:
        be_punctual()
        listening = list(self._ports.values())
        while True:
            left = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            for sock in select.select(listening, [], [], left)[0]:
                self._take(sock)
            now = time.monotonic()
            while self._waiting and self._waiting[0][0] <= now:
                _, out, frame = self._waiting.popleft()
                _send(out, frame)

    def _take(self, sock: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                frame = sock.recv(_LONGEST)
            except BlockingIOError:
                return
            out = self._ports.get(frame[VNET_HEADER + 5])
            if out is None or (self.loss and random.random() < self.loss):
                continue
            if self.delay:
                self._waiting.append((time.monotonic() + self.delay, out, frame))
            else:
                _send(out, frame)


def _send(sock: socket.socket, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # a full queue, or a cable that is cut: it is lost
        sock.send(frame)


class Recorder(threading.Thread):
    """Writes all frames that hosts send into a file, as tcpdump does."""

    def __init__(self, ports: Mapping[int, socket.socket], path: str) -> None:
        super().__init__(daemon=True)
        self._ports = list(ports.values())
        self._path = path
        self._over = threading.Event()

    def run(self) -> None:
        with open(self._path, "wb") as file:
            file.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, _LONGEST, 1))
            while not self._over.is_set():
                ready = select.select(self._ports, [], [], 0.05)[0]
                for sock in ready:
                    _write(file, sock)

    def finish(self) -> None:
        """Write what has passed until now, and end."""
        self._over.set()
        self.join()
        with open(self._path, "ab") as file:
            for sock in self._ports:
                while _write(file, sock):
                    pass
                sock.close()


def _write(file: BinaryIO, sock: socket.socket) -> bool:
    try:
        frame = sock.recv(_LONGEST)[VNET_HEADER:]
    except BlockingIOError:
        return False
    seconds, part = divmod(time.time(), 1)
    file.write(struct.pack("<IIII", int(seconds), int(part * 1e6), len(frame), len(frame)))
    file.write(frame)
    return True
