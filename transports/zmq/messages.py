"""The messages of a rank of the ``zmq`` transport while they are on their way."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, Protocol

from fsdpcore.comm.envelope import Envelope
from fsdpcore.comm.matching import Key, MatchTable
from fsdpcore.core.buffers import Bytes
from fsdpcore.core.errors import CommunicationError
from fsdpcore.core.work import Pending

from ..memory.shared import SharedMemory
from .poller import AwaitedMessage, Poller
from .wire import Frame, FrameKind, SegmentOffset, pack_header

# Where an eager message is listed, which has no number.
EAGER = 0


class ConnectionState:
    """What the connections of a rank share.

    Attributes:
        rank: of this process.
        eager: up to how many bytes a message is sent at once.
        memory: that this rank shares with others on its host.
        lock: held by whoever touches a link, a channel or the table.
        table: receives without a message, and messages without a receive.
        numbers: for large messages and queries.
        poller: who polls the sockets.
        serve: handles what has come.
        fail: called with an error that concerns all ranks.
        warned: that memory is out of reach was logged.
    """

    def __init__(
        self,
        rank: int,
        eager: int,
        memory: SharedMemory,
        fail: Callable[[CommunicationError], None],
    ) -> None:
        self.rank = rank
        self.eager = eager
        self.memory = memory
        self.fail = fail
        self.warned = False
        self.lock = threading.RLock()
        self.table: MatchTable[IncomingMessage, UnexpectedMessage] = MatchTable()
        self.numbers = itertools.count(1)
        self.poller: Poller
        self.serve: Callable[[], None]


class MessageChannel(Protocol):
    """What a message uses of the ``PeerChannel`` that it goes through."""

    state: ConnectionState
    rank: int

    def finish_sent(self, outgoing: OutgoingMessage) -> None:
        """All of a message was sent."""

    def cancel_send(self, outgoing: OutgoingMessage) -> bool:
        """Give a message up; see ``Pending.cancel``."""

    def finish_received(self, incoming: IncomingMessage) -> None:
        """All of a message has come."""

    def match(self, arrival: UnexpectedMessage, incoming: IncomingMessage) -> None:
        """Bring a message that came through it and its receive together."""

    def drop_receive(self, incoming: IncomingMessage) -> None:
        """Write no more into the array of a receive that has met its message."""


class OutgoingMessage(AwaitedMessage):
    """A large message that this rank sends.

    Attributes:
        remaining: bytes not yet sent.
        ahead: bytes that are sent, or lent, before the receiver has asked for it.
        granted: the receiver has asked for the rest.
        lent: it goes through memory.
        on_their_way: how many frames with its bytes are being sent.
    """

    __slots__ = (
        "ahead",
        "data",
        "granted",
        "lent",
        "number",
        "on_their_way",
        "peer_channel",
        "remaining",
    )

    def __init__(
        self,
        peer_channel: MessageChannel,
        number: int,
        data: Bytes,
        ahead: int,
        *,
        lent: bool = False,
    ) -> None:
        super().__init__(peer_channel.state.poller)
        self.peer_channel = peer_channel
        self.number = number
        self.data = data
        self.ahead = ahead
        self.remaining = data.size - ahead
        self.granted = False
        self.lent = lent
        self.on_their_way = 0 if lent else 1

    @property
    def ready(self) -> int:
        return self.remaining if self.granted else self.remaining - (self.data.size - self.ahead)

    def next_segment(self, most: int) -> tuple[bytes, Any]:
        start = self.data.size - self.remaining
        size = min(self.ready, most)
        self.remaining -= size
        self.on_their_way += 1
        header = pack_header(FrameKind.DATA, message=self.number, size=size, offset=start)
        return header, self.data[start : start + size]

    def sent(self) -> None:
        self.on_their_way -= 1
        self.peer_channel.finish_sent(self)

    def cancel(self) -> bool:
        return self.peer_channel.cancel_send(self)


class IncomingMessage(AwaitedMessage):
    """A receive, or a probe: waiting for its message, or for the rest of it.

    Attributes:
        begun: bytes that have come.
        peer_channel: through which they come; None before its message has met it.
    """

    __slots__ = ("begun", "envelope", "key", "number", "out", "peer_channel", "state")

    def __init__(self, state: ConnectionState, out: Bytes, src: int, envelope: Envelope) -> None:
        super().__init__(state.poller)
        self.state = state
        self.peer_channel: MessageChannel | None = None
        self.out = out
        self.envelope = envelope
        self.key: Key = (src, envelope.channel, envelope.tag)
        self.number = EAGER
        self.begun = 0

    def filled(self) -> None:
        if self.begun == self.out.size and self.peer_channel is not None:
            self.peer_channel.finish_received(self)

    def settle(self, seconds: float) -> bool:
        if not self.finished:  # perhaps it is there
            with self.state.lock:
                self.state.serve()
                self.state.poller.changed()
        return super().settle(seconds)

    def cancel(self) -> bool:
        with self.state.lock:
            if self.state.table.withdraw_receive(self):
                return True
            if self.peer_channel is not None:
                self.peer_channel.drop_receive(self)
        return self.finished


class UnexpectedMessage:
    """A message that came before its receive: a small one, or an offer with its first bytes.

    Attributes:
        peer_channel: through which it came.
        place: where the first bytes are if they are in memory.
        pieces: the first bytes, as they have come; ``begun`` is how many.
    """

    __slots__ = ("begun", "frame", "key", "peer_channel", "pieces", "place")

    def __init__(
        self, peer_channel: MessageChannel, frame: Frame, place: SegmentOffset | None = None
    ) -> None:
        self.peer_channel = peer_channel
        self.frame = frame
        self.place = place
        self.pieces: list[Any] = [] if frame.payload is None else [frame.payload]
        self.begun = 0 if frame.payload is None else len(frame.payload)
        self.key: Key = (peer_channel.rank, frame.channel, frame.tag)

    @property
    def signature(self) -> bytes:
        return self.frame.signature


SENT = Pending()
SENT.finish()
