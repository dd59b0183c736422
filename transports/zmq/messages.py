"""The messages of a rank of the ``zmq`` transport while they are on their way."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

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


class MessageSizes(NamedTuple):
    """Up to how many bytes a message is sent at once, and how long the segments of others are."""

    eager: int
    segment: int


class ConnectionState:
    """What the connections of a rank share.

    Attributes:
        rank: of this process.
        sizes: of messages.
        memory: that this rank shares with others on its host.
        lock: held by whoever touches a connection, its socket or the table.
        table: receives without a message, and messages without a receive.
        numbers: for large messages and queries.
        poller: who polls the sockets.
        fail: called with an error that concerns all ranks.
        warned: that memory is out of reach was logged.
    """

    def __init__(
        self,
        rank: int,
        sizes: MessageSizes,
        memory: SharedMemory,
        fail: Callable[[CommunicationError], None],
    ) -> None:
        self.rank = rank
        self.sizes = sizes
        self.memory = memory
        self.fail = fail
        self.warned = False
        self.lock = threading.RLock()
        self.table: MatchTable[IncomingMessage, UnexpectedMessage] = MatchTable()
        self.numbers = itertools.count(1)
        self.poller: Poller


class MessageChannel(Protocol):
    """What a message uses of the ``PeerChannel`` that it goes through."""

    state: ConnectionState
    rank: int

    def serve(self) -> None:
        """Do what can be done on the connection."""

    def finish_sent(self, outgoing: OutgoingMessage) -> None:
        """All of a message was sent."""

    def cancel_send(self, outgoing: OutgoingMessage) -> bool:
        """Give a message up; see ``Pending.cancel``."""

    def finish_received(self, incoming: IncomingMessage) -> None:
        """All of a message has come."""

    def cancel_receive(self, incoming: IncomingMessage) -> bool:
        """Give a receive up; see ``Pending.cancel``."""

    def hand_over(self, arrival: UnexpectedMessage, incoming: IncomingMessage) -> None:
        """Give a message that came before its receive to that."""


class OutgoingMessage(AwaitedMessage):
    """A large message that this rank sends.

    Attributes:
        left: bytes at its end that are in no frame so far.
        ahead: bytes that were there when it was offered.
        granted: the receiver has asked for the rest.
        lent: it goes through memory.
        on_its_way: a frame with its bytes is being sent.
    """

    __slots__ = ("ahead", "data", "granted", "left", "lent", "number", "on_its_way", "peer_channel")

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
        self.left = data.size - ahead
        self.granted = False
        self.lent = lent
        self.on_its_way = not lent

    def next_segment(self) -> list[Any]:
        start = self.data.size - self.left
        size = min(self.left, self.peer_channel.state.sizes.segment)
        self.left -= size
        self.on_its_way = True
        header = pack_header(FrameKind.DATA, message=self.number, size=size, offset=start)
        return [header, self.data[start : start + size]]

    def sent(self) -> None:
        self.on_its_way = False
        self.peer_channel.finish_sent(self)

    def cancel(self) -> bool:
        return self.peer_channel.cancel_send(self)


class IncomingMessage(AwaitedMessage):
    """A receive: waiting for its message, or for the rest of it.

    Attributes:
        begun: bytes that have come, or are announced by the frame that comes in now.
    """

    __slots__ = ("begun", "envelope", "key", "number", "out", "peer_channel")

    def __init__(self, peer_channel: MessageChannel, out: Bytes, envelope: Envelope) -> None:
        super().__init__(peer_channel.state.poller)
        self.peer_channel = peer_channel
        self.out = out
        self.envelope = envelope
        self.key: Key = (peer_channel.rank, envelope.channel, envelope.tag)
        self.number = EAGER
        self.begun = 0

    def filled(self) -> None:
        if self.begun == self.out.size:
            self.peer_channel.finish_received(self)

    def settle(self, seconds: float) -> bool:
        if not self.finished:  # perhaps it is there
            with self.peer_channel.state.lock:
                self.peer_channel.serve()
                self.peer_channel.state.poller.changed()
        return super().settle(seconds)

    def cancel(self) -> bool:
        return self.peer_channel.cancel_receive(self)


class UnexpectedMessage:
    """A message that came before its receive: a small one, or an offer with its first bytes.

    Attributes:
        place: where the first bytes are if they are in memory.
        whole: all of ``bytes`` has come.
        incoming: its receive, if that was posted meanwhile.
    """

    __slots__ = ("bytes", "frame", "incoming", "key", "peer_channel", "place", "whole")

    def __init__(
        self, peer_channel: MessageChannel, frame: Frame, place: SegmentOffset | None = None
    ) -> None:
        self.peer_channel = peer_channel
        self.frame = frame
        self.place = place
        self.key: Key = (peer_channel.rank, frame.channel, frame.tag)
        self.bytes = bytearray()
        self.whole = False
        self.incoming: IncomingMessage | None = None

    def filled(self) -> None:
        self.whole = True
        if self.incoming is not None:
            self.peer_channel.hand_over(self, self.incoming)


SENT = Pending()
SENT.finish()
