"""Messages of the ``mpi`` transport under way: which there are, and what MPI is asked to do.

A small message travels whole in a control message. A large one is offered; when a receive takes
it, the receiver posts MPI receives straight into the caller's array and grants it, and the sender
starts MPI sends straight from its own. So MPI never holds data that nobody has asked for.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fsdpcore.comm.envelope import Envelope
from fsdpcore.comm.matching import Key, MatchTable, fit
from fsdpcore.comm.polled import PolledMessage
from fsdpcore.core.buffers import Bytes
from fsdpcore.core.errors import MismatchError, ProtocolError
from fsdpcore.core.work import Pending

from .library import MPI, PROCESS
from .progress import ProgressThread
from .wire import MAX_MESSAGE, MpiFrame, MpiFrameKind, pack, unpack

_CONTROL_TAG = 1
# MPI counts with 31 bits: large messages go in pieces of half a GiB.
_PIECE = 1 << 29
# Control messages that are handled before other threads of this rank get their turn.
_FRAMES_AT_ONCE = 16
# How long a message that MPI has in hand is waited for before it is given up.
_LAST_SECONDS, _FAILED_SECONDS = 10.0, 0.5


class MpiSend(PolledMessage):
    """A large message that this rank sends."""

    __slots__ = ("data", "dst", "engine", "number")

    def __init__(self, engine: MpiEngine, dst: int, number: int, data: Bytes) -> None:
        super().__init__(engine.progress_thread)
        self.engine = engine
        self.dst = dst
        self.number = number
        self.data = data

    def cancel(self) -> bool:
        return self.engine.cancel_send(self)


class MpiReceive(PolledMessage):
    """A receive: waiting for its message, or for the rest of it. Or a probe for a message."""

    __slots__ = ("engine", "envelope", "key", "out")

    def __init__(self, engine: MpiEngine, src: int, out: Bytes, envelope: Envelope) -> None:
        super().__init__(engine.progress_thread)
        self.engine = engine
        self.out = out
        self.envelope = envelope
        self.key: Key = (src, envelope.channel, envelope.tag)

    def cancel(self) -> bool:
        return self.engine.cancel_receive(self)


class MpiUnexpected:
    """A message that came before its receive: a small one with its bytes, or an offer."""

    __slots__ = ("key", "kind", "number", "payload", "signature", "size", "source")

    def __init__(self, frame: MpiFrame) -> None:
        self.kind = frame.kind
        self.source = frame.source
        self.number = frame.number
        self.size = frame.size
        self.signature = frame.signature
        self.payload: memoryview | bytes = frame.payload
        self.key: Key = (frame.source, frame.channel, frame.tag)

    def keep(self) -> None:
        """Copy the payload, since what comes next overwrites it."""
        self.payload = bytes(self.payload)


class _Transfer:
    """What MPI has in hand: its requests, the message they belong to, the memory they use."""

    __slots__ = ("memory", "pending", "requests")

    def __init__(self, pending: Pending | None, memory: Any) -> None:
        self.pending = pending
        self.memory = memory
        self.requests: list[MPI.Request] = []


class MpiEngine:
    """All messages of one rank.

    Attributes:
        lock: held around every use of the engine but ``cancel_*`` and ``poll``, which take it.
        table: receives without a message, and messages without a receive.
        progress_thread: who polls; set by the owner.

    Args:
        comm: nobody else sends on it.
        handle: called for control messages that are not about data; under the lock.
        failed: called with what a poll has raised, a message being half handled.
        mismatched: called with the error of a message that does not fit its receive.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        handle: Callable[[MpiFrame], None],
        failed: Callable[[BaseException], None],
        mismatched: Callable[[MismatchError], None],
    ) -> None:
        self.lock = threading.RLock()
        self.table: MatchTable[MpiReceive, MpiUnexpected] = MatchTable()
        self.progress_thread: ProgressThread
        self.rank = comm.rank
        self._comm = comm
        self._size = comm.size
        self._handle, self._failed, self._mismatched = handle, failed, mismatched
        self._highest_tag = int(comm.Get_attr(MPI.TAG_UB) or 32767)
        self._numbers = itertools.count(1)
        self._offered: dict[int, MpiSend] = {}
        self._transfers: list[_Transfer] = []
        self._requests: list[MPI.Request] = []
        self._closed = False
        self._deaf = False  # MPI has reported an error: what it says from then on means nothing
        self._inbox = memoryview(bytearray(MAX_MESSAGE))
        room = [self._inbox, MAX_MESSAGE, MPI.BYTE]
        self._receive = comm.Recv_init(room, MPI.ANY_SOURCE, _CONTROL_TAG)
        self._receive.Start()

    # Sending.

    def control(self, dst: int, message: bytes) -> None:
        """Send a control message."""
        request = self._comm.Isend([message, len(message), MPI.BYTE], dst, _CONTROL_TAG)
        if not request.Test():
            self._track(_Transfer(None, message), request)

    def offer(self, dst: int, data: Bytes, envelope: Envelope) -> MpiSend:
        """Announce a large message."""
        number = next(self._numbers)
        outgoing = self._offered[number] = MpiSend(self, dst, number, data)
        channel, tag, signature = envelope
        self.control(
            dst, pack(MpiFrameKind.OFFER, self.rank, channel, tag, number, data.size, signature)
        )
        return outgoing

    def _send_granted(self, frame: MpiFrame) -> None:
        outgoing = self._offered.pop(frame.number, None)
        if outgoing is None:
            return  # given up; the receiver learns of it in other ways
        if outgoing.dst != frame.source:
            raise ProtocolError(f"rank {frame.source} grants a message to rank {outgoing.dst}")
        transfer, tag = _Transfer(outgoing, outgoing.data), self._data_tag(frame.number)
        for piece in _pieces(outgoing.data):
            self._track(transfer, self._comm.Isend(piece, outgoing.dst, tag))

    def _data_tag(self, number: int) -> int:
        """Numbers of one sender are apart for long, even where they are cut off to a tag."""
        return _CONTROL_TAG + 1 + number % (self._highest_tag - _CONTROL_TAG)

    # Receiving.

    def send_to_self(self, data: Bytes, envelope: Envelope) -> None:
        """Keep a copy of a message until it is received, however large it is."""
        channel, tag, signature = envelope
        kind, size = MpiFrameKind.EAGER, data.size
        self._arrive(MpiFrame(kind, self.rank, channel, tag, 0, size, signature, data.data))

    def post(self, src: int, out: Bytes, envelope: Envelope) -> MpiReceive:
        """Ask for a message; a mismatch with one that has come is passed on, too."""
        incoming = MpiReceive(self, src, out, envelope)
        arrival = self.table.post(incoming)
        if arrival is not None:
            self._match(incoming, arrival)
        return incoming

    def probe(self, src: int, envelope: Envelope) -> MpiReceive:
        """Ask which message ``post`` would take."""
        probe = MpiReceive(self, src, _NO_BYTES, envelope)
        self.table.probe(probe)
        return probe

    def _arrive(self, frame: MpiFrame) -> None:
        arrival = MpiUnexpected(frame)
        incoming = self.table.arrive(arrival)
        if incoming is not None:
            self._match(incoming, arrival)
        else:
            arrival.keep()

    def _match(self, incoming: MpiReceive, arrival: MpiUnexpected) -> None:
        envelope = incoming.envelope
        if arrival.signature != envelope.signature or arrival.size != incoming.out.size:
            source, channel, tag = arrival.key
            sent = Envelope(channel, tag, arrival.signature)
            error = fit(incoming, source, sent, arrival.size, self.rank)
            if error is not None:
                incoming.finish(error)
                self._mismatched(error)
                return
        out = incoming.out
        if arrival.kind is MpiFrameKind.EAGER:
            out.data[:] = arrival.payload
            incoming.finish()
        else:
            transfer, tag = _Transfer(incoming, out), self._data_tag(arrival.number)
            for piece in _pieces(out):
                self._track(transfer, self._comm.Irecv(piece, arrival.source, tag))
            self.control(arrival.source, pack(MpiFrameKind.GRANT, self.rank, number=arrival.number))

    # Progress.

    def _track(self, transfer: _Transfer, request: MPI.Request) -> None:
        transfer.requests.append(request)
        self._requests.append(request)
        self._transfers.append(transfer)

    def poll(self) -> bool:
        """Handle what has arrived and what has ended; return whether there was anything."""
        with self.lock:
            if self._closed or self._deaf:
                return False
            try:
                moved = bool(self._requests) and self._reap()
                for _ in range(_FRAMES_AT_ONCE):
                    if not self._receive.Test():
                        return moved
                    moved = True
                    self._read()
            except BaseException as error:
                self._deaf = isinstance(error, MPI.Exception)
                self._failed(error)
                if not isinstance(error, (MPI.Exception, ProtocolError)):
                    raise
            return True

    def _reap(self) -> bool:
        """Let go of what MPI has ended."""
        ended = MPI.Request.Testsome(self._requests)
        if not ended:
            return False
        gone = set(ended)
        transfers = [self._transfers[index] for index in ended]
        self._transfers = [t for i, t in enumerate(self._transfers) if i not in gone]
        self._requests = [r for i, r in enumerate(self._requests) if i not in gone]
        for transfer in transfers:
            pending = transfer.pending
            if pending is not None and not pending.finished and not any(transfer.requests):
                pending.finish()
        return True

    def _read(self) -> None:
        try:
            frame = unpack(self._inbox, self._size)
            kind = frame.kind
            if kind is MpiFrameKind.EAGER or kind is MpiFrameKind.OFFER:
                self._arrive(frame)
            elif kind is MpiFrameKind.GRANT:
                self._send_granted(frame)
            else:
                self._handle(frame)
        finally:
            if not self._closed:
                self._receive.Start()

    # Ending.

    @property
    def idle(self) -> bool:
        """Whether all that was sent has been taken, and all that was granted has come."""
        return not (self._requests or self._offered)

    @property
    def flushed(self) -> bool:
        """Whether MPI has nothing in hand."""
        return not self._requests

    def offered_to(self, rank: int) -> bool:
        """Whether a large message has been offered that ``rank`` has not asked for so far."""
        return any(outgoing.dst == rank for outgoing in self._offered.values())

    def cancel_send(self, outgoing: MpiSend) -> bool:
        """Send no more of a message; one that was granted is waited for."""
        with self.lock:
            if self._offered.pop(outgoing.number, None) is not None:
                return outgoing.finished
        return self._outlast(outgoing)

    def cancel_receive(self, incoming: MpiReceive) -> bool:
        """Write no more into a receive's array; return whether no peer will notice."""
        with self.lock:
            if self.table.withdraw_receive(incoming):
                return True
        return self._outlast(incoming)

    def _outlast(self, pending: PolledMessage) -> bool:
        """Wait for a message that MPI has in hand; in the end give it up."""
        if not self.progress_thread.until(lambda: pending.finished, _LAST_SECONDS):
            with self.lock:
                self._give_up([t for t in self._unique() if t.pending is pending])
        return pending.finished

    def fail_all(self, error: BaseException) -> None:
        """Finish every message with ``error``; control messages still go out."""
        with self.lock:
            waits: list[Pending] = [*self.table.receives(), *self._offered.values()]
            self.table.clear()
            self._offered.clear()
            held = [t for t in self._unique() if t.pending is not None]
            self._give_up(held)
            waits += [t.pending for t in held if t.pending is not None]
            for pending in waits:
                pending.finish(error)

    def _unique(self) -> list[_Transfer]:
        return list(dict.fromkeys(self._transfers))

    def _give_up(self, transfers: list[_Transfer]) -> None:
        """Make MPI leave the memory of transfers alone, as far as it lets itself be made to.

        A receive that no data has come for can be cancelled. One whose data is coming is waited
        for a moment. A send cannot be cancelled: its memory is kept until the process ends.
        """
        if not transfers:
            return
        given = set(map(id, transfers))
        kept = [i for i, t in enumerate(self._transfers) if id(t) not in given]
        self._requests = [self._requests[i] for i in kept]
        self._transfers = [self._transfers[i] for i in kept]
        end = time.monotonic() + _FAILED_SECONDS
        for transfer in transfers:
            for request in filter(None, transfer.requests):
                if isinstance(transfer.pending, MpiReceive):
                    with contextlib.suppress(MPI.Exception):
                        request.Cancel()
        for transfer in transfers:
            with contextlib.suppress(MPI.Exception):
                while not MPI.Request.Testall(transfer.requests) and time.monotonic() < end:
                    if not isinstance(transfer.pending, MpiReceive):
                        break
        PROCESS.kept += [t for t in transfers if any(t.requests)]

    def close(self) -> None:
        """Receive no more."""
        with self.lock:
            if not self._closed:
                self._closed = True
                PROCESS.kept += self._transfers
                with contextlib.suppress(MPI.Exception):
                    self._receive.Cancel()
                    self._receive.Wait()
                    self._receive.Free()


def _pieces(data: Bytes) -> list[Any]:
    """What mpi4py takes as buffers, for an array of any size."""
    if data.size <= _PIECE:
        return [[data, data.size, MPI.BYTE]]
    parts = [data[at : at + _PIECE] for at in range(0, data.size, _PIECE)]
    return [[part, part.size, MPI.BYTE] for part in parts]


_NO_BYTES: Bytes = np.empty(0, np.uint8)
