"""Hosts and processes in virtual time, what is between them, and what befalls them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from greenlet import GreenletExit
from support.virtual_sockets import Line, Sock

from fsdpcore.core.errors import RendezvousError
from fsdpcore.simulation.fibers import VirtualClock

_HERE: ContextVar[Process] = ContextVar("here")
_ROUND_TRIP = 1e-4
Address = tuple[str, int]


def host_address(host: int) -> str:
    """The address of a host."""
    return f"10.0.{host}.1"


class SharedClock(VirtualClock):
    """The clock of all processes. A fiber of one that is frozen stays in its sleep."""

    def _sleep(self, seconds: float) -> None:
        super()._sleep(seconds)
        here = _HERE.get(None)
        if here is not None:
            here.live()


class Process:
    """A process on a host.

    What befalls it does so while its fibers wait, or could go on: computing takes no time.

    Attributes:
        frozen: it does nothing, since it was stopped, or killed.
        dead: it was killed, or has ended.
        sockets: of ZeroMQ.
    """

    def __init__(self, net: Net, host: str) -> None:
        self.net, self.host = net, host
        self.frozen = self.dead = False
        self.sockets: list[Sock] = []
        self.listening: list[Listener] = []
        self._waiting: deque[Any] = deque()
        self._stopped: deque[Any] = deque()
        self._held: list[Callable[[], None]] = []
        net.processes.append(self)

    @staticmethod
    def here() -> Process:
        """The process that the calling fiber is of."""
        return _HERE.get()

    def run(self, body: Callable[[], None]) -> None:
        """Call ``body`` on the first fiber of the process, which ends with it."""
        _HERE.set(self)
        self.live()
        body()
        self.live()
        self.kill()

    # Its threads: those of Python, and ZeroMQ's.

    def live(self) -> None:
        """Do nothing while the process is frozen."""
        while self.frozen and not self.net.over:
            self.net.clock.suspend(self._stopped, float("inf"))
        if self.net.over:
            raise GreenletExit

    def wait(self, ready: Callable[[], object], seconds: float) -> bool:
        """Wait until something is so, as ``stir`` has it looked at; return whether it is."""
        clock = self.net.clock
        end = clock.now() + seconds
        while True:
            self.live()
            if ready() or clock.now() >= end:
                return bool(ready())
            clock.suspend(self._waiting, end)

    def stir(self) -> None:
        """Have all that wait look."""
        while self._waiting:
            self.net.clock.wake(self._waiting)

    def do(self, event: Callable[[], None]) -> None:
        """Have ZeroMQ's threads do something."""
        if not self.frozen:
            event()
        elif not self.dead:
            self._held.append(event)

    def listen(self, host: str, port: int) -> Listener:
        """Listen at an address; port 0 takes a free one."""
        address = (host, port or 40_000 + self.net.next_number())
        if address in self.net.listeners:
            raise RendezvousError(f"somebody listens at {address}")
        return Listener(self, address)

    # What befalls it.

    def kill(self) -> None:
        """End it without a word."""
        self.frozen = self.dead = True
        for sock in self.sockets:
            sock.end(lost=True)
        for listener in list(self.listening):
            listener.vanish()
        self.net.changed()

    def stop(self) -> None:
        """Stop it."""
        if not self.dead:
            self.frozen = True
            for line in self.net.lines():
                for end, sock in enumerate(line.ends):
                    if sock.process is self and len(line.ends) > 1:
                        line.expect_nothing(1 - end)
            self.net.changed()

    def go_on(self) -> None:
        """Have it go on where it was stopped."""
        if not self.dead:
            self.frozen = False
            held, self._held = self._held, []
            for event in held:
                self.do(event)
            while self._stopped:
                self.net.clock.wake(self._stopped)


