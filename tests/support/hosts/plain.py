"""Plain TCP between two hosts: what a link carries, and how long it takes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from statistics import median

from support.hosts.lab import Host


@contextlib.contextmanager
def connected(one: Host, other: Host) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection: the end of ``one``, which opened it, and that of ``other``."""
    with one.socket() as mine, other.socket() as listener:
        listener.bind((other.address, 0))
        listener.listen()
        mine.settimeout(30)
        mine.connect(listener.getsockname())
        theirs, _ = listener.accept()
        with theirs:
            for sock in (mine, theirs):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.settimeout(30)
            yield mine, theirs


def goodput(one: Host, other: Host, size: int) -> float:
    """Bytes per second that one host sends to another, of ``size`` in all, once under way."""
    return goodput_of_all([(one, other)], size)


def goodput_of_all(pairs: Sequence[tuple[Host, Host]], size: int) -> float:
    """The same of several pairs of hosts at the same time: the median."""
    found: list[float] = []

    def receive(end: socket.socket) -> None:
        _receive(end, size // 4)
        start = time.perf_counter()
        _receive(end, size)
        found.append(size / (time.perf_counter() - start))

    with contextlib.ExitStack() as stack:
        threads = []
        for one, other in pairs:
            mine, theirs = stack.enter_context(connected(one, other))
            threads.append(threading.Thread(target=mine.sendall, args=(bytes(size // 4 + size),)))
            threads.append(threading.Thread(target=receive, args=(theirs,)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return median(found)


def round_trip(one: Host, other: Host, count: int = 20) -> float:
    """Seconds that a byte takes there and back: the median."""
    with connected(one, other) as (mine, theirs):
        took = []

        def answer() -> None:
            for _ in range(count):
                theirs.sendall(theirs.recv(1))

        answering = threading.Thread(target=answer)
        answering.start()
        for _ in range(count):
            start = time.perf_counter()
            mine.sendall(b"?")
            mine.recv(1)
            took.append(time.perf_counter() - start)
        answering.join()
    return sorted(took)[count // 2]


def _receive(sock: socket.socket, size: int) -> None:
    buffer = memoryview(bytearray(min(size, 1 << 20) or 1))
    while size:
        got = sock.recv_into(buffer[: min(size, len(buffer))])
        if not got:
            raise ConnectionError("the sender is gone")
        size -= got
