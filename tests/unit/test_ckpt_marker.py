"""The commit marker comes back as it went in, and nothing else passes for one."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpcore.checkpoint.format.marker import MAX_MARKER_BYTES, Marker
from fsdpcore.core.errors import ArgumentError, CorruptCheckpointError

METADATA = b'{"some":"metadata"}'
MARKER = Marker.of(30, "5f0c-1", METADATA, {"loss": 1.5, "précision": -0.0})

finite = st.floats(allow_nan=False, allow_infinity=False)


def _signed(text: bytes) -> bytes:
    return text + b"checksum " + hashlib.sha256(text).hexdigest().encode() + b"\n"


@given(
    st.integers(0, 2**63 - 1),
    st.from_regex(r"[0-9A-Za-z._-]{1,128}", fullmatch=True),
    st.binary(max_size=20),
    st.dictionaries(st.text(max_size=5), finite, max_size=4),
)
def test_a_marker_comes_back(step, save_id, metadata, metrics):
    marker = Marker.of(step, save_id, metadata, metrics)
    read = Marker.from_bytes(marker.to_bytes())
    assert read == marker
    assert repr(read.metrics) == repr(metrics)  # -0.0 is not 0.0
    read.check(metadata)


def test_it_is_text_that_ends_with_its_checksum():
    text, _, last = MARKER.to_bytes()[:-1].rpartition(b"\n")
    assert last == b"checksum " + hashlib.sha256(text + b"\n").hexdigest().encode()
    assert f"metadata_bytes {len(METADATA)}\n" in text.decode()


def test_every_truncation_and_every_flipped_bit_is_noticed():
    data = MARKER.to_bytes()
    for size in range(len(data)):
        with pytest.raises(CorruptCheckpointError, match="COMMIT"):
            Marker.from_bytes(data[:size])
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptCheckpointError, match="COMMIT"):
            Marker.from_bytes(bytes(damaged))
    for more in (b"\n", b" ", data):
        with pytest.raises(CorruptCheckpointError, match="COMMIT"):
            Marker.from_bytes(data + more)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"checkpoint 1", b"checkpoint 2"),
        (b"step 30", b"step 030"),
        (b"step 30", b"step -1"),
        (b"step 30", b"step 3.0"),
        (b"step 30", b"step 9999999999999999999"),
        (b"save_id 5f0c-1", b"save_id a/b"),
        (b"save_id 5f0c-1\n", b""),
        (b"1.5", b"NaN"),
        (b"1.5", b"1e999"),
        (b"1.5", b"true"),
        (b"1.5", b"15"),
        (b'"loss":1.5', b'"loss":1.5,"loss":1.5'),
        (b'"loss":1.5', b'"loss": 1.5'),
        (b'"loss"', b'"\\ud800"'),
        (b"metrics {", b"metrics [{"),
        (b"1.5", b'{"a":' * 5000),
        (b"step", b"more 1\nstep"),
    ],
)
def test_a_lie_with_a_correct_checksum_is_refused(old, new):
    text = MARKER.to_bytes().rpartition(b"checksum ")[0]
    assert old in text
    with pytest.raises(CorruptCheckpointError, match="COMMIT"):
        Marker.from_bytes(_signed(text.replace(old, new, 1)))


def test_what_is_larger_than_any_marker_is_refused():
    with pytest.raises(CorruptCheckpointError, match="no marker"):
        Marker.from_bytes(_signed(b"x" * MAX_MARKER_BYTES))
    with pytest.raises(ArgumentError, match="fewer metrics"):
        Marker.of(1, "a", b"", {"x" * MAX_MARKER_BYTES: 1.0}).to_bytes()


def test_it_knows_its_metadata():
    with pytest.raises(CorruptCheckpointError, match=r"metadata\.json has 18 bytes"):
        MARKER.check(METADATA[:-1])
    with pytest.raises(CorruptCheckpointError, match="not what was committed"):
        MARKER.check(METADATA.replace(b"some", b"same"))


@pytest.mark.parametrize(
    ("step", "save_id", "metrics"),
    [
        (-1, "a", {}),
        (2**63, "a", {}),
        (True, "a", {}),
        (1.0, "a", {}),
        (1, "", {}),
        (1, "a b", {}),
        (1, "a\n", {}),
        (1, "a" * 129, {}),
        (1, "a", {"loss": float("nan")}),
        (1, "a", {"loss": float("inf")}),
        (1, "a", {"loss": 1}),
        (1, "a", {3: 1.0}),
        (1, "a", {"\ud800": 1.0}),
    ],
)
def test_values_that_it_cannot_hold_are_refused(step, save_id, metrics):
    with pytest.raises(ArgumentError):
        Marker.of(step, save_id, b"", metrics).to_bytes()
