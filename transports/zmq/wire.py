"""The frames of the ``zmq`` transport, and the checks that a frame passes before it is believed.

A frame is a header of fixed size, the signature of the array (see ``buffers.pack_signature``),
and a payload, which travels as a part of its own. Numbers are little-endian.

======  ========================================================================================
        messages
EAGER   a whole small message
OFFER   a large message is ready to be sent: its size, signature, and first ``offset`` bytes
GRANT   the receiver has room for it
DATA    bytes ``offset`` to ``offset + size`` of it
TAKEN   the receiver has read the bytes before ``offset`` in memory, as announced by one of the
        frames below; where LEND has announced all of them, this stands for GRANT, too
MEMORY  the sender's memory introduces itself: see ``memory/shared.py``; ahead of all that follow
LEND    as OFFER, but the first ``offset`` bytes are in the sender's memory; what is sent as
        signature begins with where: the numbers of the segment and of the byte in it
PIECE   bytes ``offset`` to ``offset + size`` are in the sender's memory, at the place that is
        sent as signature
REFUSE  instead of GRANT: the sender's memory is out of reach, send all of it as DATA
CREDIT  ``size`` bytes of payloads have come in all
        what else the ranks tell each other
FAIL    the sender's job has failed: JSON with the reason, and the rank that is to blame if known
BYE     the sender leaves without an error. It has sent ``size`` messages in all and asked for
        ``offset`` of the receiver's large ones; what it has offered it still sends
SEEN    the answer to FAIL, and to BYE once all that the sender of that had to send has come
QUERY   what are you doing?
STATUS  the answer: JSON
REPORT  JSON: what a rank has found of another one, or says of itself
NOTE    JSON that a transport built on this one understands
======  ========================================================================================
"""

from __future__ import annotations

import enum
import struct
from typing import Any, NamedTuple

from fsdpcore.core.buffers import MAX_SIGNATURE
from fsdpcore.core.errors import ProtocolError

_HEADER = struct.Struct("<IBBHQQQQQ")
_MAGIC = 0x31504446  # "FDP1"
_VERSION = 4

# Most that may come unasked: a small message, the beginning of a large one, a text.
MAX_INLINE = 1 << 20
# Largest segment of a large message.
MAX_PAYLOAD = 1 << 24


class FrameKind(enum.IntEnum):
    """What a frame is for."""

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
    CREDIT = 18
    REPORT = 19


_KINDS = {int(kind): kind for kind in FrameKind}
_WITH_JSON = frozenset({FrameKind.FAIL, FrameKind.STATUS, FrameKind.NOTE, FrameKind.REPORT})
_WITH_PAYLOAD = _WITH_JSON | {FrameKind.EAGER, FrameKind.DATA}
MESSAGES = frozenset(
    {
        FrameKind.EAGER,
        FrameKind.OFFER,
        FrameKind.GRANT,
        FrameKind.DATA,
        FrameKind.MEMORY,
        FrameKind.LEND,
        FrameKind.PIECE,
        FrameKind.TAKEN,
        FrameKind.REFUSE,
        FrameKind.CREDIT,
    }
)
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


def pack_header(
    kind: int,
    channel: int = 0,
    tag: int = 0,
    message: int = 0,
    size: int = 0,
    offset: int = 0,
    signature: bytes = b"",
) -> bytes:
    """Encode header and signature; ``size`` is the payload's where there is one, but in OFFER."""
    header = _HEADER.pack(
        _MAGIC, _VERSION, kind, len(signature), channel, tag, message, size, offset
    )
    return header + signature if signature else header


def unpack(header: bytes, payload: Any = None) -> Frame:
    """Decode a frame.

    Raises:
        ProtocolError: it is not one of this protocol, or its lengths do not fit.
    """
    if len(header) < _HEADER.size:
        raise ProtocolError(f"a frame of {len(header)} bytes is shorter than any header")
    magic, version, code, signed, channel, tag, message, size, offset = _HEADER.unpack_from(header)
    if magic != _MAGIC or version != _VERSION:
        raise ProtocolError("a frame does not begin like one of this version of the protocol")
    kind = _KINDS.get(code)
    if kind is None:
        raise ProtocolError(f"a frame has the unknown kind {code}")
    signature = header[_HEADER.size :]
    most = _MAX_PLACED if kind is FrameKind.LEND else MAX_SIGNATURE
    if len(signature) != signed or signed > most:
        raise ProtocolError(f"a {kind.name} frame has the wrong length")
    there = 0 if payload is None else len(payload)
    inline = size if kind in _WITH_PAYLOAD else offset if kind is FrameKind.OFFER else 0
    if there != inline or there > (MAX_PAYLOAD if kind is FrameKind.DATA else MAX_INLINE):
        raise ProtocolError(f"a {kind.name} frame announces {inline} bytes and has {there}")
    return Frame(kind, channel, tag, message, size, offset, signature, payload)


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
