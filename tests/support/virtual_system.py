"""What ranks of ``zmq`` get from the system, in virtual time.

Everything of the transport is the real one, but for these: ZeroMQ's sockets
(``virtual_sockets.py``), listening ones, who polls them, and the look at the port of a lost rank.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import zmq
from fsdpcore.transports.zmq import backend, joining, links, probe, watch
from fsdpcore.transports.zmq.link_speed import LinkSpeed
from greenlet import GreenletExit
from support.virtual_hosts import Address, Process
from support.virtual_sockets import Sock

from fsdpcore.core.clock import Clock


class Context:
    """``zmq.Context``."""

    def __init__(self, threads: int = 1) -> None:
        self._process = Process.here()
        self._sockets: list[Sock] = []

    def socket(self, kind: int) -> Sock:
        self._sockets.append(Sock(self._process, kind))
        return self._sockets[-1]

    def destroy(self, linger: int | None = None) -> None:
        for sock in self._sockets:
            sock.end(lost=True)


class SocketPoller:
    """``zmq.Poller``."""

    def __init__(self) -> None:
        self._sockets: list[Sock] = []

    def register(self, sock: Sock, flags: int) -> None:
        self._sockets.append(sock)

    def unregister(self, sock: Sock) -> None:
        self._sockets.remove(sock)

    def poll(self, milliseconds: float) -> None:
        seconds = milliseconds / 1000
        Process.here().wait(lambda: any(sock.readable for sock in self._sockets), seconds)


class FiberPoller:
    """``Poller``, but a fiber polls all the time, and nobody else does."""

    def __init__(
        self,
        lock: Any,
        tick: Callable[[], float | None],
        ended: Callable[[BaseException], None],
        name: str,
    ) -> None:
        self._process = Process.here()
        self._tick, self._ended, self._name = tick, ended, name
        self._handlers: list[tuple[Sock, Callable[[], None]]] = []
        self._unfinished: list[Callable[[], None]] = []
        self._reminded = self._stopping = False

    def add(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._handlers.append((self._process.net.sockets[descriptor], handler))

    def remind(self) -> None:
        self._reminded = True
        self._process.stir()

    def start(self) -> None:
        self._process.net.clock.start(self._run, self._name)

    def stop(self) -> None:
        self._stopping = True
        self._process.stir()

    def again(self, handler: Callable[[], None]) -> None:
        self._unfinished.append(handler)
        self._process.stir()

    def changed(self) -> None:
        self._process.stir()

    def finished(self, message: Any) -> None:
        self._process.stir()

    def wait(self, awaited: Any, seconds: float) -> None:
        self._process.wait(lambda: awaited.finished, seconds)

    def until(self, predicate: Callable[[], object], seconds: float) -> bool:
        return self._process.wait(predicate, seconds)

    def _run(self) -> None:
        due: float | None = None
        try:
            while not self._stopping:
                self._process.wait(self._ready, 1e9 if due is None else due)
                self._reminded = False
                unfinished, self._unfinished = self._unfinished, []
                ready = [call for sock, call in self._handlers if sock.signalled]
                self._process.net.draw.shuffle(ready)  # what breaks is seen before what had come
                for handler in (*unfinished, *ready):
                    handler()
                self._process.stir()
                due = self._tick()
        except GreenletExit:
            raise
        except BaseException as error:
            self._ended(error)
            raise

    def _ready(self) -> bool:
        signalled = any(sock.signalled for sock, _ in self._handlers)
        return bool(self._stopping or self._reminded or self._unfinished or signalled)


class Look:
    """``Probe``: a look at the port of a lost rank."""

    def __init__(self, address: Address, seconds: float, clock: Clock) -> None:
        self._process = process = Process.here()
        self._net, self._address, self._clock = process.net, address, clock
        self._answer = clock.now() + 2 * self._net.delay()
        self._end = clock.now() + seconds

    def look(self) -> str:
        now = self._clock.now()
        if not self._net.reaches(self._process.host, self._address[0]):
            return probe.SILENT if now >= self._end else ""
        listener = self._net.listeners.get(self._address)
        if listener is not None and listener.process.frozen:
            return probe.STOPPED if now >= self._end else ""
        if now < self._answer:
            return ""
        return probe.ENDED if listener is None else probe.CUT

    def close(self) -> None:
        pass


class _Usage:
    """``resource``: a thread that is not stopped wakes up now and then."""

    RUSAGE_THREAD = 1

    def __init__(self) -> None:
        self._wakes = itertools.count()

    def getrusage(self, who: int) -> Any:
        return SimpleNamespace(ru_nvcsw=next(self._wakes))


@contextlib.contextmanager
def instead_of_the_system() -> Iterator[None]:
    """Have ranks run in virtual time."""
    fakes: list[tuple[Any, str, Any]] = [
        (zmq, "Context", Context),
        (zmq, "Poller", SocketPoller),
        (zmq, "curve_keypair", lambda: (b"public", b"secret")),
        (backend, "Poller", FiberPoller),
        (backend, "measure", lambda *_: LinkSpeed(1e-4, 1e9)),
        (backend, "_keep_freed_memory", lambda: None),
        (joining, "listen", lambda host, port: Process.here().listen(host, port)),
        (joining, "own_address", lambda *_: Process.here().host),
        (joining, "_make_room", lambda _: None),
        (joining, "os", SimpleNamespace(dup=lambda listener: listener.detach())),
        (links, "own_address", lambda *_: Process.here().host),
        (watch, "Probe", Look),
        (watch, "resource", _Usage()),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, fake in fakes:
            stack.enter_context(mock.patch.object(owner, name, fake))
        yield
