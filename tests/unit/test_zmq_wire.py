"""The frames of the zmq transport against frames built by hand, and against garbage."""

from __future__ import annotations

import contextlib
import json
import struct

import pytest
from fsdpcore.transports.zmq.wire import (
    MAX_INLINE,
    MAX_SEGMENT,
    Frame,
    FrameKind,
    pack_header,
    pack_place,
    split_place,
    unpack,
    unpack_next,
)
from hypothesis import given
from hypothesis import strategies as st

from fsdpcore.comm.notices import pack_json, unpack_json
from fsdpcore.core.errors import ProtocolError

# magic, version, kind, signature length, channel, tag, message, size, offset
LAYOUT = "<4sBBHQQQQQ"
HEADER_BYTES = 48
MAX_SIGNATURE = 514
PLACE_BYTES = 16
CONTROL = {"HELLO": 1, "FAIL": 7, "BYE": 8, "QUERY": 9, "STATUS": 10, "SEEN": 11, "NOTE": 17}
MESSAGES = {
    "EAGER": 2,
    "OFFER": 3,
    "GRANT": 4,
    "DATA": 5,
    "MEMORY": 12,
    "LEND": 13,
    "PIECE": 14,
    "TAKEN": 15,
    "REFUSE": 16,
}
CODES = {**CONTROL, **MESSAGES}
WITH_JSON = {"HELLO", "FAIL", "STATUS", "NOTE"}


def build(
    kind: int,
    *,
    magic: bytes = b"FDP1",
    version: int = 3,
    signed: int | None = None,
    size: int = 0,
    signature: bytes = b"",
    payload: bytes = b"",
    numbers: tuple[int, int, int, int] = (11, 12, 13, 14),
) -> bytes:
    channel, tag, message, offset = numbers
    length = len(signature) if signed is None else signed
    header = struct.pack(LAYOUT, magic, version, kind, length, channel, tag, message, size, offset)
    assert len(header) == HEADER_BYTES
    return header + signature + payload


@pytest.mark.parametrize("name", CONTROL)
def test_layout_of_control_frames(name: str) -> None:
    payload = b'{"a": 1}' if name in WITH_JSON else b""
    size = len(payload) if payload else 77
    data = build(CODES[name], size=size, signature=b"sig", payload=payload)
    frame = unpack(data)
    assert frame.kind is FrameKind[name]
    assert (frame.channel, frame.tag, frame.message, frame.offset) == (11, 12, 13, 14)
    assert (frame.size, frame.signature, bytes(frame.payload)) == (size, b"sig", payload)
    again = Frame(FrameKind[name], 11, 12, 13, size, 14, b"sig", payload)
    assert again.pack() == data


@pytest.mark.parametrize("name", MESSAGES)
def test_layout_of_messages(name: str) -> None:
    inline = {"EAGER": 77, "OFFER": 14, "DATA": 77}
    header = build(CODES[name], size=77, signature=b"sig")
    data = bytearray(b"??" + header + b"payload")
    found = unpack_next(data, 2, len(data))
    assert found is not None
    frame = found[0]
    assert frame.kind is FrameKind[name]
    assert (frame.channel, frame.tag, frame.message, frame.offset) == (11, 12, 13, 14)
    assert (frame.size, frame.signature) == (77, b"sig")
    assert found[1] == inline.get(name, 0)
    assert pack_header(CODES[name], 11, 12, 13, 77, 14, b"sig") == header
    for end in range(2, 2 + len(header)):
        assert unpack_next(data, 2, end) is None


