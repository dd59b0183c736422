"""What the ranks of the ``zmq`` transport tell each other, and who of them is there.

Frames are read here, and handed on: those of messages to the ``PeerChannel`` of their rank, and
what ranks report of each other to ``Watch``. The rest is handled here: that a rank fails or leaves,
and what it is doing. A failure spreads from neighbour to neighbour (``watch.py``), so that ranks
without a link between them hear of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fsdpcore.comm.notices import failure_as_json, failure_from_json, pack_json, unpack_json
from fsdpcore.comm.status_query import StatusQuery
from fsdpcore.comm.transport import Transport
from fsdpcore.core.errors import (
    CommunicationError,
    ConfigError,
    ProtocolError,
    in_words,
)
from fsdpcore.diagnostics.status import Status

from .links import Links
from .messages import ConnectionState
from .peer import Peer
from .watch import Watch
from .wire import MESSAGES, Frame, FrameKind, pack_header, unpack

_MAX_TEXT = 64 * 1024
# Frames that are read before other threads of this rank get their turn.
_FRAMES_AT_ONCE = 32


def _heard_by_nobody(rank: int, content: Mapping[str, Any]) -> None:
    raise ProtocolError("a NOTE frame, which this transport does not send")


class Control:
    """What one rank says to the others and hears of them.

    Attributes:
        peers: the other ranks that this one has sent anything, or heard anything of.
        leaving: this rank has said BYE.
        released: its links are not used any more.
        heard: takes what a rank says by ``say``; must not wait.

    Called with the lock of the links held.
    """

    def __init__(
        self,
        backend: Transport,
        state: ConnectionState,
        make_peer: Callable[[int], Peer],
    ) -> None:
        self.peers: dict[int, Peer] = {}
        self.leaving = False
        self.released = False
        self.heard: Callable[[int, Mapping[str, Any]], None] = _heard_by_nobody
        self.links: Links
        self.watch: Watch
        self._backend = backend
        self._state = state
        self._make_peer = make_peer
        self._queries: dict[int, StatusQuery] = {}
        self._why: Mapping[str, Any] | None = None  # what was heard, if that has broken this rank
        state.serve = self.serve

    def peer(self, rank: int) -> Peer:
        """Another rank; known from now on."""
        found = self.peers.get(rank)
        if found is None:
            found = self.peers[rank] = self._make_peer(rank)
        return found

    # What comes.

    def serve(self) -> None:
        """Handle the frames that have come, up to a few; the poller is told of the others."""
        # A rank that is alone has no links, and waits only for what it sends to itself.
        if self._backend.world_size > 1 and not self.released and not self._read():
            self._state.poller.again(self.serve)

    def tick(self) -> float | None:
        """Do what is due; return after how many seconds to be called again, if ever."""
        if self.released:
            return None
        if not self._read():
            return 0.0
        for peer in list(self.peers.values()):
            if peer.link_broken and not peer.closed_or_failed and peer.rank in self.watch.leavers:
                self._note_gone(peer)
            elif not peer.answered:
                self._note_progress(peer)
        # Who is broken or closed needs to know of no other rank's end.
        return self.watch.tick() if self._backend.failure is None else None

    def _read(self) -> bool:
        """Handle frames; return whether none are left."""
        for _ in range(_FRAMES_AT_ONCE):
            rank = None
            try:
                received = self.links.receive()
                if received is None:
                    return True
                rank = received.rank
                self._handle(self.peer(rank), unpack(received.header, received.payload))
                self._state.poller.changed()
            except BaseException as error:
                self._went_wrong(rank, error)
        return False

    def look(self) -> None:
        """Look for links that have broken."""
        if not self.released:
            self.links.look()

    def _went_wrong(self, rank: int | None, error: BaseException) -> None:
        if not isinstance(error, ProtocolError):
            self.interrupted(error)
            raise error
        where = "" if rank is None else f"from the connection to rank {rank}: "
        self.fail(ProtocolError(f"{where}{error}"))

    def interrupted(self, error: BaseException) -> None:
        """Break the backend when Ctrl-C, or a bug, has left a message half handled."""
        if not isinstance(error, CommunicationError):
            why = in_words(error)
            if not isinstance(error, ConfigError):
                why = f"rank {self._backend.rank} was interrupted: {why}"
            self.fail(CommunicationError(why))

    def _handle(self, peer: Peer, frame: Frame) -> None:
        kind = frame.kind
        if kind in MESSAGES:
            peer.channel.take(frame)
            if peer.channel.last is not None:
                self._note_progress(peer)
        elif kind is FrameKind.QUERY:
            answer = self._backend.recorder.status(frame.channel, frame.size).as_json()
            self._say(peer, FrameKind.STATUS, answer, message=frame.message)
        elif kind is FrameKind.STATUS:
            self._note_status(peer, frame)
        elif kind is FrameKind.FAIL:
            self._say(peer, FrameKind.SEEN)
            self._note_failure(peer, unpack_json(frame))
        elif kind is FrameKind.BYE:
            peer.channel.last = (frame.size, frame.offset)
            self._note_progress(peer)
        elif kind is FrameKind.SEEN:
            peer.has_seen = True
        elif kind is FrameKind.REPORT:
            self.watch.heard(peer.rank, unpack_json(frame))
        else:
            self.heard(peer.rank, unpack_json(frame))

    # Failure and leaving.

    def _note_failure(self, peer: Peer, content: Mapping[str, Any]) -> None:
        """Take a rank's word that the job has failed, and pass it on."""
        error = failure_from_json(content, self._backend.world_size)
        peer.closed_or_failed = True
        origin = content.get("from")
        rank = peer.rank
        if type(origin) is int and 0 <= origin < self._backend.world_size:
            rank = origin
        first = self._backend.failure is None
        self._backend.peer_reported(rank, error)
        if first:
            self._why = {**content, "from": rank}
            self.watch.close_gaps()
            for neighbour in self.watch.neighbours:
                self._say_failed(self.peer(neighbour), self._why)

    def _note_progress(self, peer: Peer) -> None:
        """Look whether the last message of a peer that leaves has come."""
        if peer.channel.heard_all() and not peer.closed_or_failed:
            self._note_leaving(peer)
        heard = peer.channel.heard_all() and not peer.channel.incomplete
        if peer.closed_or_failed and not peer.answered and heard:
            peer.answered = True
            self._say(peer, FrameKind.SEEN)

    def _note_leaving(self, peer: Peer) -> None:
        """A peer posts no more messages; break the backend if any is needed from it."""
        peer.closed_or_failed = True
        table = self._state.table
        if peer.channel.unwanted() or table.awaits(peer.rank):
            self.miss(peer)
        elif (error := self._backend.lonely(table.open_channels())) is not None:
            self.fail(error)

    def open(self, rank: int) -> None:
        """Make sure that there is a link to a rank, and notice when it breaks."""
        peer = self.peer(rank)
        if self.links.open(rank):
            # The other rank only knows whose connection it is once a frame has come on it.
            self._say(peer, FrameKind.CREDIT)

    def has_left(self, rank: int) -> bool:
        """Whether a rank has left or failed, as it said itself."""
        return rank in self.watch.leavers or self.peer(rank).closed_or_failed

    def miss_if_incomplete(self, rank: int) -> None:
        """Break the backend if a rank has left of which part of a message is missing.

        Called once a link from or to it has broken, and all that had come was read.
        """
        peer = self.peer(rank)
        # It may have said so to others only, where nothing comes from it any more.
        if self.has_left(rank) and peer.channel.waits():
            self.miss(peer)

    def fail(self, error: CommunicationError) -> None:
        """Break the backend, and tell the others."""
        self._backend.fail(error, tell=True)

    def lost(self, rank: int, to: bool) -> None:
        """Note that the link from a rank, or ``to`` it, has broken."""
        if self.released:
            return
        peer = self.peer(rank)
        if to and not peer.link_broken:
            peer.link_broken = True
            peer.channel.outlet.end()
        self.watch.lost(rank)
        self._state.poller.remind()

    def note_left(self, rank: int) -> None:
        """Note that a rank has told all others that it leaves."""
        self._state.poller.remind()
        if self._state.table.awaits(rank):
            self.await_from(rank)
        for channel in self._state.table.open_channels():
            self.await_from_any(channel)

    def await_from(self, rank: int) -> None:
        """A receive waits for a rank. If that has left, open a link to it.

        Either its last messages come, or the link is refused, and then nothing will.
        """
        if rank != self._backend.rank and rank in self.watch.leavers:
            self.open(rank)

    def await_from_any(self, channel: int) -> None:
        """A message is awaited from any rank of a group: do so for each of them."""
        group = self._backend.recorder.group(channel)
        for rank in group.ranks if group else ():
            self.await_from(rank)

    def _note_gone(self, peer: Peer) -> None:
        """A rank that leaves has gone: all that it had to say has come."""
        if peer.channel.last is None:
            peer.channel.last = (peer.channel.arrived, peer.channel.granted)
        self._note_leaving(peer)

    def miss(self, peer: Peer) -> None:
        """Break the backend because something was needed of a rank that has left."""
        self.fail(self._backend.missed(peer.rank))

    # What this rank says.

    def say_bye(self) -> None:
        """Tell each peer that no more comes than what is on its way."""
        self.leaving = True
        self.watch.leave(self._backend.recorder.returned)
        for peer in list(self.peers.values()):
            if not peer.link_broken:
                peer.told, peer.has_seen = True, False
                header = pack_header(
                    FrameKind.BYE, size=peer.channel.posted, offset=peer.channel.asked
                )
                peer.channel.outlet.say(header)

    def say_failed(self, error: CommunicationError) -> None:
        """Tell all peers by what this rank is broken: if by what it has heard, in those words."""
        own = failure_as_json(error, _MAX_TEXT) | {"from": self._backend.rank}
        content = self._why or own
        if self.peers:
            self.watch.close_gaps()
        for peer in list(self.peers.values()):
            self._say_failed(peer, content)

    def _say_failed(self, peer: Peer, content: Mapping[str, Any]) -> None:
        if not peer.link_broken:
            peer.told, peer.has_seen = True, False
            self._say(peer, FrameKind.FAIL, content)

    def say(self, rank: int, content: Mapping[str, Any]) -> None:
        """Say something to a rank that the transport built on this one understands."""
        self._say(self.peer(rank), FrameKind.NOTE, content)

    def spread(self, content: Mapping[str, Any], source: int | None = None) -> None:
        """Tell the neighbours what a rank reports, but for the one that it came from."""
        for rank in self.watch.neighbours:
            if rank != source:
                self._say(self.peer(rank), FrameKind.REPORT, content)

    def _say(
        self,
        peer: Peer,
        kind: FrameKind,
        content: Mapping[str, Any] | None = None,
        *,
        message: int = 0,
        channel: int = 0,
        size: int = 0,
    ) -> None:
        """Send a frame ahead of messages to a peer that is still there."""
        if self.released or peer.link_broken:
            return
        payload = None if content is None else pack_json(content)
        size = size if payload is None else len(payload)
        header = pack_header(kind, channel=channel, message=message, size=size)
        self.links.send(peer.rank, header, payload)

    # What are the others doing?

    def query(
        self, ranks: Iterable[int], channel: int, sequence: int, seconds: float
    ) -> dict[int, Status]:
        """Ask ranks for their status; those that do not answer in time are left out."""
        number = next(self._state.numbers)
        query = self._queries[number] = StatusQuery(ranks)
        for rank in query.open.copy():
            peer = self.peer(rank)
            if self.released or peer.closed_or_failed or peer.link_broken:
                query.open.discard(rank)
            else:
                self._say(peer, FrameKind.QUERY, message=number, channel=channel, size=sequence)
        self._state.poller.until(lambda: not query.open, seconds)
        del self._queries[number]
        return query.answers

    def _note_status(self, peer: Peer, frame: Frame) -> None:
        query, content = self._queries.get(frame.message), unpack_json(frame)
        if query is not None:
            query.note(peer.rank, content)
