"""The messages between a rank of the ``zmq`` transport and one other, on their data connection.

Small messages are sent at once, whole, and kept by the receiver until they are asked for. Of a
large one, the first bytes are, as long as not too much of that is waiting at the receiver; the
rest follows once its receive was posted, straight from the sender's array into the receiver's.
Between ranks of one host the bytes of large messages go through memory (``memory.py``).
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from fsdpcore.comm.envelope import Envelope
from fsdpcore.comm.matching import mismatch
from fsdpcore.core.buffers import Bytes
from fsdpcore.core.errors import ProtocolError
from fsdpcore.core.work import Pending

from ..memory.shared import SharedMemory
from .frame_socket import FrameSocket, Room
from .memory import Borrowing, Lending
from .messages import (
    EAGER,
    SENT,
    ConnectionState,
    IncomingMessage,
    OutgoingMessage,
    UnexpectedMessage,
)
from .poller import AwaitedMessage
from .wire import Frame, FrameKind, pack_header, split_place

# What is sent of a large message before it is known whether anybody receives it, and how much of
# that may be on its way to one peer.
_AHEAD_BYTES = 256 * 1024
_MOST_AHEAD_BYTES = 1 << 20

_NOTES = frozenset(
    {FrameKind.GRANT, FrameKind.MEMORY, FrameKind.PIECE, FrameKind.TAKEN, FrameKind.REFUSE}
)


class PeerChannel:
    """The messages from and to one other rank; called with the lock of the connections held.

    Args:
        state: of this rank.
        rank: of the other.
        sock: the connection to it.
        serve: serves ``frame_socket``, and calls ``copy``; called when there may be input, or
            room for output.
        memory: of this rank, if the other is on the same host and shares it.

    Attributes:
        rank: of the other.
        frame_socket: the connection to it.
        posted, arrived: how many messages were sent on it, and have come.
        asked, granted: how many of those that have come were asked for, and of those sent.
        last: how many will have come, and be granted, once the peer has said that it leaves.
    """

    def __init__(
        self,
        state: ConnectionState,
        rank: int,
        sock: socket.socket,
        serve: Callable[[], None],
        memory: SharedMemory | None = None,
    ) -> None:
        self.state = state
        self.rank = rank
        self.serve = serve
        self.frame_socket = FrameSocket(sock, state.poller, self._begin)
        state.poller.add(sock.fileno(), serve)
        self.posted = self.arrived = 0
        self.asked = self.granted = 0
        self.last: tuple[int, int] | None = None
        self._sending: dict[int, OutgoingMessage] = {}
        self._receiving: dict[int, IncomingMessage] = {}
        self._dropped: dict[int, int] = {}
        self._ahead = 0
        self._lending = None if memory is None else Lending(self, memory)
        self._borrowing = Borrowing(self, memory)
        self._closed = False

    # Sending.

    def send(self, data: Bytes, envelope: Envelope) -> Pending:
        """Start to send a message."""
        channel, tag, signature = envelope
        self.posted += 1
        size = data.size
        if size <= self.state.sizes.eager:
            self.frame_socket.put(
                pack_header(FrameKind.EAGER, channel, tag, 0, size, 0, signature), data
            )
            return SENT
        number = next(self.state.numbers)
        if self._lending is not None:
            lent = self._lending.offer(data, envelope, number)
            if lent is not None:
                self._sending[number] = lent
                return lent
        ahead = min(_AHEAD_BYTES, size, _MOST_AHEAD_BYTES - self._ahead)
        self._ahead += ahead
        outgoing = self._sending[number] = OutgoingMessage(self, number, data, ahead)
        offer = pack_header(FrameKind.OFFER, channel, tag, number, size, ahead, signature)
        self.frame_socket.post([offer, data[:ahead]], outgoing)
        return outgoing

    def _grant(self, frame: Frame) -> None:
        """The receiver wants a message, through memory or, after REFUSE, over the socket."""
        number = frame.message
        self.granted += 1
        outgoing = self._sending.get(number)
        if outgoing is None:
            return  # cancelled here; the receiver learns of it in other ways
        refused = frame.kind is FrameKind.REFUSE
        if outgoing.granted or (refused and not outgoing.lent):
            raise ProtocolError(f"rank {self.rank} grants message {number} a second time")
        outgoing.granted = True
        if self._lending is not None and outgoing.lent:
            if refused:
                self._lending.refuse(outgoing)
            elif outgoing.left:
                self._lending.grant(outgoing)
            return
        self._ahead -= outgoing.ahead
        if outgoing.left:
            self.frame_socket.add(outgoing)
        else:
            self.finish_sent(outgoing)

    def _taken(self, number: int, end: int) -> None:
        """The receiver has read bytes in memory."""
        if self._lending is None:
            return
        if self._lending.taken(number, end):
            self.granted += 1
            return
        outgoing = self._sending.get(number)
        if outgoing is None or outgoing.granted:  # granted before the memory ran out
            return
        if outgoing.lent and not outgoing.left and end == outgoing.ahead:
            self.granted += 1
            outgoing.granted = True
            self.finish_sent(outgoing)

    def finish_sent(self, outgoing: OutgoingMessage) -> None:
        """Finish a message if the receiver wants it, and has or will get it without its array."""
        if outgoing.granted and not outgoing.left and not outgoing.on_its_way:
            del self._sending[outgoing.number]
            outgoing.finish()

    def cancel_send(self, outgoing: OutgoingMessage) -> bool:
        """Send no more of a message; False if the receiver may wait for it."""
        with self.state.lock:
            self._withdraw(outgoing)
        return outgoing.finished

    def _withdraw(self, outgoing: OutgoingMessage) -> None:
        if self._sending.pop(outgoing.number, None) is None:
            return
        self.frame_socket.withdraw(outgoing)
        if self._lending is not None and outgoing.lent:
            self._lending.withdraw(outgoing)
        elif not outgoing.granted:
            self._ahead -= outgoing.ahead

    def give_up(self, outgoing: OutgoingMessage, error: Exception) -> None:
        """Fail a message, of which the receiver has heard."""
        self._withdraw(outgoing)
        outgoing.finish(error)

    # Receiving.

    def receive(self, incoming: IncomingMessage) -> bool:
        """Post a receive; return whether its message has still to come."""
        arrival = self.state.table.post(incoming)
        if arrival is None:
            return True
        if not self._fits(arrival.frame, incoming):
            return False
        if arrival.whole and arrival.frame.kind is FrameKind.EAGER:
            incoming.out.data[:] = arrival.bytes
            incoming.finish()
            return False
        if arrival.place is not None:
            self._accept_lent(arrival, incoming)
            if self.copy():
                self.state.poller.again(self.serve)
            return False
        self._accept(arrival.frame, incoming, len(arrival.bytes))
        arrival.incoming = incoming
        if arrival.whole:
            self.hand_over(arrival, incoming)
        return False

    def _begin(self, frame: Frame, inline: int) -> Room:
        """Say where the payload of a frame goes that comes in now."""
        if frame.kind is FrameKind.DATA:
            return self._begin_data(frame)
        if frame.kind in _NOTES:
            self._heed(frame)
            return None, None
        self.arrived += 1
        if self.last is not None and self.arrived > self.last[0]:
            raise ProtocolError("a message after the rank has left")
        place = None
        if frame.kind is not FrameKind.EAGER:
            self._check_offer(frame)
            if frame.kind is FrameKind.LEND:
                place, signature = split_place(frame)
                frame = frame._replace(signature=signature)
        arrival = UnexpectedMessage(self, frame, place)
        incoming = self.state.table.arrive(arrival)
        if incoming is None:
            arrival.bytes = bytearray(inline)
            return arrival, memoryview(arrival.bytes)
        if not self._fits(frame, incoming):
            return None, None
        if place is not None:
            self._accept_lent(arrival, incoming)
            return None, None
        self._accept(frame, incoming, inline)
        return incoming, incoming.out.data[:inline]

    def _heed(self, frame: Frame) -> None:
        """Do what a frame says that has no bytes of messages with it."""
        if frame.kind is FrameKind.TAKEN:
            self._taken(frame.message, frame.offset)
        elif frame.kind is FrameKind.PIECE:
            self._read_piece(frame)
        elif frame.kind is FrameKind.MEMORY:
            self._borrowing.meet(frame.signature)
        else:
            self._grant(frame)

    def _check_offer(self, frame: Frame) -> None:
        number = frame.message
        if number == EAGER or number in self._receiving or number in self._dropped:
            raise ProtocolError(f"rank {self.rank} offers message {number} a second time")
        if frame.offset > frame.size:
            raise ProtocolError(f"rank {self.rank} sends more of a message than there is")

    def _begin_data(self, frame: Frame) -> Room:
        incoming = self._expected(frame)
        if incoming is None:
            return None, None
        incoming.begun = end = frame.offset + frame.size
        return incoming, incoming.out.data[frame.offset : end]

    def _read_piece(self, frame: Frame) -> None:
        place = split_place(frame)[0]
        incoming = self._expected(frame)
        if incoming is not None:
            self._borrowing.read(incoming, frame, place)
        elif not self._closed:
            self._borrowing.tell(frame.message, frame.offset + frame.size)

    def _expected(self, frame: Frame) -> IncomingMessage | None:
        """The receive for bytes of a message; None if it was given up."""
        number, end = frame.message, frame.offset + frame.size
        if 0 < frame.size <= self._dropped.get(number, 0):
            self._dropped[number] -= frame.size
            return None
        incoming = self._receiving.get(number)
        right = incoming is not None and frame.offset == incoming.begun and frame.size
        if incoming is None or not right or end > incoming.out.size:
            raise ProtocolError(f"rank {self.rank} sent data that it was not asked for")
        return incoming

    def _fits(self, frame: Frame, incoming: IncomingMessage) -> bool:
        """Whether a message is what a receive expects; break the backend if not."""
        wanted = incoming.envelope
        if frame.signature == wanted.signature and frame.size == incoming.out.size:
            return True
        sent = Envelope(frame.channel, frame.tag, frame.signature)
        size, here = incoming.out.size, self.state.rank
        error = mismatch(self.rank, sent, frame.size, here, wanted, size)
        assert error is not None
        incoming.finish(error)
        self.state.fail(error)
        return False

    def _accept(self, frame: Frame, incoming: IncomingMessage, inline: int) -> None:
        """Have a message come into a receive that it fits, and ask for the rest of a large one."""
        incoming.number = frame.message
        incoming.begun = inline
        self._receiving[frame.message] = incoming
        if frame.kind is FrameKind.OFFER:
            self.ask(FrameKind.GRANT, frame.message)

    def _accept_lent(self, arrival: UnexpectedMessage, incoming: IncomingMessage) -> None:
        """Do so with a message whose first bytes are in memory; ``copy`` is called after it."""
        assert arrival.place is not None
        incoming.number = arrival.frame.message
        self._receiving[incoming.number] = incoming
        self._borrowing.accept(incoming, arrival.frame, arrival.place)

    def ask(self, kind: FrameKind, number: int) -> None:
        """Ask for a message, or the rest of it, with GRANT or REFUSE."""
        self.asked += 1
        self.frame_socket.post([pack_header(kind, message=number)])

    def copy(self) -> bool:
        """Copy for a while what the peer lends; return whether there is more to copy."""
        return self._borrowing.copy()

    def hand_over(self, arrival: UnexpectedMessage, incoming: IncomingMessage) -> None:
        """Copy what has come of a message before its receive."""
        if self._receiving.get(incoming.number) is incoming:  # it was not given up
            incoming.out.data[: len(arrival.bytes)] = arrival.bytes
            incoming.filled()

    def finish_received(self, incoming: IncomingMessage) -> None:
        """Finish a receive that is complete."""
        del self._receiving[incoming.number]
        incoming.finish()

    def cancel_receive(self, incoming: IncomingMessage) -> bool:
        """Write no more into a receive's array; return whether no peer will notice."""
        with self.state.lock:
            if self.state.table.withdraw_receive(incoming):
                return True
            if self._receiving.get(incoming.number) is incoming:
                self._drop(incoming)
        return incoming.finished

    def _drop(self, incoming: IncomingMessage) -> None:
        del self._receiving[incoming.number]
        self.frame_socket.divert(incoming)
        if not self._borrowing.drop(incoming) and incoming.begun < incoming.out.size:
            self._dropped[incoming.number] = incoming.out.size - incoming.begun

    # What is in flight.

    @property
    def idle(self) -> bool:
        """Whether all that was sent is wanted, and with the kernel or read, or never will be."""
        read = self.frame_socket.ended or self._lending is None or self._lending.flushed
        return read and not self._sending and self.frame_socket.flushed

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

    def waits(self) -> list[AwaitedMessage]:
        """What is in flight, apart from receives that no message came for."""
        return [*self._sending.values(), *self._receiving.values()]

    def unwanted(self) -> bool:
        """Whether a large message has been offered that the peer has not asked for so far."""
        return any(not outgoing.granted for outgoing in self._sending.values())

    def drop_all(self) -> None:
        """Forget what is in flight; frames that have begun still go out."""
        self._closed = True
        for outgoing in list(self._sending.values()):
            self._withdraw(outgoing)
        self._borrowing.close()
        for incoming in list(self._receiving.values()):
            self._drop(incoming)
