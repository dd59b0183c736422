"""The frames of the zmq transport against frames built by hand, and against garbage."""

from __future__ import annotations

import contextlib
import json
import struct

import pytest
from fsdpcore.transports.zmq import wire
from fsdpcore.transports.zmq.wire import (
    MAX_INLINE,
    MAX_PAYLOAD,
    Frame,
    FrameKind,
    pack_header,
    pack_place,
    split_place,
    unpack,
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
CODES = {
    "EAGER": 2,
    "OFFER": 3,
    "GRANT": 4,
    "DATA": 5,
    "FAIL": 7,
    "BYE": 8,
    "QUERY": 9,
    "STATUS": 10,
    "SEEN": 11,
    "MEMORY": 12,
    "LEND": 13,
    "PIECE": 14,
    "TAKEN": 15,
    "REFUSE": 16,
    "NOTE": 17,
    "CREDIT": 18,
    "REPORT": 19,
}
# Those with a payload of ``size`` bytes; that of OFFER has ``offset`` bytes.
WITH_PAYLOAD = {"EAGER", "DATA", "FAIL", "STATUS", "NOTE", "REPORT"}
MESSAGES = set(CODES) - {"FAIL", "BYE", "QUERY", "STATUS", "SEEN", "NOTE", "REPORT"}


def build(
    kind: int,
    *,
    magic: bytes = b"FDP1",
    version: int = 4,
    signed: int | None = None,
    size: int = 0,
    signature: bytes = b"",
    numbers: tuple[int, int, int, int] = (11, 12, 13, 0),
) -> bytes:
    channel, tag, message, offset = numbers
    length = len(signature) if signed is None else signed
    header = struct.pack(LAYOUT, magic, version, kind, length, channel, tag, message, size, offset)
    assert len(header) == HEADER_BYTES
    return header + signature


@pytest.mark.parametrize("name", CODES)
def test_layout(name: str) -> None:
    inline = 77 if name in WITH_PAYLOAD else 14 if name == "OFFER" else 0
    payload = bytes(inline) if inline else None
    data = build(CODES[name], size=77, signature=b"sig", numbers=(11, 12, 13, 14))
    assert unpack(data, payload) == (FrameKind[name], 11, 12, 13, 77, 14, b"sig", payload)
    assert pack_header(CODES[name], 11, 12, 13, 77, 14, b"sig") == data
    wrong = [None] if inline else []
    for other in (*wrong, bytes(inline + 1), bytes(max(inline - 1, 1))):
        with pytest.raises(ProtocolError, match=f"a {name} frame announces {inline} bytes and has"):
            unpack(data, other)


def test_all_kinds_are_known_here() -> None:
    assert {kind.name: kind.value for kind in FrameKind} == CODES
    assert {kind.name for kind in wire.MESSAGES} == MESSAGES


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "shorter than any header"),
        (build(9)[:-1], "shorter than any header"),
        (build(9, magic=b"FDP2"), "does not begin"),
        (build(9, magic=b"GET "), "does not begin"),
        (build(9, version=3), "does not begin"),
        (build(0), "unknown kind 0"),
        (build(1), "unknown kind 1"),
        (build(6), "unknown kind 6"),
        (build(20), "unknown kind 20"),
        (build(255), "unknown kind 255"),
        (build(2, signature=b"s" * (MAX_SIGNATURE + 1)), "wrong length"),
        (build(13, signature=b"s" * (MAX_SIGNATURE + PLACE_BYTES + 1)), "wrong length"),
        (build(14, signature=b"s" * (MAX_SIGNATURE + 1)), "wrong length"),
        (build(7, signed=9, signature=b"12345678"), "wrong length"),
        (build(7, signed=7, signature=b"12345678"), "wrong length"),
        (build(8) + build(8), "wrong length"),
    ],
)
def test_bad_headers(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        unpack(data)


LIMITS = dict.fromkeys(WITH_PAYLOAD, MAX_INLINE) | {"DATA": MAX_PAYLOAD, "OFFER": MAX_INLINE}


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_the_limits_themselves_pass(name: str) -> None:
    payload = memoryview(bytes(LIMITS[name] + 1))
    for size in (LIMITS[name], LIMITS[name] + 1):
        # The size of what is offered is the sender's business: nothing is allocated for it.
        whole = 2**64 - 1 if name == "OFFER" else size
        data = build(CODES[name], size=whole, numbers=(1, 2, 3, size))
        if size == LIMITS[name]:
            assert len(unpack(data, payload[:size]).payload) == size
        else:
            with pytest.raises(ProtocolError, match=f"{name} frame announces {size} bytes"):
                unpack(data, payload)


def test_the_longest_signatures_pass() -> None:
    assert len(unpack(build(3, signature=b"s" * MAX_SIGNATURE)).signature) == MAX_SIGNATURE
    longest = b"s" * (MAX_SIGNATURE + PLACE_BYTES)
    assert unpack(build(13, size=2**64 - 1, signature=longest)).signature == longest


def test_where_bytes_are() -> None:
    """A LEND frame says it ahead of the signature, a PIECE frame instead of one."""
    where = struct.pack("<QQ", 2**64 - 1, 2**63 + 5)
    assert pack_place((2**64 - 1, 2**63 + 5)) == where
    for code in (13, 14):
        frame = unpack(build(code, size=77, signature=where + b"sig"))
        assert split_place(frame) == ((2**64 - 1, 2**63 + 5), b"sig")
        short = unpack(build(code, size=77, signature=where[:15]))
        with pytest.raises(ProtocolError, match=f"{short.kind.name} frame does not say where"):
            split_place(short)


def check_any(data: bytes, payload: bytes | None) -> None:
    """Whatever comes, it is refused or it is a frame that says the truth about its length."""
    with contextlib.suppress(ProtocolError):
        frame = unpack(data, payload)
        name = frame.kind.name
        inline = frame.size if name in WITH_PAYLOAD else frame.offset if name == "OFFER" else 0
        assert len(payload or b"") == inline
        assert len(data) == HEADER_BYTES + len(frame.signature)
        assert data == pack_header(*frame[:-1])


payloads = st.none() | st.binary(max_size=100)


@given(st.binary(max_size=200), payloads)
def test_garbage(data: bytes, payload: bytes | None) -> None:
    check_any(data, payload)


@given(st.binary(min_size=HEADER_BYTES - 6, max_size=200), payloads)
def test_garbage_behind_a_good_beginning(data: bytes, payload: bytes | None) -> None:
    check_any(b"FDP1\x04" + data, payload)


@given(
    st.sampled_from(list(CODES.values())),
    st.integers(0, 100),
    st.integers(0, 255),
    st.integers(0, 120),
    payloads,
)
def test_a_changed_byte_or_a_cut(
    kind: int, where: int, value: int, length: int, payload: bytes | None
) -> None:
    data = bytearray(build(kind, size=len(payload or b""), signature=b"sign"))
    data[where % len(data)] = value
    check_any(bytes(data[:length]), payload)


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
    frame = unpack(build(7, size=len(payload)), payload)
    with pytest.raises(ProtocolError, match=why):
        unpack_json(frame)


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=20) | st.integers(), max_size=4))
def test_json_round_trip(content: dict[str, object]) -> None:
    data = pack_json(content)
    assert json.loads(data) == content
    assert unpack_json(Frame(FrameKind.FAIL, payload=data)) == content
