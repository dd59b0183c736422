"""ZeroMQ's sockets in virtual time: what ``transports/zmq`` uses of them, over no network.

A connection is made by an attempt, an acceptance and a handshake; what is sent on it comes in its
order, some time later; and when it breaks, each end is told some time later still. What was on its
way then comes or does not. Who connects tries again, unless it has said that it never will. A
socket's descriptor signals changes, and any use of the socket swallows the signal.
"""

from __future__ import annotations

import errno
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import zmq

if TYPE_CHECKING:
    from support.virtual_hosts import Listener, Process

_EVENT = struct.Struct("=Hi")
_NO_RECONNECT_MS = 3_600_000
_APART_SECONDS = 1e-9  # between two things on one connection, which keep their order
_SYN_SECONDS = 1.0  # after which TCP asks again where nothing answers


class Part:
    """A frame that has come."""

    def __init__(self, data: bytes, more: bool, line: Line | None) -> None:
        self.bytes, self.more, self._line = data, more, line

    @property
    def buffer(self) -> memoryview:
        return memoryview(self.bytes)

    def __len__(self) -> int:
        return len(self.bytes)

    def get(self, what: Any) -> Any:
        """The descriptor of the connection that it came over, or from where."""
        assert self._line is not None
        return self._line.descriptor if what == zmq.SRCFD else self._line.ends[0].process.host


class Sock:
    """A socket: DEALER, ROUTER, or the PAIR that tells of another one's connections."""

    def __init__(self, process: Process, kind: int) -> None:
        self.process, self.kind = process, kind
        self.options: dict[int, Any] = {}
        self.wires: dict[bytes, Wire | Line] = {}  # by the name of who is at the other end
        self.descriptors: set[int] = set()
        self.signalled = self.closed = False
        self.number = process.net.new_socket(self)
        self._monitor: tuple[int, Sock] | None = None
        self._came: deque[Part] = deque()
        self._going: list[bytes] = []
        self._listener: Listener | None = None
        process.sockets.append(self)

    # Settings.

    def setsockopt(self, option: int, value: Any) -> None:
        self.options[int(option)] = value

    setsockopt_string = setsockopt

    def getsockopt(self, option: int) -> int:
        if option == zmq.FD:
            return self.number
        self._use()
        return int(zmq.POLLIN if self._came else 0)

    def get_monitor_socket(self, mask: int) -> Sock:
        self._monitor = int(mask), Sock(self.process, zmq.PAIR)
        return self._monitor[1]

    def disable_monitor(self) -> None:
        self._monitor = None

    def _use(self) -> None:
        self.signalled = False

    # Connections.

    def bind(self, endpoint: str) -> None:
        self._listener = self.process.net.handles.pop(self.options[int(zmq.USE_FD)])
        self._listener.serve(self)

    def connect(self, endpoint: str) -> None:
        self._use()
        route = self.options.get(int(zmq.CONNECT_ROUTING_ID), b"")
        self.wires[route] = Wire(self, endpoint, self.options.get(int(zmq.ROUTING_ID)))
        self.wires[route].attempt()

    def disconnect(self, endpoint: str) -> None:
        for wire in self.wires.values():
            if isinstance(wire, Wire) and wire.endpoint == endpoint:
                wire.close(lost=True)

    def accepted(self) -> int:
        """Take a connection; return its descriptor: the lowest that is free."""
        descriptor = next(n for n in range(20, 2000) if n not in self.descriptors)
        self.descriptors.add(descriptor)
        self.tell(zmq.EVENT_ACCEPTED, descriptor)
        return descriptor

    def tell(self, event: int, value: int = 0, endpoint: str = "") -> None:
        """Tell who watches the connections."""
        if self._monitor is not None and not self.closed and int(event) & self._monitor[0]:
            parts = [_EVENT.pack(int(event), value), endpoint.encode()]
            self._monitor[1].come(parts, None)

    def close(self, linger: int | None = None) -> None:
        self.end(lost=not linger)

    def end(self, lost: bool) -> None:
        """Close it, with or without what was sent and is on its way."""
        if self.closed:
            return
        self.closed = True
        for wire in list(self.wires.values()):
            wire.close(lost)
        self.wires.clear()
        if self._listener is not None:
            self._listener.serve(None)
            self._listener.release()

    # Messages.

    def come(self, parts: Sequence[bytes], line: Line | None) -> None:
        """A message is there to be read."""
        if not self.closed:
            last = len(parts) - 1
            self._came.extend(Part(data, at < last, line) for at, data in enumerate(parts))
            self.signalled = True
            self.process.stir()

    @property
    def readable(self) -> bool:
        """Whether there is something to read."""
        return bool(self._came)

    def recv(self, flags: int = 0, copy: bool = True) -> Any:
        self._use()
        if not self._came:
            raise zmq.Again
        part = self._came.popleft()
        return part.bytes if copy else part

    def recv_multipart(self, flags: int = 0, copy: bool = True) -> list[Any]:
        parts = [self.recv(flags, copy=False)]
        while parts[-1].more:
            parts.append(self.recv(flags, copy=False))
        return [part.bytes for part in parts] if copy else parts

    def send(self, data: Any, flags: int = 0, copy: bool = True, track: bool = False) -> Any:
        self._use()
        named = self.kind == zmq.DEALER or self._going
        if not named and bytes(data) not in self.wires and self.options.get(zmq.ROUTER_MANDATORY):
            raise zmq.ZMQError(errno.EHOSTUNREACH)
        self._going.append(bytes(data))
        if not flags & zmq.SNDMORE:
            parts, self._going = self._going, []
            name = b"" if self.kind == zmq.DEALER else parts.pop(0)
            if name in self.wires:
                self.wires[name].send(parts)
        return SimpleNamespace(done=True)

    def send_multipart(self, parts: Sequence[bytes]) -> None:
        for part in parts[:-1]:
            self.send(part, zmq.SNDMORE)
        self.send(parts[-1])

    def poll(self, milliseconds: float) -> bool:
        return self.process.wait(lambda: self.readable, milliseconds / 1000)


