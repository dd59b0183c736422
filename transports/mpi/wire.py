"""The control messages of the ``mpi`` transport, and the checks that one passes before use.

MPI matches by a tag of few bits; ours have a channel of 64. So all envelopes travel in messages
on one MPI tag: a header of fixed size, the signature of the array (see ``buffers.pack_signature``)
and the payload. The bytes of large arrays travel on MPI tags of their own. Little-endian.

======  ========================================================================================
EAGER   a whole small message
OFFER   a large message is ready to be sent: its size and signature
GRANT   the receiver has posted room for it: the data is to come on the tag of its number
FAIL    the sender's job has failed: JSON with the reason, and the rank that is to blame if known
BYE     no new messages from the sender, all is well; it still sends what it has offered. The
        number is 1 if its program has returned
QUERY   what are you doing?
STATUS  the answer: JSON
SEEN    the answer to FAIL; also said by who heard of the failure from another, and leaves
======  ========================================================================================
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from fsdpcore.comm.notices import pack_json
from fsdpcore.core.buffers import MAX_SIGNATURE
from fsdpcore.core.errors import ProtocolError

# Kind, length of the signature, sender's rank, tag, channel, number, size of the (whole) message.
_HEADER = struct.Struct("<BxHIQQQQ")

# A payload is at most this long, so every control message fits into one receive buffer.
MAX_INLINE = 64 * 1024
MAX_MESSAGE = _HEADER.size + MAX_SIGNATURE + MAX_INLINE
# Characters of a text that fit into a payload, however they are escaped.
MAX_TEXT = 10_000


class MpiFrameKind(enum.IntEnum):
    """What a control message is for."""

    EAGER = 1
    OFFER = 2
    GRANT = 3
    FAIL = 4
    BYE = 5
    QUERY = 6
    STATUS = 7
    SEEN = 8


_KINDS = {int(kind): kind for kind in MpiFrameKind}
_WITH_PAYLOAD = frozenset({MpiFrameKind.EAGER, MpiFrameKind.FAIL, MpiFrameKind.STATUS})


class MpiFrame(NamedTuple):
    """A control message that has arrived; ``payload`` is a view of the buffer it came into."""

    kind: MpiFrameKind
    source: int
    channel: int
    tag: int
    number: int
    size: int
    signature: bytes
    payload: memoryview


def pack(
    kind: MpiFrameKind,
    source: int,
    channel: int = 0,
    tag: int = 0,
    number: int = 0,
    size: int = 0,
    signature: bytes = b"",
    payload: Any = b"",
) -> bytes:
    """Encode a control message; ``payload``, anything with bytes, has ``size`` of them."""
    header = _HEADER.pack(kind, len(signature), source, tag, channel, number, size)
    return b"".join((header, signature, payload))


def pack_notice(
    kind: MpiFrameKind, source: int, content: Mapping[str, Any], number: int = 0
) -> bytes:
    """Encode a control message whose payload is ``content``, as JSON."""
    payload = pack_json(content)
    return pack(kind, source, number=number, size=len(payload), payload=payload)


def unpack(data: memoryview, ranks: int) -> MpiFrame:
    """Decode the control message at the beginning of ``data``, sent by one of ``ranks`` ranks.

    Raises:
        ProtocolError: it is not one of this protocol.
    """
    code, signed, source, tag, channel, number, size = _HEADER.unpack_from(data)
    kind = _KINDS.get(code)
    if kind is None:
        raise ProtocolError(f"a control message has the unknown kind {code}")
    inline = size if kind in _WITH_PAYLOAD else 0
    if signed > MAX_SIGNATURE or inline > MAX_INLINE:
        raise ProtocolError(f"a {kind.name} message announces {signed} + {inline} bytes: too many")
    if source >= ranks:
        raise ProtocolError(f"a {kind.name} message is from rank {source} of {ranks}")
    start = _HEADER.size + signed
    signature = bytes(data[_HEADER.size : start])
    return MpiFrame(
        kind, source, channel, tag, number, size, signature, data[start : start + inline]
    )
