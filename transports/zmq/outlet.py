"""``Outlet``: what a rank sends to one other, in order, and no faster than that one takes it in.

ZeroMQ takes whatever it is given, and would let gigabytes wait between the ranks, with every small
frame behind them. So a rank lets only so many bytes be under way to another one, its *window*, and
keeps the rest. Who receives says from time to time how many bytes it has taken in. A window is what
the link carries in a round trip, and a little more: bytes beyond that only wait somewhere else.
Notes of a few bytes go at once, ahead of what is kept.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

UNCOPIED = 1 << 20
"""Bytes that take longer to copy than a receiver nearby to say that it has them."""


class Send(Protocol):
    """Sends a frame; see ``Links.send``."""

    def __call__(self, header: bytes, payload: Any, copy: bool = True) -> Callable[[], None] | None:
        """See there."""


class FrameSource(Protocol):
    """Who sends frames straight from memory that has to stay as it is meanwhile.

    Attributes:
        ready: bytes for which ``next_segment`` may be called now.
    """

    @property
    def ready(self) -> int:
        """See there."""

    def next_segment(self, most: int) -> tuple[bytes, Any]:
        """Return header and data of the next frame, of at most that many bytes of data."""

    def sent(self) -> None:
        """A frame was copied, or the receiver has it: its memory may change."""


class Flow(NamedTuple):
    """How bytes go over a link.

    Attributes:
        segment: bytes of a large message that are sent as one frame.
        window: bytes that may be under way.
        ahead: bytes of a large message that are sent before anybody has asked for it; the receiver
            may have to keep them. Four times that for all messages together.
        uncopied: bytes of a frame from which on it is not copied before it is sent. Its message
            ends when the receiver has it, which must not take longer than copying.
    """

    segment: int
    window: int
    ahead: int = 256 << 10
    uncopied: int = UNCOPIED


class _Waiting(NamedTuple):
    header: bytes
    payload: Any
    owner: FrameSource | None


class _Uncopied(NamedTuple):
    """A frame in its owner's memory, until ``end`` bytes of payloads have been taken in."""

    end: int
    owner: FrameSource
    reclaim: Callable[[], None]


class Outlet:
    """Frames to one other rank; called with the lock of the links held.

    Args:
        send: sends a frame.
        flow: of the link.

    Attributes:
        flow: of the link; may change at any time.
        ended: nothing more can be sent, since the link has broken.
    """

    def __init__(self, send: Send, flow: Flow) -> None:
        self.flow = flow
        self.ended = False
        self._send = send
        self._frames: deque[_Waiting] = deque()
        self._sources: deque[FrameSource] = deque()
        self._uncopied: deque[_Uncopied] = deque()
        self._sent = self._credited = 0

    @property
    def flushed(self) -> bool:
        """Whether everything is on its way, or never will be."""
        return self.ended or not (self._frames or self._sources)

    def say(self, header: bytes) -> None:
        """Send a frame without payload at once."""
        if not self.ended:
            self._send(header, None)

    def put(self, header: bytes, payload: Any = None) -> None:
        """Send a frame behind all others; ``payload`` may change afterwards."""
        if self.ended:
            return
        if self._frames or self._under_way > self.flow.window:
            kept = None if payload is None else bytes(payload)
            self._frames.append(_Waiting(header, kept, None))
        else:
            self._go(header, payload)

    def post(self, header: bytes, payload: Any, owner: FrameSource) -> None:
        """Send a frame behind all others; ``payload`` stays as it is until its owner is told."""
        if not self.ended:
            self._frames.append(_Waiting(header, payload, owner))
            self._go_on()

    def add(self, source: FrameSource) -> None:
        """Send all segments of ``source``, as soon as nothing else is to be sent."""
        if not self.ended:
            if source not in self._sources:
                self._sources.append(source)
            self._go_on()

    def withdraw(self, owner: FrameSource) -> None:
        """Send no more of what belongs to ``owner``, whose memory may change on return."""
        with contextlib.suppress(ValueError):
            self._sources.remove(owner)
        self._frames = deque(item for item in self._frames if item.owner is not owner)
        for frame in [item for item in self._uncopied if item.owner is owner]:
            frame.reclaim()
            self._uncopied.remove(frame)

    def credited(self, total: int) -> None:
        """Note how many bytes the other rank has taken in so far."""
        self._credited = max(self._credited, min(total, self._sent))
        while self._uncopied and self._uncopied[0].end <= self._credited:
            self._uncopied.popleft().owner.sent()
        self._go_on()

    @property
    def _under_way(self) -> int:
        return self._sent - self._credited

    def _go_on(self) -> None:
        while not self.ended and self._under_way <= self.flow.window:
            if self._frames:
                header, payload, owner = self._frames.popleft()
            elif self._sources:
                owner = source = self._sources[0]
                header, payload = source.next_segment(self.flow.segment)
                # The next one has its turn: a long message does not hold up the others.
                self._sources.popleft()
                if source.ready:
                    self._sources.append(source)
            else:
                return
            self._go(header, payload, owner)

    def _go(self, header: bytes, payload: Any, owner: FrameSource | None = None) -> None:
        size = 0 if payload is None else len(payload)
        self._sent += size
        uncopied = owner is not None and size >= self.flow.uncopied
        reclaim = self._send(header, payload, copy=not uncopied)
        if owner is None:
            return
        if reclaim is None:
            owner.sent()
        else:
            self._uncopied.append(_Uncopied(self._sent, owner, reclaim))

    def end(self) -> None:
        """Send no more."""
        self.ended = True
        self._frames.clear()
        self._sources.clear()
        self._uncopied.clear()