class Wire:
    """What a socket connects to: one line after the other, if it tries again when one breaks."""

    def __init__(self, sock: Sock, endpoint: str, identity: bytes | None) -> None:
        self.sock, self.endpoint = sock, endpoint
        self.options = dict(sock.options)  # as they are now
        host, _, port = endpoint.removeprefix("tcp://").rpartition(";")[2].rpartition(":")
        self.address = (host, int(port))
        self.net = sock.process.net
        self.identity = identity or b"\0%d" % self.net.draw.getrandbits(60)
        self.line: Line | None = None
        self._waiting: list[Sequence[bytes]] = []
        self._closed = False

    def _seconds(self, option: int, otherwise: float) -> float:
        return float(self.options.get(int(option), otherwise)) / 1000

    def tell(self, event: int) -> None:
        self.sock.tell(event, 0, self.endpoint)

    def again(self) -> None:
        """Try anew after a pause, where the socket does."""
        self.line = None
        pause = self._seconds(zmq.RECONNECT_IVL, 100)
        if pause < _NO_RECONNECT_MS / 1000:
            self.net.after(pause, self.attempt)

    def attempt(self) -> None:
        self.net.after(self.net.delay(), lambda: self.sock.process.do(self._attempt))

    def _attempt(self) -> None:
        net = self.net
        if self._closed:
            return
        if not net.reaches(self.sock.process.host, self.address[0]):
            limit = self._seconds(zmq.CONNECT_TIMEOUT, 1000 * _SYN_SECONDS)
            net.after(limit, lambda: self.sock.process.do(self.refused))
        elif (listener := net.listeners.get(self.address)) is None:
            self.refused()
        else:
            self.line = line = Line(self)
            listener.queue(line)
            limit = self._seconds(zmq.HANDSHAKE_IVL, 30_000)
            net.after(limit, lambda: self.sock.process.do(line.give_up))

    def refused(self) -> None:
        """Nobody is there."""
        if not self._closed:
            self.tell(zmq.EVENT_CLOSED)
            self.again()

    def send(self, parts: Sequence[bytes]) -> None:
        if self.line is None or not self.line.open:
            self._waiting.append(parts)
        else:
            self.line.carry(0, [self.identity, *parts])

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for parts in waiting:
            self.send(parts)

    def close(self, lost: bool) -> None:
        self._closed = True
        if self.line is not None:
            self.line.close_end(0, lost)


