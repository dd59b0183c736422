"""The frames of the ``zmq`` transport, and the checks that a frame passes before it is believed.

A frame is a header of fixed size, the signature of the array (see ``buffers.pack_signature``),
and the payload of small frames. The bytes of large arrays follow as a second part of a ``DATA``
frame, straight from the sender's array and into the receiver's. Numbers are little-endian.

======  ========================================================================================
HELLO   first frame on a connection: JSON with the sender's rank and its proof of the job's token
EAGER   a whole small message
OFFER   a large message is ready to be sent: its size and signature
GRANT   the receiver has room for it up to byte ``offset``
DATA    bytes ``offset`` to ``offset + size`` of it, in a second part
TAKEN   the receiver has all of it: the sender's array is free
FAIL    the sender's job has failed: JSON with the reason, and the rank that is to blame if known
BYE     no new messages from the sender, all is well; it still sends what it has offered
QUERY   what are you doing?
STATUS  the answer: JSON
SEEN    the answer to FAIL and BYE: all that the other has sent was read
======  ========================================================================================
"""

from __future__ import annotations

import enum
import json
import struct
from typing import Any, NamedTuple

from fsdpcore.buffers import MAX_SIGNATURE
from fsdpcore.errors import ProtocolError

_HEADER = struct.Struct("<IBBHQQQQQ")
_MAGIC = 0x31504446  # "FDP1"
_VERSION = 1

# A control frame never has more; an eager message is at most this long.
MAX_INLINE = 1 << 20
# Largest segment of a large message.
MAX_SEGMENT = 1 << 24


class Kind(enum.IntEnum):
    """What a frame is for."""

    HELLO = 1
    EAGER = 2
    OFFER = 3
    GRANT = 4
    DATA = 5
    TAKEN = 6
    FAIL = 7
    BYE = 8
    QUERY = 9
    STATUS = 10
    SEEN = 11


_KINDS = {int(kind): kind for kind in Kind}
_WITH_PAYLOAD = frozenset({Kind.HELLO, Kind.EAGER, Kind.FAIL, Kind.STATUS})


class Frame(NamedTuple):
    """One frame; ``message`` numbers a sender's large messages and queries."""

    kind: Kind
    channel: int = 0
    tag: int = 0
    message: int = 0
    size: int = 0
    offset: int = 0
    signature: bytes = b""
    payload: Any = b""

    def pack(self) -> bytes:
        """Encode header, signature and payload; ``size`` is the payload's where there is one."""
        size = len(self.payload) if self.kind in _WITH_PAYLOAD else self.size
        header = _HEADER.pack(
            _MAGIC,
            _VERSION,
            self.kind,
            len(self.signature),
            self.channel,
            self.tag,
            self.message,
            size,
            self.offset,
        )
        return b"".join((header, self.signature, self.payload))


def unpack(data: bytes) -> Frame:
    """Decode a frame.

    Raises:
        ProtocolError: it is not a frame of this protocol, or its lengths do not fit.
    """
    if len(data) < _HEADER.size:
        raise ProtocolError(f"a frame of {len(data)} bytes is shorter than any header")
    magic, version, code, signed, channel, tag, message, size, offset = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise ProtocolError("a frame does not begin like one of this version of the protocol")
    kind = _KINDS.get(code)
    if kind is None:
        raise ProtocolError(f"a frame has the unknown kind {code}")
    inline = size if kind in _WITH_PAYLOAD else 0
    if signed > MAX_SIGNATURE or inline > MAX_INLINE:
        raise ProtocolError(f"a {kind.name} frame announces {signed} + {inline} bytes: too many")
    if len(data) != _HEADER.size + signed + inline:
        raise ProtocolError(f"a {kind.name} frame of {len(data)} bytes has the wrong length")
    if kind is Kind.DATA and size > MAX_SEGMENT:
        raise ProtocolError(f"a DATA frame announces {size} bytes: too many")
    start = _HEADER.size + signed
    signature = data[_HEADER.size : start]
    payload = memoryview(data)[start:]
    return Frame(kind, channel, tag, message, size, offset, signature, payload)


def pack_json(content: dict[str, Any]) -> bytes:
    """Encode the payload of a HELLO, FAIL or STATUS frame."""
    return json.dumps(content).encode()


def unpack_json(frame: Frame) -> dict[str, Any]:
    """Decode the payload of a HELLO, FAIL or STATUS frame.

    Raises:
        ProtocolError: it is no JSON object.
    """
    try:
        content = json.loads(bytes(frame.payload))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the payload of a {frame.kind.name} frame is not JSON") from error
    if not isinstance(content, dict):
        raise ProtocolError(f"the payload of a {frame.kind.name} frame is no object")
    return content
