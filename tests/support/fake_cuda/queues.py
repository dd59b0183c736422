"""What a stream consists of: a queue of work, done in order by a thread of its own."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from support.fake_cuda.errors import CUDARuntimeError, SwitchedOff

if TYPE_CHECKING:
    from support.fake_cuda.machine import Machine

Work = Callable[[], None]
# One piece of work in eight is late, by up to so much.
_LATE, _LATEST = 1 / 8, 0.0006


class Queue:
    """The work of one stream.

    A position is a number of pieces of work: ``issued`` is where the host is, ``finished`` where
    the device is.

    Attributes:
        number: of its own on this machine.
        device: ordinal of the GPU.
        handle: what ``Stream.ptr`` is; 0 for the null stream, of which every device has one.
        blocking: waits for the null stream, and the null stream for it, as streams that are not
            made with ``non_blocking=True`` do.
    """

    def __init__(self, machine: Machine, device: int, handle: int, blocking: bool) -> None:
        self.number = machine.new_handle()
        self.device = device
        self.handle = handle
        self.blocking = blocking
        self.priority = 0
        self.issued = 0
        self.finished = 0
        self.destroyed = False
        self.frozen = False
        self.slowness = 0.0
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None
        self._machine = machine
        self._work: deque[tuple[str, Work]] = deque()
        self._random = random.Random(f"{machine.seed} {device} {handle}")

    def put(self, name: str, work: Work) -> int:
        """Append a piece of work; return its position."""
        if self.destroyed:
            raise CUDARuntimeError(400)
        waits = [
            (other, other.issued)
            for other in self._machine.legacy_peers(self)
            if other.issued > other.finished
        ]
        with self.changed:
            if self._machine.closing:
                raise SwitchedOff(f"{name} was called")
            for other, position in waits:
                self._append("legacy wait", lambda o=other, p=position: o.pass_by(p))
            self._append(name, work)
            if self.thread is None:
                label = f"fake-cuda-{self.device}-{self.handle:x}"
                self.thread = threading.Thread(target=self._run, name=label, daemon=True)
                self.thread.start()
            self.changed.notify_all()
            return self.issued

    def _append(self, name: str, work: Work) -> None:
        self._work.append((name, work))
        self.issued += 1

    def wait(self, position: int | None = None) -> None:
        """Block the host until the device has come to a position, or is through."""
        target = self.issued if position is None else position
        self.pass_by(target)
        self._machine.raise_sticky(self.device)

    def pass_by(self, position: int) -> None:
        """Block until a position is reached, whatever happened."""
        with self.changed:
            self.changed.wait_for(lambda: self.finished >= position or self._machine.closing)
            if self.finished < position:
                raise SwitchedOff(f"somebody waited for stream {self.handle:#x}")

    def set(self, *, frozen: bool | None = None, slowness: float | None = None) -> None:
        """Change how it goes."""
        with self.changed:
            self.frozen = self.frozen if frozen is None else frozen
            self.slowness = self.slowness if slowness is None else slowness
            self.changed.notify_all()

    def destroy(self) -> None:
        """Have its thread end once it is through."""
        with self.changed:
            self.destroyed = True
            self.changed.notify_all()

    def wake(self) -> None:
        """Let everybody look again at what they wait for."""
        with self.changed:
            self.changed.notify_all()

    def _run(self) -> None:
        # A GPU warns of nothing.
        with np.errstate(all="ignore"):
            while (found := self._next()) is not None:
                name, work = found
                try:
                    work()
                except SwitchedOff:
                    return
                except BaseException as error:
                    self._machine.broke(self.device, name, error)
                # The work may hold the last reference to something that is collected now.
                del work, found
                with self.changed:
                    self.finished += 1
                    self.changed.notify_all()

    def _next(self) -> tuple[str, Work] | None:
        """The next piece of work, when it is time for it; None for the end."""
        with self.changed:
            self.changed.wait_for(
                lambda: (
                    self._machine.closing
                    or (self._work and not self.frozen)
                    or (self.destroyed and not self._work)
                )
            )
            if self._machine.closing or not self._work:
                return None
            found = self._work.popleft()
        late = self.slowness
        if self._machine.delays and self._random.random() < _LATE:
            late += self._random.random() * _LATEST
        if late:
            time.sleep(late)
        return found
