"""The messages between a rank of the ``zmq`` transport and one other.

Small messages are sent at once, whole, and kept by the receiver until they are asked for. Of a
large one, the first bytes are, as long as not too much of that is waiting at the receiver; the
rest follows once its receive was posted, straight from the sender's array into the receiver's.
Between ranks of one host the bytes of large messages go through memory (``memory.py``).
"""

from __future__ import annotations

from fsdpcore.comm.envelope import Envelope
from fsdpcore.comm.matching import fit
from fsdpcore.core.buffers import Bytes
from fsdpcore.core.errors import ProtocolError
from fsdpcore.core.work import Pending

from ..memory.shared import SharedMemory
from .memory import Borrowing, Lending
from .messages import (
    EAGER,
    SENT,
    ConnectionState,
    IncomingMessage,
    OutgoingMessage,
    UnexpectedMessage,
)
from .outlet import Flow, Outlet
from .poller import AwaitedMessage
from .wire import Frame, FrameKind, pack_header, split_place

# Of the bytes that are sent before it is known whether anybody receives them, how many may be on
# their way to one peer: as many as for so many messages.
_MOST_AHEAD = 4
# How often the sender hears that bytes have come, in a window.
_CREDITS = 4


class PeerChannel:
    """The messages from and to one other rank; called with the lock of the links held.

    Args:
        state: of this rank.
        rank: of the other.
        outlet: of the frames to it.
        memory: of this rank, if the other is on the same host and shares it.

    Attributes:
        rank: of the other.
        outlet: of the frames to it.
        posted, arrived: how many messages were sent to it, and have come.
        asked: large messages of the peer that this rank has asked for.
        granted: large messages of this rank that the peer has asked for.
        last: from the peer's BYE, the final values of ``arrived`` and ``granted``.
    """

    def __init__(
        self,
        state: ConnectionState,
        rank: int,
        outlet: Outlet,
        memory: SharedMemory | None = None,
    ) -> None:
        self.state = state
        self.rank = rank
        self.outlet = outlet
        self.posted = self.arrived = 0
        self.asked = self.granted = 0
        self.last: tuple[int, int] | None = None
        self._sending: dict[int, OutgoingMessage] = {}
        self._receiving: dict[int, IncomingMessage] = {}
        # Offers whose receives were not posted so far, with what has come of them.
        self._early: dict[int, UnexpectedMessage] = {}
        self._dropped: dict[int, int] = {}
        self._ahead = 0
        # Bytes of payloads that have come, and of which the peer knows that they have.
        self._came = self._told = 0
        self._lending = None if memory is None else Lending(self, memory)
        self._borrowing = Borrowing(self, memory)
        self._closed = False

    # Sending.

    def send(self, data: Bytes, envelope: Envelope) -> Pending:
        """Start to send a message."""
        channel, tag, signature = envelope
        self.posted += 1
        size = data.size
        if size <= self.state.eager:
            self.outlet.put(pack_header(FrameKind.EAGER, channel, tag, 0, size, 0, signature), data)
            return SENT
        number = next(self.state.numbers)
        if self._lending is not None:
            lent = self._lending.offer(data, envelope, number)
            if lent is not None:
                self._sending[number] = lent
                return lent
        flow = self.outlet.flow
        ahead = min(flow.ahead, size, max(_MOST_AHEAD * flow.ahead - self._ahead, 0))
        self._ahead += ahead
        outgoing = self._sending[number] = OutgoingMessage(self, number, data, ahead)
        first = min(ahead, flow.segment)
        outgoing.remaining = size - first
        offer = pack_header(FrameKind.OFFER, channel, tag, number, size, first, signature)
        self.outlet.post(offer, data[:first], outgoing)
        if outgoing.ready:
            self.outlet.add(outgoing)
        return outgoing

    def _grant(self, frame: Frame) -> None:
        """The receiver wants a message, through memory or, after REFUSE, over the link."""
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
            elif outgoing.remaining:
                self._lending.grant(outgoing)
            return
        self._ahead -= outgoing.ahead
        if outgoing.ready:
            self.outlet.add(outgoing)
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
        if outgoing.lent and not outgoing.remaining and end == outgoing.ahead:
            self.granted += 1
            outgoing.granted = True
            self.finish_sent(outgoing)

    def finish_sent(self, outgoing: OutgoingMessage) -> None:
        """Finish a message if it gets to the receiver without its array from now on."""
        if outgoing.remaining or outgoing.on_their_way:
            return
        if outgoing.granted:
            del self._sending[outgoing.number]
        outgoing.finish()

    def cancel_send(self, outgoing: OutgoingMessage) -> bool:
        """Send no more of a message; False if the receiver may wait for it."""
        with self.state.lock:
            self._withdraw(outgoing)
        return outgoing.finished

    def _withdraw(self, outgoing: OutgoingMessage) -> None:
        if outgoing.number not in self._sending:
            return
        self.outlet.withdraw(outgoing)
        if self._lending is not None and outgoing.lent:
            self._lending.withdraw(outgoing)
        elif not outgoing.granted:
            self._ahead -= outgoing.ahead
        del self._sending[outgoing.number]  # last: if Ctrl-C comes first, it is withdrawn again

    def give_up(self, outgoing: OutgoingMessage, error: Exception) -> None:
        """Fail a message, of which the receiver has heard."""
        self._withdraw(outgoing)
        outgoing.finish(error)

    # Receiving.

    def match(self, arrival: UnexpectedMessage, incoming: IncomingMessage) -> None:
        """Bring a message that came through it and its receive together, if they fit."""
        if self._fits(arrival.frame, incoming):
            self._match(arrival, incoming)

    def send_to_self(self, data: Bytes, envelope: Envelope) -> None:
        """Keep a copy of a message until it is received, however large it is."""
        channel, tag, signature = envelope
        payload = data.tobytes()
        self._arrive(Frame(FrameKind.EAGER, channel, tag, 0, data.size, 0, signature, payload))

    def _match(self, arrival: UnexpectedMessage, incoming: IncomingMessage) -> None:
        """Bring a message and the receive that it fits together."""
        number = arrival.frame.message
        if arrival.place is None:
            for piece in arrival.pieces:
                end = incoming.begun + len(piece)
                incoming.out.data[incoming.begun : end] = piece
                incoming.begun = end
        if arrival.frame.kind is FrameKind.EAGER:
            incoming.finish()
            return
        incoming.peer_channel = self
        incoming.number = number
        self._receiving[number] = incoming
        if arrival.place is not None:
            self._borrowing.accept(incoming, arrival.frame, arrival.place)
            self.copy_on()
            return
        self._early.pop(number, None)
        self.ask(FrameKind.GRANT, number)
        incoming.filled()

    def take(self, frame: Frame) -> None:
        """Handle a frame that is about messages.

        Raises:
            ProtocolError: it makes no sense.
        """
        if frame.payload is not None:
            size = len(frame.payload)
            self._came += size
            # The memory of a large payload is the sender's until it hears that this rank has it.
            unheard = self._came - self._told
            if size >= self.outlet.flow.uncopied or unheard >= self.outlet.flow.window // _CREDITS:
                self._credit()
        if frame.kind is FrameKind.DATA:
            self._take_data(frame)
        elif frame.kind in (FrameKind.EAGER, FrameKind.OFFER, FrameKind.LEND):
            self._arrive(frame)
        else:
            self._heed(frame)

    def _credit(self) -> None:
        self._told = self._came
        self.outlet.say(pack_header(FrameKind.CREDIT, size=self._came))

    def use(self, flow: Flow) -> None:
        """Have bytes go both ways by another flow, as the peer does, too."""
        self.outlet.flow = flow
        # The peer's window may be smaller than what it would wait for by the old one.
        self._credit()

    def _arrive(self, frame: Frame) -> None:
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
        if incoming is not None:
            self.match(arrival, incoming)
        elif frame.kind is FrameKind.OFFER:
            self._early[frame.message] = arrival

    def _heed(self, frame: Frame) -> None:
        """Do what a frame says that has no bytes of messages with it."""
        if frame.kind is FrameKind.CREDIT:
            self.outlet.credited(frame.size)
        elif frame.kind is FrameKind.TAKEN:
            self._taken(frame.message, frame.offset)
        elif frame.kind is FrameKind.PIECE:
            self._read_piece(frame)
        elif frame.kind is FrameKind.MEMORY:
            self._borrowing.admit(frame.signature)
        else:
            self._grant(frame)

    def _check_offer(self, frame: Frame) -> None:
        number = frame.message
        known = number in self._receiving or number in self._dropped or number in self._early
        if number == EAGER or known:
            raise ProtocolError(f"rank {self.rank} offers message {number} a second time")
        if frame.offset > frame.size:
            raise ProtocolError(f"rank {self.rank} sends more of a message than there is")

    def _take_data(self, frame: Frame) -> None:
        early = self._early.get(frame.message)
        if early is not None:
            if frame.offset != early.begun or early.begun + frame.size > early.frame.size:
                raise ProtocolError(f"rank {self.rank} sent data that is not what it has offered")
            early.pieces.append(frame.payload)
            early.begun += frame.size
            return
        incoming = self._expected(frame)
        if incoming is not None:
            incoming.begun = end = frame.offset + frame.size
            incoming.out.data[frame.offset : end] = frame.payload
            incoming.filled()

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
        error = fit(incoming, self.rank, sent, frame.size, self.state.rank)
        if error is None:
            return True
        incoming.finish(error)
        self.state.fail(error)
        return False

    def ask(self, kind: FrameKind, number: int) -> None:
        """Ask for a message, or the rest of it, with GRANT or REFUSE."""
        self.asked += 1
        self.outlet.say(pack_header(kind, message=number))

    def copy(self) -> bool:
        """Copy for a while what the peer lends; return whether there is more to copy."""
        return self._borrowing.copy()

    def copy_on(self) -> None:
        """Copy on what the peer lends, and give others their turn in between."""
        if self.copy():
            self.state.poller.again(self.copy_on)

    def finish_received(self, incoming: IncomingMessage) -> None:
        """Finish a receive that is complete."""
        self._forget(incoming)
        incoming.finish()

    def drop_receive(self, incoming: IncomingMessage) -> None:
        """Write no more into the array of a receive that has met its message."""
        if self._receiving.get(incoming.number) is incoming:
            self._drop(incoming)

    def _forget(self, incoming: IncomingMessage) -> None:
        del self._receiving[incoming.number]
        if self.last is not None:
            self.state.poller.remind()  # a peer that leaves may wait for the answer

    def _drop(self, incoming: IncomingMessage) -> None:
        self._forget(incoming)
        if not self._borrowing.drop(incoming) and incoming.begun < incoming.out.size:
            self._dropped[incoming.number] = incoming.out.size - incoming.begun

    # What is in flight.

    @property
    def idle(self) -> bool:
        """Whether nothing to this peer is left to do.

        Every message was asked for and handed to the link, or the link has broken.
        """
        read = self.outlet.ended or self._lending is None or self._lending.flushed
        return read and not self._sending and self.outlet.flushed

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

    @property
    def incomplete(self) -> bool:
        """Whether more is to come of messages that were asked for."""
        return bool(self._receiving)

    def waits(self) -> list[AwaitedMessage]:
        """What is in flight, apart from receives that no message came for."""
        return [*self._sending.values(), *self._receiving.values()]

    def unwanted(self) -> bool:
        """Whether a large message has been offered that the peer has not asked for so far."""
        return any(not outgoing.granted for outgoing in self._sending.values())

    def drop_all(self) -> None:
        """Forget what is in flight; frames that the link has still go out."""
        self._closed = True
        self._early.clear()
        for outgoing in list(self._sending.values()):
            self._withdraw(outgoing)
        self._borrowing.close()
        for incoming in list(self._receiving.values()):
            self._drop(incoming)
