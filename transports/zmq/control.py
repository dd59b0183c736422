"""What the ranks of the ``zmq`` transport tell each other besides messages, over ZeroMQ.

Who is there, that a rank fails or leaves, and what it is doing. This overtakes the messages, which
have connections of their own, and is looked after by a thread of its own in every rank.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import zmq

from fsdpcore.comm.notices import failure_as_json, failure_from_json, pack_json, unpack_json
from fsdpcore.comm.status_query import StatusQuery
from fsdpcore.comm.transport import Transport
from fsdpcore.core.errors import (
    CommunicationError,
    ConfigError,
    PeerFailedError,
    ProtocolError,
    in_words,
)
from fsdpcore.diagnostics.status import Status

from .connect import proof
from .messages import ConnectionState
from .peer import Peer
from .wire import Frame, FrameKind, unpack

_EVENTS = int(zmq.EVENTS)
_POLLIN, _POLLOUT, _NOBLOCK = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.NOBLOCK)

# A connection breaks a moment before the last frames on it have been read; wait for them.
_LAST_WORDS_SECONDS = 0.05
# A rank whose data connection has ended says why, or its other connection breaks, too.
_CUT_SECONDS = 5.0
_MAX_TEXT = 64 * 1024
# Frames that are read before other threads of this rank get their turn.
_FRAMES_AT_ONCE = 8


def _heard_by_nobody(rank: int, content: Mapping[str, Any]) -> None:
    raise ProtocolError("a NOTE frame, which this transport does not send")


class Control:
    """The connections of one rank, and what is said on them.

    Attributes:
        peers: the other ranks.
        introduced: this rank says who it is, and may say more.
        leaving: it has said BYE.
        released: its sockets are not used any more.
        heard: takes what a rank says by ``note``; must not wait.

    Called with the lock of the connections held.
    """

    def __init__(self, backend: Transport, state: ConnectionState, token: str) -> None:
        self.peers: dict[int, Peer] = {}
        self.introduced = False
        self.leaving = False
        self.released = False
        self.heard: Callable[[int, Mapping[str, Any]], None] = _heard_by_nobody
        self._backend = backend
        self._state = state
        self._token = token
        self._queries: dict[int, StatusQuery] = {}

    def add(self, peer: Peer) -> None:
        """Look after a peer, whose sockets are there."""
        poller = self._state.poller
        serve = functools.partial(self.serve, peer)
        poller.add(int(peer.socket.getsockopt(zmq.FD)), serve, rare=True)
        poller.add(int(peer.monitor.getsockopt(zmq.FD)), peer.read_monitor, rare=True)

    def introduce(self) -> None:
        """Say to all peers who this rank is."""
        self.introduced = True
        for peer in self.peers.values():
            shown = proof(self._token, self._backend.rank, peer.rank)
            hello = {"rank": self._backend.rank, "proof": shown}
            peer.queue(Frame(FrameKind.HELLO, payload=pack_json(hello)))
            self.serve(peer)
            peer.read_monitor()

    # What comes.

    def serve(self, peer: Peer) -> None:
        """Do what there is to do on a peer's socket; see ``poller.py`` for why all of it."""
        if self.released:
            return
        sock = peer.socket
        try:
            for _ in range(_FRAMES_AT_ONCE):
                events = int(sock.getsockopt(_EVENTS))
                if events & _POLLIN:
                    if peer.greeted:
                        self._handle(peer, unpack(sock.recv(_NOBLOCK)))
                    else:
                        self._greet(peer)
                elif events & _POLLOUT and not peer.flushed:
                    peer.flush()
                else:
                    return
            self._state.poller.again(functools.partial(self.serve, peer))
        except BaseException as error:
            self._went_wrong(peer, error)

    def serve_mail(self, peer: Peer) -> None:
        """Do what there is to do on a peer's data connection, if that is not too much."""
        peer_channel = peer.peer_channel
        if peer_channel is None or self.released:
            return
        try:
            served = peer_channel.frame_socket.serve()
            if peer_channel.copy() or not served:
                self._state.poller.again(functools.partial(self.serve_mail, peer))
            if peer_channel.last is not None or peer_channel.frame_socket.ended:
                self._note_progress(peer)
        except BaseException as error:
            self._went_wrong(peer, error)

    def _went_wrong(self, peer: Peer, error: BaseException) -> None:
        if not isinstance(error, ProtocolError):
            self.interrupted(error)
            raise error
        if peer.peer_channel is not None:
            peer.peer_channel.frame_socket.stop()
        text = f"from the connection to rank {peer.rank}: {error}"
        self._backend.fail(ProtocolError(text), tell=True)

    def interrupted(self, error: BaseException) -> None:
        """Break the backend when Ctrl-C, or a bug, has left a message half handled."""
        if not isinstance(error, CommunicationError):
            why = in_words(error)
            if not isinstance(error, ConfigError):
                why = f"rank {self._backend.rank} was interrupted: {why}"
            self._backend.fail(CommunicationError(why), tell=True)

    def _handle(self, peer: Peer, frame: Frame) -> None:
        kind = frame.kind
        if kind is FrameKind.QUERY:
            answer = self._backend.recorder.status(frame.channel, frame.size).as_json()
            peer.queue(Frame(FrameKind.STATUS, message=frame.message, payload=pack_json(answer)))
        elif kind is FrameKind.STATUS:
            self._note_status(peer, frame)
        elif kind is FrameKind.FAIL:
            peer.queue(Frame(FrameKind.SEEN))
            self._note_failure(peer, frame)
        elif kind is FrameKind.BYE:
            peer.expect(frame.size, frame.offset)
            self._note_progress(peer)
        elif kind is FrameKind.SEEN:
            peer.has_seen = True
        elif kind is FrameKind.NOTE:
            self.heard(peer.rank, unpack_json(frame))
        else:
            raise ProtocolError(f"a second {kind.name} frame")

    def _greet(self, peer: Peer) -> None:
        part = peer.socket.recv(_NOBLOCK, copy=False)
        frame = unpack(part.bytes)
        content = unpack_json(frame) if frame.kind is FrameKind.HELLO else {}
        shown = str(content.get("proof", "")).encode(errors="replace")
        expected = proof(self._token, peer.rank, self._backend.rank).encode()
        if content.get("rank") != peer.rank or not hmac.compare_digest(shown, expected):
            raise ProtocolError("who is there is not that rank of this job")
        peer.greet(int(part.get(zmq.SRCFD)))

    # Failure and leaving.

    def _note_failure(self, peer: Peer, frame: Frame) -> None:
        error = failure_from_json(unpack_json(frame), self._backend.world_size)
        peer.left = True
        self._backend.peer_reported(peer.rank, error)

    def _note_progress(self, peer: Peer) -> None:
        """Look whether a peer's last message has come, and then whether the last byte has."""
        peer_channel = peer.peer_channel
        if peer_channel is None:
            return
        if peer_channel.heard_all() and not peer.left:
            self._note_leaving(peer)
        if not peer_channel.frame_socket.ended:
            return
        if peer.left:
            if not peer.answered:
                peer.answered = True
                peer.queue(Frame(FrameKind.SEEN))
            if peer_channel.waits():
                self.miss(peer)
        elif peer.cut_at is None:
            peer.cut_at = time.monotonic()
            self._state.poller.remind()

    def _note_leaving(self, peer: Peer) -> None:
        """A peer posts no more messages; break the backend if any is needed from it."""
        peer.left = True
        unwanted = peer.peer_channel is not None and peer.peer_channel.unwanted()
        if unwanted or self._state.table.awaits(peer.rank):
            self.miss(peer)

    def miss(self, peer: Peer) -> None:
        """Break the backend because something was needed of a rank that has left."""
        error = PeerFailedError(f"rank {peer.rank} has left the job", peer.rank)
        self._backend.fail(error, tell=True)

    def tick(self) -> float | None:
        """Fail because of peers whose connections broke a while ago without a last word."""
        due = None
        for peer in self.peers.values():
            wait = self._patience(peer)
            if wait is None or self._backend.failure is not None:
                continue
            if wait > 0:
                due = wait if due is None else min(due, wait)
                continue
            self.serve(peer)
            self.serve_mail(peer)
            if not peer.left:
                why = "the process died, was stopped for long, or the network failed"
                if not peer.greeted:
                    why = "before it said who it was"
                text = f"rank {peer.rank} is lost: its connection broke: {why}"
                self._backend.fail(PeerFailedError(text, peer.rank), tell=True)
            elif peer.peer_channel is not None and peer.peer_channel.waits():
                self.miss(peer)
        return due

    def _patience(self, peer: Peer) -> float | None:
        """How many seconds a broken connection still has for last words; None if it holds."""
        ends = []
        if peer.lost_at is not None:
            ends.append(peer.lost_at + _LAST_WORDS_SECONDS)
        if peer.cut_at is not None:
            ends.append(peer.cut_at + _CUT_SECONDS)
        return min(ends) - time.monotonic() if ends else None

    # What this rank says.

    def say_bye(self) -> None:
        """Tell each peer that no more comes than what is on its way."""
        self.leaving = True
        for peer in self.peers.values():
            peer_channel = peer.peer_channel
            posted, asked = (
                (peer_channel.posted, peer_channel.asked) if peer_channel is not None else (0, 0)
            )
            self.to(peer, Frame(FrameKind.BYE, size=posted, offset=asked))

    def say_failed(self, error: CommunicationError) -> None:
        """Tell all peers by what this rank is broken."""
        payload = pack_json(failure_as_json(error, _MAX_TEXT))
        for peer in self.peers.values():
            self.to(peer, Frame(FrameKind.FAIL, payload=payload))

    def note(self, rank: int, content: Mapping[str, Any]) -> None:
        """Say something to a rank that the transport built on this one understands."""
        self.to(self.peers[rank], Frame(FrameKind.NOTE, payload=pack_json(content)))

    def to(self, peer: Peer, frame: Frame) -> None:
        """Send a frame to a peer that is still there."""
        if self.introduced and not self.released and peer.lost_at is None:
            with contextlib.suppress(zmq.ZMQError):
                peer.queue(frame)
                self.serve(peer)

    # What are the others doing?

    def query(
        self, ranks: Iterable[int], channel: int, sequence: int, seconds: float
    ) -> dict[int, Status]:
        """Ask ranks for their status; those that do not answer in time are left out."""
        number = next(self._state.numbers)
        query = self._queries[number] = StatusQuery(ranks)
        for rank in query.open.copy():
            peer = self.peers[rank]
            if self.released or peer.left or peer.lost_at is not None:
                query.open.discard(rank)
            else:
                peer.queue(Frame(FrameKind.QUERY, channel, message=number, size=sequence))
                self.serve(peer)
        self._state.poller.until(lambda: not query.open, seconds)
        del self._queries[number]
        return query.answers

    def _note_status(self, peer: Peer, frame: Frame) -> None:
        content = unpack_json(frame)
        query = self._queries.get(frame.message)
        if query is not None:
            query.note(peer.rank, content)