class Line:
    """One connection, from end 0, which has asked for it, to end 1, which listens.

    Attributes:
        ends: the sockets; the second is known once somebody has accepted it.
        descriptor: that end 1 has for it.
        open: the handshake is over.
        silent: nothing gets through any more, and nobody says so.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire, self._net = wire, wire.net
        self.ends = [wire.sock]
        self.descriptor = -1
        self.open = self.silent = False
        self._over = [False, False]  # for an end: it is closed there, or was found to be broken
        self._lost = [False, False]  # of an end: what it has sent, and is on its way
        self._last = [0.0, 0.0]  # of an end: when the last comes of what it has sent

    # To be made.

    def give_up(self) -> None:
        """The handshake has taken too long."""
        if not self.open and not self._over[0]:
            self.fail(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)

    def fail(self, event: int, *, again: bool = True) -> None:
        """It is not made."""
        self.close_end(0, lost=True)
        self._wire.tell(event)
        if again:
            self._wire.again()

    def refuse(self) -> None:
        """Nobody listens any more, before anybody has accepted it."""
        self._arrive(1, lambda: self.fail(zmq.EVENT_CLOSED))

    def admit(self, far: Sock) -> None:
        """Who listens accepts it, and both shake hands."""

        def accept() -> None:
            if far.process.dead:
                self.refuse()
            else:
                far.process.do(lambda: self._accept(far))

        self._net.after(self._net.delay(), accept)

    def _accept(self, far: Sock) -> None:
        if self._over[0]:
            return
        if far.closed:
            self.refuse()
            return
        self.ends.append(far)
        self.descriptor = far.accepted()
        wanted = self._wire.options.get(int(zmq.CURVE_SERVERKEY))
        secret = far.options.get(int(zmq.CURVE_SECRETKEY))
        if wanted == (None if secret is None else _public(secret)):
            far.wires[self._wire.identity] = self
            self._arrive(1, self._opened)
        elif (wanted is None) != (secret is None):
            self._arrive(1, lambda: self.fail(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, again=False))
        else:
            self._arrive(1, lambda: self.fail(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL))

    def _opened(self) -> None:
        self.open = True
        self._wire.tell(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._wire.flush()

    # To carry.

    def send(self, parts: Sequence[bytes]) -> None:
        """End 1 sends a message."""
        self.carry(1, parts)

    def carry(self, end: int, parts: Sequence[bytes]) -> None:
        """An end sends a message."""
        self._arrive(end, lambda: self.ends[1 - end].come(parts, self))

    def _arrive(self, end: int, event: Callable[[], None]) -> None:
        """Have something happen at the other end, behind all else that comes from this one."""
        to = self.ends[1 - end].process

        def happen() -> None:
            if not (self._over[1 - end] or self._lost[end] or self.silent):
                event()

        self._net.clock.at(self._behind(end), lambda: to.do(happen))

    def _behind(self, end: int) -> float:
        """When something comes that follows all else from an end."""
        when = self._net.clock.now() + self._net.delay()
        self._last[end] = when = max(self._last[end] + _APART_SECONDS, when)
        return when

    # To end.

    def close(self, lost: bool) -> None:
        """End 1 is closed."""
        self.close_end(1, lost)

    def close_end(self, end: int, lost: bool) -> None:
        """An end is closed; the other one hears of it, unless there is no way to tell it."""
        if not self._over[end]:
            self._over[end] = True
            self._forget(end)
            self._break(end, lost)

    def cut(self) -> None:
        """It breaks."""
        for end in (0, 1):
            self._break(end, lost=True)

    def _break(self, end: int, lost: bool) -> None:
        """The other end is told that it is broken, behind what is on its way, if that comes."""
        self._lost[end] |= lost and self._net.draw.random() < 0.5
        if len(self.ends) > 1 and not self.silent:
            found, to = lambda: self._found_broken(1 - end), self.ends[1 - end].process
            self._net.clock.at(self._behind(end), lambda: to.do(found))

    def fall_silent(self) -> None:
        """Nothing gets through any more: after a while either end finds that it is broken."""
        if self.silent or len(self.ends) < 2:
            return
        self.silent = True
        for end in (0, 1):
            self.expect_nothing(end)

    def expect_nothing(self, end: int) -> None:
        """Have an end find out, as its heartbeat does, that the other one is silent."""
        sock = self.ends[end]
        limit, beat = (
            sock.options.get(int(option), 0) / 1000
            for option in (zmq.HEARTBEAT_TIMEOUT, zmq.HEARTBEAT_IVL)
        )
        wait = limit + beat * self._net.draw.random()
        self._net.after(wait, lambda: sock.process.do(lambda: self._find_silent(end)))

    def _find_silent(self, end: int) -> None:
        if (self.silent or self.ends[1 - end].process.frozen) and not self._over[end]:
            self._lost[1 - end] = True
            self._break(end, lost=True)  # who was only stopped will hear of it
            self._found_broken(end)

    def _found_broken(self, end: int) -> None:
        if self._over[end]:
            return
        self._over[end] = True
        self._forget(end)
        if end == 0:
            self._wire.tell(zmq.EVENT_DISCONNECTED)
            self._wire.again()
        else:
            self.ends[1].tell(zmq.EVENT_DISCONNECTED, self.descriptor)

    def _forget(self, end: int) -> None:
        if end == 0:
            self._wire.line = None
        elif len(self.ends) > 1:
            far = self.ends[1]
            far.descriptors.discard(self.descriptor)
            if far.wires.get(self._wire.identity) is self:
                del far.wires[self._wire.identity]


@lru_cache
def _public(secret: bytes) -> bytes:
    return zmq.curve_public(secret)