class Listener:
    """A TCP socket that listens; as ``socket.socket``, as far as it is used here.

    Each copy of its descriptor keeps it open.
    """

    def __init__(self, process: Process, address: Address) -> None:
        self.process, self.address = process, address
        self._copies = 1
        self._sock: Sock | None = None
        self._queue: list[Line] = []
        process.listening.append(self)
        process.net.listeners[address] = self

    def getsockname(self) -> Address:
        return self.address

    def fileno(self) -> Listener:
        return self

    def dup(self) -> Listener:
        self._copies += 1
        return self

    def detach(self) -> int:
        """Hand the descriptor to a socket of ZeroMQ's."""
        self.process.net.handles[self.process.net.next_number()] = self
        self._copies += 1
        return self.process.net.last_number

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Close one descriptor."""
        self._copies -= 1
        if not self._copies:
            self.vanish()

    def vanish(self) -> None:
        """Listen no more."""
        if self in self.process.listening:
            self.process.listening.remove(self)
            del self.process.net.listeners[self.address]
            queue, self._queue = self._queue, []
            for line in queue:
                line.refuse()

    def serve(self, sock: Sock | None) -> None:
        """Have a socket of ZeroMQ's accept who comes, or none."""
        self._sock = sock
        if sock is not None:
            queue, self._queue = self._queue, []
            for line in queue:
                line.admit(sock)

    def queue(self, line: Line) -> None:
        """Somebody comes."""
        if self._sock is None:
            self._queue.append(line)
        else:
            line.admit(self._sock)


class Net:
    """All processes, and what is between them; what happens follows from the seed."""

    def __init__(self, clock: VirtualClock, seed: int) -> None:
        self.clock = clock
        self.draw = random.Random(f"net {seed}")
        self.over = False
        self.processes: list[Process] = []
        self.listeners: dict[Address, Listener] = {}
        self.handles: dict[int, Listener] = {}
        self.sockets: dict[int, Sock] = {}
        self.last_number = 100
        self._mute: set[frozenset[str]] = set()
        self._deaf: set[str] = set()
        self._slow = self.draw.choice([1e-4, 1e-3, 2e-2])
        self._watching: deque[Any] = deque()

    def next_number(self) -> int:
        """A descriptor."""
        self.last_number += 1
        return self.last_number

    def new_socket(self, sock: Sock) -> int:
        """Number a socket."""
        self.sockets[self.next_number()] = sock
        return self.last_number

    # Time.

    def delay(self) -> float:
        """How long something takes from one process to another."""
        return self.draw.random() * (self._slow if self.draw.random() < 0.2 else _ROUND_TRIP)

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Have something happen."""
        self.clock.at(self.clock.now() + seconds, event)

    def changed(self) -> None:
        """Have who waits for ``until`` look."""
        while self._watching:
            self.clock.wake(self._watching)

    def until(self, ready: Callable[[], object], end: float) -> bool:
        """Wait, as nobody's fiber, until something is so; return whether it is."""
        while not ready() and self.clock.now() < end:
            self.clock.suspend(self._watching, end)
        return bool(ready())

    # The network.

    def reaches(self, one: str, other: str) -> bool:
        """Whether anything gets from one host to another."""
        return one == other or not ({one, other} & self._deaf or {one, other} in self._mute)

    def lines(self) -> list[Line]:
        """All connections, whether they break just now or not."""
        wires = [wire for sock in self.sockets.values() for wire in sock.wires.values()]
        lines = [wire if isinstance(wire, Line) else wire.line for wire in wires]
        return list(dict.fromkeys(line for line in lines if line is not None))

    def cut(self, one: Process, other: Process) -> None:
        """Break the connections between two processes."""
        for line in self.lines():
            if {sock.process for sock in line.ends} == {one, other}:
                line.cut()

    def lose(self, host: str) -> None:
        """Have nothing come to a host, or from it, any more."""
        self._deaf.add(host)
        self._fall_silent()

    def part(self, one: str, other: str) -> None:
        """Have nothing get from one host to another any more."""
        self._mute.add(frozenset({one, other}))
        self._fall_silent()

    def _fall_silent(self) -> None:
        for line in self.lines():
            if not self.reaches(*[sock.process.host for sock in (line.ends * 2)[:2]]):
                line.fall_silent()
