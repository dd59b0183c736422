"""The control messages of the mpi transport: what one says, and what is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from fsdpcore.transports.mpi.wire import (
    MAX_INLINE,
    MAX_MESSAGE,
    MpiFrameKind,
    pack,
    pack_notice,
    unpack,
)
from hypothesis import given
from hypothesis import strategies as st

import fsdpcore as fc
from fsdpcore.comm.notices import unpack_json
from fsdpcore.core.buffers import MAX_SIGNATURE


def received(message: bytes) -> memoryview:
    """As it is read: at the beginning of a buffer that holds older bytes behind it."""
    room = bytearray(b"\xee" * MAX_MESSAGE)
    room[: len(message)] = message
    return memoryview(room)


@given(
    st.sampled_from(
        [
            MpiFrameKind.OFFER,
            MpiFrameKind.GRANT,
            MpiFrameKind.BYE,
            MpiFrameKind.QUERY,
            MpiFrameKind.SEEN,
        ]
    ),
    st.integers(0, 99),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=MAX_SIGNATURE),
)
def test_what_is_packed_is_unpacked(kind, source, channel, tag, number, size, signature):
    message = pack(kind, source, channel, tag, number, size, signature)
    frame = unpack(received(message), 100)
    assert frame[:7] == (kind, source, channel, tag, number, size, signature)
    assert bytes(frame.payload) == b""


@given(st.binary(max_size=300), st.binary(max_size=20))
def test_payloads(content, signature):
    data = np.frombuffer(content, np.uint8)
    message = pack(MpiFrameKind.EAGER, 2, 5, 7, 0, data.size, signature, data)
    frame = unpack(received(message), 3)
    assert (frame.kind, frame.source, frame.channel, frame.tag) == (MpiFrameKind.EAGER, 2, 5, 7)
    assert (frame.signature, bytes(frame.payload)) == (signature, content)


def test_the_largest_message_fits_into_the_buffer():
    data = np.full(MAX_INLINE, 3, np.uint8)
    message = pack(
        MpiFrameKind.EAGER, 0, 2**64 - 1, 2**31 - 1, 0, data.size, b"s" * MAX_SIGNATURE, data
    )
    assert len(message) == MAX_MESSAGE
    assert bytes(unpack(received(message), 1).payload) == data.tobytes()


def test_json_payloads():
    content = {"text": "waits \u00fc", "entered": 3}
    frame = unpack(received(pack_notice(MpiFrameKind.STATUS, 1, content, 77)), 2)
    assert (frame.kind, frame.number) == (MpiFrameKind.STATUS, 77)
    assert unpack_json(frame) == content


@pytest.mark.parametrize("payload", [b"[1]", b"{", b"\xff", b"1", b"[" * 5000])
def test_payloads_that_are_no_json_object(payload):
    message = pack(MpiFrameKind.FAIL, 0, size=len(payload), payload=payload)
    with pytest.raises(fc.ProtocolError, match="FAIL message"):
        unpack_json(unpack(received(message), 1))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (struct.pack("<B", 99), "unknown kind 99"),
        (pack(MpiFrameKind.BYE, 3), "from rank 3 of 3"),
        (pack(MpiFrameKind.EAGER, 0, size=MAX_INLINE + 1), "too many"),
        (pack(MpiFrameKind.EAGER, 0, size=2**63), "too many"),
        (pack(MpiFrameKind.OFFER, 0, signature=b"s" * (MAX_SIGNATURE + 1)), "too many"),
    ],
)
def test_what_is_refused(message, words):
    with pytest.raises(fc.ProtocolError, match=words):
        unpack(received(message), 3)