def test_all_kinds_are_known_here() -> None:
    assert {kind.name: kind.value for kind in FrameKind} == CODES


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "shorter than any header"),
        (build(9)[:-1], "shorter than any header"),
        (build(9, magic=b"FDP2"), "does not begin"),
        (build(9, magic=b"GET "), "does not begin"),
        (build(9, version=2), "does not begin"),
        (build(0), "unknown kind 0"),
        (build(6), "unknown kind 6"),
        (build(18), "unknown kind 18"),
        (build(255), "unknown kind 255"),
        (build(7, signed=MAX_SIGNATURE + 1), "announces 515"),
        (build(7, size=MAX_INLINE + 1), "too many"),
        (build(1, size=2**64 - 1), "too many"),
        (build(7, size=10, payload=b"123456789"), "wrong length"),
        (build(7, size=9, payload=b"1234567890"), "wrong length"),
        (build(7, signed=9, size=0, signature=b"12345678"), "wrong length"),
        (build(9, payload=b"x"), "wrong length"),
        (build(8) + build(8), "wrong length"),
        *[(build(code), "only control frames") for code in MESSAGES.values()],
    ],
)
def test_bad_control_frames(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        unpack(data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (build(4, magic=b"FDP2"), "does not begin"),
        (build(4, version=2), "does not begin"),
        (build(0), "unknown kind 0"),
        (build(6), "unknown kind 6"),
        (build(2, signed=MAX_SIGNATURE + 1), "announces 515"),
        (build(13, signed=MAX_SIGNATURE + PLACE_BYTES + 1), "announces 531"),
        (build(14, signed=MAX_SIGNATURE + 1), "announces 515"),
        (build(2, size=MAX_INLINE + 1), "EAGER frame announces"),
        (build(3, size=2**63, numbers=(1, 2, 3, MAX_INLINE + 1)), "OFFER frame announces"),
        (build(5, size=MAX_SEGMENT + 1), "DATA frame announces"),
        *[(build(code), "only messages") for code in CONTROL.values()],
    ],
)
def test_bad_messages(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        unpack_next(bytearray(data), 0, len(data))


def header_of(data: bytes) -> tuple[Frame, int]:
    found = unpack_next(bytearray(data), 0, len(data))
    assert found is not None
    return found


def test_the_limits_themselves_pass() -> None:
    assert header_of(build(5, size=MAX_SEGMENT))[1] == MAX_SEGMENT
    assert len(header_of(build(3, signature=b"s" * MAX_SIGNATURE))[0].signature) == MAX_SIGNATURE
    longest = b"s" * (MAX_SIGNATURE + PLACE_BYTES)
    assert header_of(build(13, size=2**64 - 1, signature=longest))[0].signature == longest
    assert header_of(build(2, size=MAX_INLINE))[1] == MAX_INLINE
    whole = unpack(build(7, size=MAX_INLINE, payload=bytes(MAX_INLINE)))
    assert len(whole.payload) == MAX_INLINE
    # The size of what is offered is the sender's business: nothing is allocated for it.
    assert header_of(build(3, size=2**64 - 1))[0].size == 2**64 - 1


def test_where_bytes_are() -> None:
    """A LEND frame says it ahead of the signature, a PIECE frame instead of one."""
    where = struct.pack("<QQ", 2**64 - 1, 2**63 + 5)
    assert pack_place((2**64 - 1, 2**63 + 5)) == where
    for code in (13, 14):
        frame = header_of(build(code, size=77, signature=where + b"sig"))[0]
        assert split_place(frame) == ((2**64 - 1, 2**63 + 5), b"sig")
        short = header_of(build(code, size=77, signature=where[:15]))[0]
        with pytest.raises(ProtocolError, match=f"{short.kind.name} frame does not say where"):
            split_place(short)


numbers = st.integers(0, 2**64 - 1)


@given(
    st.sampled_from(list(CONTROL)),
    st.tuples(numbers, numbers, numbers, numbers),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=MAX_SIGNATURE),
    st.binary(max_size=200),
)
def test_round_trip(
    name: str, fields: tuple[int, int, int, int], size: int, signature: bytes, payload: bytes
) -> None:
    payload = payload if name in WITH_JSON else b""
    size = len(payload) if name in WITH_JSON else size
    channel, tag, message, offset = fields
    frame = Frame(FrameKind[name], channel, tag, message, size, offset, signature, payload)
    assert unpack(frame.pack()) == frame


def check_any(data: bytes) -> None:
    """Whatever comes, it is refused or it is a frame that says the truth about its length."""
    with contextlib.suppress(ProtocolError):
        frame = unpack(data)
        inline = frame.size if frame.kind.name in WITH_JSON else 0
        assert len(frame.payload) == inline
        assert len(data) == HEADER_BYTES + len(frame.signature) + inline
    with contextlib.suppress(ProtocolError):
        if (found := unpack_next(bytearray(data), 0, len(data))) is not None:
            known, inline = found
            assert HEADER_BYTES + len(known.signature) <= len(data)
            assert inline <= (MAX_SEGMENT if known.kind is FrameKind.DATA else MAX_INLINE)


@given(st.binary(max_size=200))
def test_garbage(data: bytes) -> None:
    check_any(data)


@given(st.binary(min_size=HEADER_BYTES - 6, max_size=200))
def test_garbage_behind_a_good_beginning(data: bytes) -> None:
    check_any(b"FDP1\x03" + data)


@given(
    st.sampled_from(list(CODES.values())),
    st.integers(0, 100),
    st.integers(0, 255),
    st.integers(0, 120),
)
def test_a_changed_byte_or_a_cut(kind: int, where: int, value: int, length: int) -> None:
    data = bytearray(build(kind, size=5, signature=b"sign", payload=b"12345"))
    data[where % len(data)] = value
    check_any(bytes(data[:length]))


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\xfd", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": ' * 100_000, "not JSON"),
        (b"[1, 2]", "no object"),
        (b"null", "no object"),
    ],
)
def test_bad_json(payload: bytes, why: str) -> None:
    frame = unpack(build(7, size=len(payload), payload=payload))
    with pytest.raises(ProtocolError, match=why):
        unpack_json(frame)


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=20) | st.integers(), max_size=4))
def test_json_round_trip(content: dict[str, object]) -> None:
    data = Frame(FrameKind.FAIL, payload=pack_json(content)).pack()
    assert json.loads(data[HEADER_BYTES:]) == content
    assert unpack_json(unpack(data)) == content
