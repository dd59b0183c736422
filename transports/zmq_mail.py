"""The messages between a rank of the ``zmq`` transport and one other, on their data connection.

Small messages are sent at once, whole, and kept by the receiver until they are asked for. Of a
large one, the first bytes are, as long as not too much of that is waiting at the receiver; the
rest follows once its receive was posted, straight from the sender's array into the receiver's.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from fsdpcore.backend import Envelope
from fsdpcore.buffers import Bytes
from fsdpcore.errors import MismatchError, ProtocolError
from fsdpcore.work import Pending

from .matching import Key, MatchTable, mismatch
from .zmq_line import Line, Room
from .zmq_watch import Waiting, Watch
from .zmq_wire import Frame, Kind, pack_header

# What is sent of a large message before it is known whether anybody receives it, and how much of
# that may be on its way to one peer.
_AHEAD_BYTES = 256 * 1024
_MOST_AHEAD_BYTES = 1 << 20
# Where an eager message is listed, which has no number.
_EAGER = 0


class Sizes(NamedTuple):
    """Up to how many bytes a message is sent at once, and how long the segments of others are."""

    eager: int
    segment: int


class Engine:
    """What the connections of a rank share.

    Attributes:
        rank: of this process.
        sizes: of messages.
        lock: held by whoever touches a connection, its socket or the table.
        table: receives without a message, and messages without a receive.
        numbers: for large messages and queries.
        watch: who polls the sockets.
        disagree: called with the error of a message that does not fit its receive.
    """

    def __init__(self, rank: int, sizes: Sizes, disagree: Callable[[MismatchError], None]) -> None:
        self.rank = rank
        self.sizes = sizes
        self.disagree = disagree
        self.lock = threading.RLock()
        self.table: MatchTable[Incoming, Arrival] = MatchTable()
        self.numbers = itertools.count(1)
        self.watch: Watch


class Outgoing(Waiting):
    """A large message that this rank sends.

    Attributes:
        left: bytes at its end that are in no frame so far.
        ahead: bytes that went with the offer.
        granted: the receiver has asked for the rest.
    """

    __slots__ = ("ahead", "data", "granted", "left", "mail", "number", "on_its_way")

    def __init__(self, mail: Mail, number: int, data: Bytes, ahead: int) -> None:
        super().__init__(mail.engine.watch)
        self.mail = mail
        self.number = number
        self.data = data
        self.ahead = ahead
        self.left = data.size - ahead
        self.granted = False
        self.on_its_way = True

    def next_segment(self) -> list[Any]:
        start = self.data.size - self.left
        size = min(self.left, self.mail.engine.sizes.segment)
        self.left -= size
        self.on_its_way = True
        header = pack_header(Kind.DATA, message=self.number, size=size, offset=start)
        return [header, self.data[start : start + size]]

    def sent(self) -> None:
        self.on_its_way = False
        self.mail.finish_sent(self)

    def cancel(self) -> bool:
        return self.mail.cancel_send(self)


class Incoming(Waiting):
    """A receive: waiting for its message, or for the rest of it.

    Attributes:
        begun: bytes that have come, or are announced by the frame that comes in now.
    """

    __slots__ = ("begun", "envelope", "key", "mail", "number", "out")

    def __init__(self, mail: Mail, out: Bytes, envelope: Envelope) -> None:
        super().__init__(mail.engine.watch)
        self.mail = mail
        self.out = out
        self.envelope = envelope
        self.key: Key = (mail.rank, envelope.channel, envelope.tag)
        self.number = _EAGER
        self.begun = 0

    def filled(self) -> None:
        if self.begun == self.out.size:
            self.mail.finish_received(self)

    def settle(self, seconds: float) -> bool:
        if not self.finished:  # perhaps it is there
            with self.mail.engine.lock:
                self.mail.serve()
                self.mail.engine.watch.changed()
        return super().settle(seconds)

    def cancel(self) -> bool:
        return self.mail.cancel_receive(self)


class Arrival:
    """A message that came before its receive: a small one, or an offer with its first bytes."""

    __slots__ = ("bytes", "frame", "incoming", "key", "mail", "whole")

    def __init__(self, mail: Mail, frame: Frame) -> None:
        self.mail = mail
        self.frame = frame
        self.key: Key = (mail.rank, frame.channel, frame.tag)
        self.bytes = bytearray()
        self.whole = False
        self.incoming: Incoming | None = None

    def filled(self) -> None:
        self.whole = True
        if self.incoming is not None:
            self.mail.hand_over(self, self.incoming)


class Mail:
    """The messages from and to one other rank; called with the engine's lock held.

    Args:
        engine: of this rank.
        rank: of the other.
        sock: the connection to it.
        serve: serves ``line``; called when there may be input, or room for output.

    Attributes:
        rank: of the other.
        line: the connection to it.
        posted, arrived: how many messages were sent on it, and have come.
        asked, granted: how many of those that have come were asked for, and of those sent.
        last: how many will have come, and be granted, once the peer has said that it leaves.
    """

    def __init__(
        self, engine: Engine, rank: int, sock: socket.socket, serve: Callable[[], None]
    ) -> None:
        self.engine = engine
        self.rank = rank
        self.serve = serve
        self.line = Line(sock, engine.watch, self._begin)
        engine.watch.add(sock.fileno(), serve)
        self.posted = self.arrived = 0
        self.asked = self.granted = 0
        self.last: tuple[int, int] | None = None
        self._sending: dict[int, Outgoing] = {}
        self._receiving: dict[int, Incoming] = {}
        self._dropped: dict[int, int] = {}
        self._ahead = 0

    # Sending.

    def send(self, data: Bytes, envelope: Envelope) -> Pending:
        """Start to send a message."""
        channel, tag, signature = envelope
        self.posted += 1
        size = data.size
        if size <= self.engine.sizes.eager:
            self.line.put(pack_header(Kind.EAGER, channel, tag, 0, size, 0, signature), data)
            return SENT
        number = next(self.engine.numbers)
        ahead = min(_AHEAD_BYTES, size, _MOST_AHEAD_BYTES - self._ahead)
        self._ahead += ahead
        outgoing = self._sending[number] = Outgoing(self, number, data, ahead)
        offer = pack_header(Kind.OFFER, channel, tag, number, size, ahead, signature)
        self.line.post([offer, data[:ahead]], outgoing)
        return outgoing

    def _grant(self, number: int) -> None:
        self.granted += 1
        outgoing = self._sending.get(number)
        if outgoing is None:
            return  # cancelled here; the receiver learns of it in other ways
        if outgoing.granted:
            raise ProtocolError(f"rank {self.rank} grants message {number} a second time")
        outgoing.granted = True
        self._ahead -= outgoing.ahead
        if outgoing.left:
            self.line.add(outgoing)
        else:
            self.finish_sent(outgoing)

    def finish_sent(self, outgoing: Outgoing) -> None:
        """Finish a message if the receiver wants it and the kernel has all of it."""
        if outgoing.granted and not outgoing.left and not outgoing.on_its_way:
            del self._sending[outgoing.number]
            outgoing.finish()

    def cancel_send(self, outgoing: Outgoing) -> bool:
        """Send no more of a message; False if the receiver may wait for it."""
        with self.engine.lock:
            if self._sending.pop(outgoing.number, None) is not None:
                self.line.withdraw(outgoing)
                self._ahead -= 0 if outgoing.granted else outgoing.ahead
        return outgoing.finished

    # Receiving.

    def receive(self, incoming: Incoming) -> bool:
        """Post a receive; return whether its message has still to come."""
        arrival = self.engine.table.post(incoming)
        if arrival is None:
            return True
        if not self._fits(arrival.frame, incoming):
            return False
        if arrival.whole and arrival.frame.kind is Kind.EAGER:
            incoming.out.data[:] = arrival.bytes
            incoming.finish()
            return False
        self._accept(arrival.frame, incoming, len(arrival.bytes))
        arrival.incoming = incoming
        if arrival.whole:
            self.hand_over(arrival, incoming)
        return False

    def _begin(self, frame: Frame, inline: int) -> Room:
        """Say where the payload of a frame goes that comes in now."""
        if frame.kind is Kind.DATA:
            return self._begin_data(frame)
        if frame.kind is Kind.GRANT:
            self._grant(frame.message)
            return None, None
        self.arrived += 1
        if self.last is not None and self.arrived > self.last[0]:
            raise ProtocolError("a message after the rank has left")
        if frame.kind is Kind.OFFER:
            self._check_offer(frame)
        arrival = Arrival(self, frame)
        incoming = self.engine.table.arrive(arrival)
        if incoming is None:
            arrival.bytes = bytearray(inline)
            return arrival, memoryview(arrival.bytes)
        if not self._fits(frame, incoming):
            return None, None
        self._accept(frame, incoming, inline)
        return incoming, incoming.out.data[:inline]

    def _check_offer(self, frame: Frame) -> None:
        number = frame.message
        if number == _EAGER or number in self._receiving or number in self._dropped:
            raise ProtocolError(f"rank {self.rank} offers message {number} a second time")
        if frame.offset > frame.size:
            raise ProtocolError(f"rank {self.rank} sends more of a message than there is")

    def _begin_data(self, frame: Frame) -> Room:
        number, end = frame.message, frame.offset + frame.size
        if 0 < frame.size <= self._dropped.get(number, 0):
            self._dropped[number] -= frame.size
            return None, None
        incoming = self._receiving.get(number)
        right = incoming is not None and frame.offset == incoming.begun and frame.size
        if incoming is None or not right or end > incoming.out.size:
            raise ProtocolError(f"rank {self.rank} sent data that it was not asked for")
        incoming.begun = end
        return incoming, incoming.out.data[frame.offset : end]

    def _fits(self, frame: Frame, incoming: Incoming) -> bool:
        """Whether a message is what a receive expects; break the backend if not."""
        wanted = incoming.envelope
        if frame.signature == wanted.signature and frame.size == incoming.out.size:
            return True
        sent = Envelope(frame.channel, frame.tag, frame.signature)
        size, here = incoming.out.size, self.engine.rank
        error = mismatch(self.rank, sent, frame.size, here, wanted, size)
        assert error is not None
        incoming.finish(error)
        self.engine.disagree(error)
        return False

    def _accept(self, frame: Frame, incoming: Incoming, inline: int) -> None:
        """Have a message come into a receive that it fits, and ask for the rest of a large one."""
        incoming.number = frame.message
        incoming.begun = inline
        self._receiving[frame.message] = incoming
        if frame.kind is Kind.OFFER:
            self.asked += 1
            self.line.post([pack_header(Kind.GRANT, message=frame.message)])

    def hand_over(self, arrival: Arrival, incoming: Incoming) -> None:
        """Copy what has come of a message before its receive."""
        if self._receiving.get(incoming.number) is incoming:  # it was not given up
            incoming.out.data[: len(arrival.bytes)] = arrival.bytes
            incoming.filled()

    def finish_received(self, incoming: Incoming) -> None:
        """Finish a receive that is complete."""
        del self._receiving[incoming.number]
        incoming.finish()

    def cancel_receive(self, incoming: Incoming) -> bool:
        """Write no more into a receive's array; return whether no peer will notice."""
        with self.engine.lock:
            if self.engine.table.withdraw_receive(incoming):
                return True
            if self._receiving.get(incoming.number) is incoming:
                self._drop(incoming)
        return incoming.finished

    def _drop(self, incoming: Incoming) -> None:
        del self._receiving[incoming.number]
        self.line.divert(incoming)
        if incoming.begun < incoming.out.size:
            self._dropped[incoming.number] = incoming.out.size - incoming.begun

    # What is in flight.

    @property
    def idle(self) -> bool:
        """Whether all that was sent is wanted, and with the kernel."""
        return not self._sending and self.line.flushed

    def heard_all(self) -> bool:
        """Whether all has come that a peer which leaves had to say about messages.

        Raises:
            ProtocolError: more has come.
        """
        if self.last is None:
            return False
        if self.arrived > self.last[0]:
            raise ProtocolError("a message after the rank has left")
        return self.arrived == self.last[0] and self.granted >= self.last[1]

    def waits(self) -> list[Waiting]:
        """What is in flight, apart from receives that no message came for."""
        return [*self._sending.values(), *self._receiving.values()]

    def unwanted(self) -> bool:
        """Whether a large message has been offered that the peer has not asked for so far."""
        return any(not outgoing.granted for outgoing in self._sending.values())

    def drop_all(self) -> None:
        """Forget what is in flight; frames that have begun still go out."""
        for outgoing in self._sending.values():
            self.line.withdraw(outgoing)
        self._sending.clear()
        for incoming in list(self._receiving.values()):
            self._drop(incoming)


SENT = Pending()
SENT.finish()
