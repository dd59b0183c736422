"""Large messages between two ranks of one host, by way of memory that both can see.

An array that lies in shared memory already, like those of ``Backend.empty``, is lent: the receiver
copies it from there. Of any other the sender copies pieces into blocks of its shared memory, the
receiver copies them out, and both do so at the same time. The frames that tell of it go over the
link (``wire.py`` lists them), so whoever looks after that moves the bytes, too, and nobody waits
for anybody. A block is in use until the receiver has said that it has read it.

Whether a receiver can reach the sender's memory shows when it first has to. If it cannot, it says
so, and all comes over the link.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Protocol

import numpy as np

from fsdpcore.comm.envelope import Envelope
from fsdpcore.comm.sharing import cannot_share
from fsdpcore.core.buffers import Bytes
from fsdpcore.core.errors import CommunicationError, ProtocolError, in_words

from ..memory.peer import MemoryPeer
from ..memory.shared import SharedMemory
from .messages import IncomingMessage, MessageChannel, OutgoingMessage
from .outlet import Outlet
from .wire import Frame, FrameKind, SegmentOffset, pack_header, pack_place

_LOG = logging.getLogger("fsdpcore")

# Up to here, all of a message goes with its offer: where one rank waits for the other, TCP's copies
# are done while that wakes up. (Of many messages at once, memory has twice as many from 64 KiB on.)
_LEAST_BYTES = 256 * 1024
# What is copied at once, and how many pieces are on their way to one peer. In smaller ones the
# frames cost as much as the copies; the cache that the cores share holds a few of these.
_PIECE_BYTES, _PIECES = 2 << 20, 2
# What is copied of messages to one peer before it is known whether anybody receives them.
_AHEAD_BYTES = 2 << 20
# What is copied of lent arrays before other threads of this rank get their turn.
_COPY_BYTES = 16 << 20


class MemoryChannel(MessageChannel, Protocol):
    """What the bytes in memory use of the ``PeerChannel`` whose messages they are."""

    outlet: Outlet
    asked: int

    def give_up(self, outgoing: OutgoingMessage, error: Exception) -> None:
        """Fail a message, of which the receiver has heard."""

    def ask(self, kind: FrameKind, number: int) -> None:
        """Ask for a message, or the rest of it, with GRANT or REFUSE."""


class Lending:
    """The messages to one peer; called with the lock of the links held.

    Args:
        peer_channel: the messages from and to that peer.
        memory: of this rank.
    """

    def __init__(self, peer_channel: MemoryChannel, memory: SharedMemory) -> None:
        self._peer_channel = peer_channel
        self._memory = memory
        self._introduced = False
        self._refused = False
        # Blocks that the peer may still read. ``_first``: copies of messages' first bytes, by
        # message number. ``_pieces``: (message number, end, block), in the order in which the peer
        # reads them.
        self._first: dict[int, Bytes] = {}
        self._ahead = 0
        self._pieces: deque[tuple[int, int, Bytes]] = deque()
        self._granted: deque[OutgoingMessage] = deque()
        self._withdrawn: set[int] = set()

    @property
    def flushed(self) -> bool:
        """Whether the peer has read all pieces."""
        return not self._pieces

    def offer(self, data: Bytes, envelope: Envelope, number: int) -> OutgoingMessage | None:
        """Start to send a message; None if it has to go over the link.

        Raises:
            ConfigError: this rank can have no shared memory, and was told that it has to.
        """
        if data.size <= _LEAST_BYTES or self._refused or not self._introduce():
            return None
        place, ahead = self._memory.own(data), data.size
        if place is None:
            ahead = min(ahead, _AHEAD_BYTES - self._ahead)
            found = self._copied(data[:ahead])
            if found is None:
                return None
            self._first[number], place = found
            self._ahead += ahead
        channel, tag, signature = envelope
        where = pack_place(place) + signature
        header = pack_header(FrameKind.LEND, channel, tag, number, data.size, ahead, where)
        self._peer_channel.outlet.put(header)
        return OutgoingMessage(self._peer_channel, number, data, ahead, lent=True)

    def _introduce(self) -> bool:
        if not self._introduced:
            try:
                introduction = self._memory.introduce()
            except OSError as error:
                if self._memory.required:
                    raise cannot_share([self._peer_channel.state.rank], str(error)) from error
                return False
            self._peer_channel.outlet.say(pack_header(FrameKind.MEMORY, signature=introduction))
            self._introduced = True
        return True

    def _copied(self, data: Bytes) -> tuple[Bytes, SegmentOffset] | None:
        block = self._memory.empty(data.size)
        place = None if block is None else self._memory.own(block)
        if block is None or place is None:
            return None
        np.copyto(block, data)
        return block, place

    def grant(self, outgoing: OutgoingMessage) -> None:
        """Send the rest of a message that the peer wants."""
        self._granted.append(outgoing)
        self._go_on()

    def _go_on(self) -> None:
        """Put pieces into memory, as many as may be there."""
        peer_channel = self._peer_channel
        while self._granted and len(self._pieces) < _PIECES:
            outgoing = self._granted[0]
            number, start = outgoing.number, outgoing.data.size - outgoing.remaining
            end = start + min(outgoing.remaining, _PIECE_BYTES)
            found = self._copied(outgoing.data[start:end])
            if found is None:  # there is no more memory
                self._granted.popleft()
                peer_channel.outlet.add(outgoing)
                continue
            block, place = found
            self._pieces.append((number, end, block))
            outgoing.remaining -= end - start
            header = pack_header(
                FrameKind.PIECE,
                message=number,
                size=end - start,
                offset=start,
                signature=pack_place(place),
            )
            peer_channel.outlet.say(header)
            if not outgoing.remaining:
                self._granted.popleft()
                peer_channel.finish_sent(outgoing)

    def taken(self, number: int, end: int) -> bool:
        """Note that the peer has read bytes; return whether they were of a withdrawn message."""
        first = self._first.get(number)
        if first is not None and first.size == end:
            self._forget_first(number)
        elif self._pieces and self._pieces[0][:2] == (number, end):
            self._pieces.popleft()
            self._go_on()
        if number in self._withdrawn:
            self._withdrawn.remove(number)
            return True
        return False

    def _forget_first(self, number: int) -> None:
        block = self._first.pop(number, None)
        if block is not None:
            self._ahead -= block.size

    def refuse(self, outgoing: OutgoingMessage) -> None:
        """Send a message over the link, and all others: the peer reads no memory."""
        self._forget_first(outgoing.number)
        self._refused = True
        peer_channel = self._peer_channel
        if self._memory.required:
            error = cannot_share([peer_channel.rank], "")
            peer_channel.give_up(outgoing, error)
            peer_channel.state.fail(CommunicationError(in_words(error)))
            return
        outgoing.lent = False
        outgoing.ahead, outgoing.remaining = 0, outgoing.data.size
        peer_channel.outlet.add(outgoing)

    def withdraw(self, outgoing: OutgoingMessage) -> None:
        """Let nobody use what was lent of a message, and lend no more of it.

        The peer may be reading it, and cannot be stopped without waiting for it. But it asks once
        more before it takes what it has read for the message, and then sees that it was revoked.
        """
        self._memory.revoke(outgoing.number)
        self._forget_first(outgoing.number)
        if outgoing in self._granted:
            self._granted.remove(outgoing)
        elif outgoing.ahead == outgoing.data.size:
            self._withdrawn.add(outgoing.number)


class Borrowing:
    """The messages from one peer; called with the lock of the links held.

    Args:
        peer_channel: the messages from and to that peer.
        memory: of this rank; None if it does not share any with the peer.
    """

    def __init__(self, peer_channel: MemoryChannel, memory: SharedMemory | None) -> None:
        self._peer_channel = peer_channel
        self._memory = memory
        self._memory_peer: MemoryPeer | None = None
        # Why there is none; and whether the peer has said where it is.
        self._why = "it is off" if memory is None else ""
        self._introduced = False
        # Lent arrays, and the receives into which they are copied.
        self._copies: deque[tuple[IncomingMessage, Bytes]] = deque()

    def admit(self, introduction: bytes) -> None:
        """Get to know the peer's memory.

        Raises:
            ProtocolError: it was known already, or this is no introduction.
        """
        if self._introduced:
            raise ProtocolError(
                f"rank {self._peer_channel.rank} introduces its memory a second time"
            )
        self._introduced = True
        if self._memory is None or self._why:
            return
        try:
            self._memory_peer = self._memory.memory_peer(introduction)
        except (OSError, MemoryError) as error:
            self._why = str(error) or repr(error)

    def accept(self, incoming: IncomingMessage, frame: Frame, place: SegmentOffset) -> None:
        """Have a message come into a receive that it fits; ``copy`` is to be called after it.

        Raises:
            ProtocolError: it is not in the peer's memory.
        """
        peer_channel, number, ahead = self._peer_channel, frame.message, frame.offset
        source, why = None, self._why
        if self._memory_peer is not None:
            try:
                source = self._memory_peer.bytes(*place, ahead)
            except (OSError, MemoryError) as error:
                why = str(error) or repr(error)
        elif not self._introduced:
            raise ProtocolError(f"rank {peer_channel.rank} lends memory that it has not introduced")
        if source is None:
            self._refuse(incoming, why)
        elif ahead == frame.size:
            self._copies.append((incoming, source))
        else:
            peer_channel.ask(FrameKind.GRANT, number)  # first, so that the peer copies meanwhile
            self._read(incoming, source, ahead)

    def _refuse(self, incoming: IncomingMessage, why: str) -> None:
        peer_channel, memory = self._peer_channel, self._memory
        state = peer_channel.state
        if memory is not None and memory.required:
            error = cannot_share([state.rank], why)
            incoming.finish(error)
            state.fail(CommunicationError(in_words(error)))
            return
        if memory is not None and not state.warned:
            state.warned = True
            text = "rank %d reaches no memory of rank %d, whose messages come over TCP: %s"
            _LOG.warning(text, state.rank, peer_channel.rank, why)
        peer_channel.ask(FrameKind.REFUSE, incoming.number)

    def read(self, incoming: IncomingMessage, frame: Frame, place: SegmentOffset) -> None:
        """Copy a piece of a message.

        Raises:
            ProtocolError: it is not in the peer's memory.
        """
        peer_channel = self._peer_channel
        if self._memory_peer is None:
            raise ProtocolError(f"rank {peer_channel.rank} sent a piece that it was not asked for")
        try:
            source = self._memory_peer.bytes(*place, frame.size)
        except ProcessLookupError:
            return  # as its connections will tell
        except (OSError, MemoryError) as error:
            text = (
                f"rank {peer_channel.state.rank} cannot map the memory of rank {peer_channel.rank}"
            )
            peer_channel.state.fail(CommunicationError(f"{text}: {error}"))
            return
        self._read(incoming, source, frame.offset + frame.size)

    def _read(self, incoming: IncomingMessage, source: Bytes, end: int) -> None:
        np.copyto(incoming.out[incoming.begun : end], source)
        incoming.begun = end
        self.tell(incoming.number, end)
        incoming.filled()

    def tell(self, number: int, end: int) -> None:
        """Say that nothing is read any more of a message's first bytes."""
        self._peer_channel.outlet.say(pack_header(FrameKind.TAKEN, message=number, offset=end))

    def copy(self) -> bool:
        """Copy lent arrays for a while; return whether there is more to copy."""
        budget = _COPY_BYTES
        while self._copies and budget > 0:
            incoming, source = self._copies[0]
            start, end = incoming.begun, min(incoming.begun + budget, source.size)
            np.copyto(incoming.out[start:end], source[start:end])
            incoming.begun = end
            budget -= end - start
            if end == source.size:
                self._copies.popleft()
                self._end(incoming)
        return bool(self._copies)

    def _end(self, incoming: IncomingMessage) -> None:
        assert self._memory_peer is not None
        if self._memory_peer.revoked(incoming.number):
            return  # the receive waits on, as for any message that is given up half sent
        self._peer_channel.asked += 1
        self.tell(incoming.number, incoming.begun)
        incoming.filled()

    def drop(self, incoming: IncomingMessage) -> bool:
        """Copy no more into a receive; return whether a lent array was being copied."""
        for item in self._copies:
            if item[0] is incoming:
                self._copies.remove(item)
                self._peer_channel.asked += 1
                self.tell(incoming.number, incoming.out.size)
                return True
        return False

    def close(self) -> None:
        """Read nothing any more."""
        self._copies.clear()
        self._memory_peer = None
        self._why = self._why or "the backend is broken or closed"
