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

Send = Callable[[bytes, Any], None]


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
        """The frame was copied, and its memory may change."""


class Flow(NamedTuple):
    """How bytes go over a link.

    Attributes:
        segment: bytes of a large message that are sent as one frame.
        window: bytes that may be under way.
        ahead: bytes of a large message that are sent before anybody has asked for it; the receiver
            may have to keep them. Four times that for all messages together.
    """

    segment: int
    window: int
    ahead: int = 256 << 10


class _Waiting(NamedTuple):
    header: bytes
    payload: Any
    owner: FrameSource | None


class Outlet:
    """Frames to one other rank; called with the lock of the connections held.

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
        self._sent = self._taken = 0

    @property
    def flushed(self) -> bool:
        """Whether everything is on its way, or never will be."""
        return self.ended or not (self._frames or self._sources)

    def note(self, header: bytes) -> None:
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
        """Send no more of what belongs to ``owner``."""
        with contextlib.suppress(ValueError):
            self._sources.remove(owner)
        self._frames = deque(item for item in self._frames if item.owner is not owner)

    def taken(self, total: int) -> None:
        """Note how many bytes the other rank has taken in so far."""
        self._taken = max(self._taken, min(total, self._sent))
        self._go_on()

    @property
    def _under_way(self) -> int:
        return self._sent - self._taken

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
            self._go(header, payload)
            if owner is not None:
                owner.sent()

    def _go(self, header: bytes, payload: Any) -> None:
        self._sent += 0 if payload is None else len(payload)
        self._send(header, payload)

    def end(self) -> None:
        """Send no more."""
        self.ended = True
        self._frames.clear()
        self._sources.clear()
