"""The frames of the ``zmq`` transport, and the checks that a frame passes before it is believed.

A frame is a header of fixed size, the signature of the array (see ``buffers.pack_signature``),
and a payload. Numbers are little-endian. Control frames are ZeroMQ's messages; the frames that
messages between ranks consist of follow one another on the data connection (``frame_socket.py``).

======  ========================================================================================
        on the ZeroMQ connection
HELLO   first frame: JSON with the sender's rank and its proof of the job's token
FAIL    the sender's job has failed: JSON with the reason, and the rank that is to blame if known
BYE     no messages from the sender beyond the first ``size``, all is well; it has asked for
        ``offset`` large ones, and still sends what it has offered
QUERY   what are you doing?
STATUS  the answer: JSON
SEEN    the answer to FAIL, and to BYE once all that the sender of that had to send has come
        on the data connection
NOTE    JSON that a transport built on this one understands
EAGER   a whole small message
OFFER   a large message is ready to be sent: its size, signature, and first ``offset`` bytes
GRANT   the receiver has room for it
DATA    bytes ``offset`` to ``offset + size`` of it
MEMORY  the sender's memory introduces itself: see ``memory/shared.py``; ahead of all that follow
LEND    as OFFER, but the first ``offset`` bytes are in the sender's memory; what is sent as
        signature begins with where: the numbers of the segment and of the byte in it
PIECE   bytes ``offset`` to ``offset + size`` are in the sender's memory, at the place that is
        sent as signature
TAKEN   the receiver has read the bytes before ``offset``, as announced by one of these frames;
        where LEND has announced all of them, this stands for GRANT, too
REFUSE  instead of GRANT: the sender's memory is out of reach, send all of it as DATA
======  ========================================================================================
"""

from __future__ import annotations

import enum
import struct
from typing import Any, NamedTuple

from fsdpcore.core.buffers import MAX_SIGNATURE
from fsdpcore.core.errors import ProtocolError

_HEADER = struct.Struct("<IBBHQQQQQ")
HEADER_BYTES = _HEADER.size
_MAGIC = 0x31504446  # "FDP1"
_VERSION = 3

# Most that may come unasked: a control frame, a small message, or the beginning of a large one.
MAX_INLINE = 1 << 20
# Largest segment of a large message.
MAX_SEGMENT = 1 << 24


class FrameKind(enum.IntEnum):
    """What a frame is for."""

    HELLO = 1
    EAGER = 2
    OFFER = 3
    GRANT = 4
    DATA = 5
    FAIL = 7
    BYE = 8
    QUERY = 9
    STATUS = 10
    SEEN = 11
    MEMORY = 12
    LEND = 13
    PIECE = 14
    TAKEN = 15
    REFUSE = 16
    NOTE = 17


_KINDS = {int(kind): kind for kind in FrameKind}
_CONTROL = frozenset(
    {
        FrameKind.HELLO,
        FrameKind.FAIL,
        FrameKind.BYE,
        FrameKind.QUERY,
        FrameKind.STATUS,
        FrameKind.SEEN,
        FrameKind.NOTE,
    }
)
_WITH_JSON = frozenset({FrameKind.HELLO, FrameKind.FAIL, FrameKind.STATUS, FrameKind.NOTE})
_WITH_PAYLOAD = _WITH_JSON | {FrameKind.EAGER, FrameKind.DATA}
_PLACE = struct.Struct("<QQ")
_MAX_PLACED = _PLACE.size + MAX_SIGNATURE
SegmentOffset = tuple[int, int]


class Frame(NamedTuple):
    """One frame; ``message`` numbers a sender's large messages and queries."""

    kind: FrameKind
    channel: int = 0
    tag: int = 0
    message: int = 0
    size: int = 0
    offset: int = 0
    signature: bytes = b""
    payload: Any = b""

    def pack(self) -> bytes:
        """Encode header, signature and payload; ``size`` is the payload's in a control frame."""
        size = len(self.payload) if self.kind in _WITH_JSON else self.size
        header = pack_header(
            self.kind, self.channel, self.tag, self.message, size, self.offset, self.signature
        )
        return header + self.payload if self.payload else header


def pack_header(
    kind: int,
    channel: int = 0,
    tag: int = 0,
    message: int = 0,
    size: int = 0,
    offset: int = 0,
    signature: bytes = b"",
) -> bytes:
    """Encode header and signature."""
    header = _HEADER.pack(
        _MAGIC, _VERSION, kind, len(signature), channel, tag, message, size, offset
    )
    return header + signature if signature else header


def unpack(data: bytes) -> Frame:
    """Decode a control frame.

    Raises:
        ProtocolError: it is not one of this protocol, or its lengths do not fit.
    """
    if len(data) < HEADER_BYTES:
        raise ProtocolError(f"a frame of {len(data)} bytes is shorter than any header")
    frame, signed, inline = _read_header(data, 0)
    if frame.kind not in _CONTROL:
        raise ProtocolError(f"a {frame.kind.name} frame where only control frames travel")
    if len(data) != HEADER_BYTES + signed + inline:
        raise ProtocolError(f"a {frame.kind.name} frame of {len(data)} bytes has the wrong length")
    start = HEADER_BYTES + signed
    return frame._replace(
        signature=bytes(data[HEADER_BYTES:start]), payload=memoryview(data)[start:]
    )


def unpack_next(data: bytearray, start: int, end: int) -> tuple[Frame, int] | None:
    """Decode header and signature of a frame of the data connection; None if they are not whole.

    Returns:
        The frame, and the size of the payload that follows.

    Raises:
        ProtocolError: it is not a frame of this protocol, or announces too much.
    """
    if end - start < HEADER_BYTES:
        return None
    frame, signed, inline = _read_header(data, start)
    if frame.kind in _CONTROL:
        raise ProtocolError(f"a {frame.kind.name} frame where only messages travel")
    if not signed:
        return frame, inline
    start += HEADER_BYTES
    if end - start < signed:
        return None
    return frame._replace(signature=bytes(data[start : start + signed])), inline


def _read_header(data: bytes | bytearray, start: int) -> tuple[Frame, int, int]:
    fields = _HEADER.unpack_from(data, start)
    magic, version, code, signed, channel, tag, message, size, offset = fields
    if magic != _MAGIC or version != _VERSION:
        raise ProtocolError("a frame does not begin like one of this version of the protocol")
    kind = _KINDS.get(code)
    if kind is None:
        raise ProtocolError(f"a frame has the unknown kind {code}")
    inline = size if kind in _WITH_PAYLOAD else offset if kind is FrameKind.OFFER else 0
    limit = MAX_SEGMENT if kind is FrameKind.DATA else MAX_INLINE
    if signed > (_MAX_PLACED if kind is FrameKind.LEND else MAX_SIGNATURE) or inline > limit:
        raise ProtocolError(f"a {kind.name} frame announces {signed} + {inline} bytes: too many")
    return Frame(kind, channel, tag, message, size, offset), signed, inline


def pack_place(place: SegmentOffset) -> bytes:
    """Encode where bytes are in memory: the number of a segment, and of the first byte in it."""
    return _PLACE.pack(*place)


def split_place(frame: Frame) -> tuple[SegmentOffset, bytes]:
    """Decode where the bytes of a LEND or PIECE frame are; return the signature proper, too.

    Raises:
        ProtocolError: the frame does not say.
    """
    if len(frame.signature) < _PLACE.size:
        raise ProtocolError(f"a {frame.kind.name} frame does not say where the bytes are")
    segment, offset = _PLACE.unpack_from(frame.signature)
    return (segment, offset), frame.signature[_PLACE.size :]
