"""Somebody between two hosts, of whom neither knows: what they say to each other passes through.

Two further hosts of the lab are the faces that it shows: each has the address of one of the two,
and packets for that address are led there. So it holds two connections for each that the hosts
believe to have, and passes on what it likes.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from support.hosts.lab import Host, Lab
from support.hosts.places import PORT

# What a host takes where a program leaves the port to it: few enough to listen at all of them.
_FIRST, _LAST = 20_000, 20_127
_RESET = struct.pack("ii", 1, 0)
_CHUNK = 1 << 18


class Flow(NamedTuple):
    """One direction of a connection.

    Attributes:
        connection: number in the order in which they were opened.
        sender: host whose words these are.
        opener: host that opened the connection.
        port: at the other one, where it was opened.
    """

    connection: int
    sender: int
    opener: int
    port: int


# Given a flow and the next bytes of it, returns what is passed on instead; None breaks the
# connection. Every flow has a thread of its own.
Change = Callable[[Flow, bytes], "bytes | None"]


def unchanged(flow: Flow, data: bytes) -> bytes:
    """Pass everything on."""
    return data


class Middle:
    """A proxy between the first two hosts of a lab, with the last two as its faces.

    Args:
        lab: of four hosts.
        change: what becomes of what passes.
        ports: at which the hosts listen, besides those that the system chooses.
    """

    def __init__(
        self, lab: Lab, change: Change = unchanged, ports: Iterable[int] = (PORT,)
    ) -> None:
        self._hosts, self._faces = lab.hosts[:2], lab.hosts[2:4]
        self._change = change
        self._count = 0
        self._open: list[socket.socket] = []
        self._over = False
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        for at, host in enumerate(self._hosts):
            other = self._hosts[1 - at]
            lab.limit_ports(at, _FIRST, _LAST)
            lab.ip(self._faces[at].number, f"address add {other.address}/32 dev eth0")
            lab.lead(at, other.number, self._faces[at].number)
            lab.lead(self._faces[at].number, at, at)
            for port in (*ports, *range(_FIRST, _LAST + 1)):
                self._listen(host, self._faces[at], other.address, port)
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _listen(self, opener: Host, face: Host, address: str, port: int) -> None:
        listener = face.socket()
        self._open.append(listener)
        listener.bind((address, port))
        listener.listen(64)
        self._selector.register(listener, selectors.EVENT_READ, (opener.number, port))

    def _accept(self) -> None:
        while not self._over:
            for key, _ in self._selector.select():
                if key.data is not None:
                    assert isinstance(key.fileobj, socket.socket)
                    self._join(key.fileobj.accept()[0], *key.data)

    def _join(self, caller: socket.socket, opener: int, port: int) -> None:
        """Open the connection that the caller wanted, under its name, and pass on what comes."""
        with self._lock:
            self._open.append(caller)
            number, self._count = self._count, self._count + 1
        try:
            called = self.call(opener, port)
        except OSError:
            _break(caller)
            return
        self._open.append(called)
        for sender, source, target in ((opener, caller, called), (1 - opener, called, caller)):
            target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            flow = Flow(number, sender, opener, port)
            threading.Thread(target=self._pass, args=(flow, source, target), daemon=True).start()

    def call(self, opener: int, port: int) -> socket.socket:
        """Open a connection to a host as if from the other one, which does not know of it.

        Raises:
            OSError: nobody listens there.
        """
        sock = self._faces[1 - opener].socket()
        try:
            sock.bind((self._hosts[opener].address, 0))
            sock.connect((self._hosts[1 - opener].address, port))
        except OSError:
            sock.close()
            raise
        return sock

    def _pass(self, flow: Flow, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                changed = self._change(flow, data)
                if changed is None:
                    _break(source)
                    _break(target)
                    return
                target.sendall(changed)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Break all connections."""
        self._over = True
        self._wake.send(b"!")
        self._thread.join()
        for sock in (*self._open, self._wake, self._woken):
            _break(sock)
        self._selector.close()

    def __enter__(self) -> Middle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _break(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        sock.shutdown(socket.SHUT_RD)  # for a thread that waits for its next words
    sock.close()


class Frames:
    """Cuts what ZeroMQ sends into frames, as it comes.

    The greeting before them is passed on in any pieces: either end waits for parts of the other's.
    """

    _GREETING = 64
    _LONG = 2

    def __init__(self) -> None:
        self._rest = b""
        self._greeting = self._GREETING

    def cut(self, data: bytes) -> list[bytes]:
        """The pieces that are complete with these further bytes."""
        pieces = [data[: self._greeting]] if self._greeting and data else []
        self._rest += data[self._greeting :]
        self._greeting -= sum(map(len, pieces))
        while (size := self._size()) and len(self._rest) >= size:
            pieces.append(self._rest[:size])
            self._rest = self._rest[size:]
        return pieces

    def _size(self) -> int:
        """Of the next frame; 0 if its head is not complete."""
        head = 9 if self._rest[:1] and self._rest[0] & self._LONG else 2
        if len(self._rest) < head:
            return 0
        return head + int.from_bytes(self._rest[1:head], "big")
