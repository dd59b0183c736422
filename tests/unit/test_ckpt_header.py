"""Headers of safetensors: the library reads ours, we read its, and lies are refused."""

from __future__ import annotations

import json
import math
import struct
import sys

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdpcore.checkpoint.format.dtypes import BITS, CODES
from fsdpcore.checkpoint.format.header import TensorEntry, build_header, parse_header, read_header
from fsdpcore.core.errors import ArgumentError, CorruptCheckpointError

# A busy machine is no failure.
SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
# What the library calls the dtypes that it writes from memory.
LIBRARY = {code: dtype.name for code, dtype in CODES.items()}
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def entries(draw):
    told = draw(
        st.dictionaries(
            st.text(max_size=6).filter(lambda name: name != "__metadata__"),
            st.tuples(st.sampled_from(sorted(CODES)), SHAPES),
            max_size=5,
        )
    )
    return [
        TensorEntry(name, code, shape, math.prod(shape) * CODES[code].itemsize)
        for name, (code, shape) in told.items()
    ]


texts = st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)


@settings(SETTINGS, max_examples=25)
@given(entries(), texts, st.sampled_from([1, 8, 64]))
def test_a_header_comes_back(given_entries, extra, align):
    data = build_header(given_entries, extra, align)
    size = len(data) + sum(entry.nbytes for entry in given_entries)
    header = parse_header(data, size)
    assert header.metadata == extra
    assert header.data_start == len(data)
    assert len(data) % align == 0
    assert sorted(e[:4] for e in header.entries) == sorted(map(tuple, given_entries))
    at = len(data)
    for entry in header.entries:
        assert entry.offset == at
        at += entry.nbytes


@SETTINGS
@given(entries(), texts)
def test_the_library_reads_what_we_write(given_entries, extra):
    rng = np.random.default_rng(3)
    parts = [rng.integers(0, 2, entry.nbytes, np.uint8).tobytes() for entry in given_entries]
    read = dict(safetensors.deserialize(build_header(given_entries, extra) + b"".join(parts)))
    assert set(read) == {entry.name for entry in given_entries}
    for entry, part in zip(given_entries, parts, strict=True):
        found = read[entry.name]
        assert (found["dtype"], tuple(found["shape"])) == (entry.code, entry.shape)
        assert bytes(found["data"]) == part


@pytest.mark.parametrize("code", sorted(CODES))
def test_we_read_what_the_library_writes(code, tmp_path):
    values = np.arange(6, dtype=np.uint8).repeat(CODES[code].itemsize)
    whole = np.frombuffer((values % 2).tobytes(), CODES[code]).reshape(2, 3)
    arrays = {"b": np.zeros(3, np.uint8), "wé": whole, "0-d": whole[0, :1], "none": whole[:0]}
    shapes = {"b": (3,), "wé": (2, 3), "0-d": (), "none": (0, 3)}
    specs = {
        name: safetensors.TensorSpec(
            dtype=LIBRARY[code] if name != "b" else "uint8",
            shape=shapes[name],
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in arrays.items()
    }
    try:
        data = bytes(safetensors.serialize(specs, metadata={"format": "np", "ü": "\n"}))
    except safetensors.SafetensorError:
        pytest.skip(f"this version of safetensors does not write {code} from memory")
    header = read_header(lambda offset, nbytes: data[offset : offset + nbytes], len(data))
    assert header.metadata == {"format": "np", "ü": "\n"}
    found = {entry.name: entry for entry in header.entries}
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        entry = found[name]
        assert entry.code == ("U8" if name == "b" else code)
        assert entry.shape == shapes[name]
        assert data[entry.offset : entry.offset + entry.nbytes] == array.tobytes()


def test_the_usual_way_of_the_library(tmp_path):
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"a": np.arange(4.0), "z": np.ones((2, 2), np.int16)}, path)
    data = path.read_bytes()
    header = parse_header(data, len(data))
    assert [entry[:4] for entry in header.entries] == [
        ("a", "F64", (4,), 32),
        ("z", "I16", (2, 2), 8),
    ]
    assert header.metadata == {}


def test_packed_elements_have_bits():
    assert (BITS["F4"], BITS["F6_E2M3"]) == (4, 6)
    data = _file({"a": ("F4", [4], [0, 2]), "b": ("F6_E3M2", [2, 2], [2, 5])})
    assert [entry.nbytes for entry in parse_header(data, len(data) + 5).entries] == [2, 3]
    data = _file({"a": ("F4", [3], [0, 1])})
    with pytest.raises(CorruptCheckpointError, match="do not fit"):
        parse_header(data, len(data) + 1)


def _file(tensors, **more):
    told = {
        name: {"dtype": code, "shape": shape, "data_offsets": offsets}
        for name, (code, shape, offsets) in tensors.items()
    }
    return _with_length(json.dumps({**told, **more}))


def _with_length(text: str | bytes) -> bytes:
    text = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(text)) + text


GOOD = ("U8", [4], [0, 4])


@pytest.mark.parametrize(
    ("data", "size", "match"),
    [
        (b"", 0, "not even the 8"),
        (b"1234567", 7, "not even the 8"),
        (struct.pack("<Q", 2**64 - 1), 100, "more than the 100000000"),
        (struct.pack("<Q", 10**8 + 1), 2**40, "more than the 100000000"),
        (struct.pack("<Q", 10**8), 1000, "cut off"),
        (struct.pack("<Q", 100) + b"{}", 2000, "cut off"),
        (_with_length(""), 8, "no JSON"),
        (_with_length("[]"), 10, "no JSON object"),
        (_with_length("{"), 9, "no JSON"),
        (_with_length(b'{"\xff":1}'), 15, "not UTF-8"),
        (_with_length("[" * 100_000), 100_008, "nested too deep"),
        (_with_length('{"a":NaN}'), 17, "no number of JSON"),
        (_with_length('{"a":' + "9" * 5000 + "}"), 5014, "strict JSON"),
        (_with_length('{"\\ud800":1}'), 20, "surrogate"),
        (_with_length('{"a":1,"a":1}'), 21, "twice"),
        (_file({}, a=1), None, "has no dtype"),
        (_file({}, a=[]), None, "has no dtype"),
        (_file({}, a={"dtype": "U8", "shape": []}), None, "has no dtype"),
        (_file({}, __metadata__=1), None, "does not map text to text"),
        (_file({}, __metadata__={"a": 1}), None, "does not map text to text"),
        (_file({"a": ("U9", [4], [0, 4])}), None, "unknown dtype"),
        (_file({"a": (["U8"], [4], [0, 4])}), None, "unknown dtype"),
        (_file({"a": ("U8", 4, [0, 4])}), None, "has the shape"),
        (_file({"a": ("U8", [-4], [0, 4])}), None, "has the shape"),
        (_file({"a": ("U8", [4.0], [0, 4])}), None, "has the shape"),
        (_file({"a": ("U8", [True, 4], [0, 4])}), None, "has the shape"),
        (_file({"a": ("U8", [2**64], [0, 4])}), None, "has the shape"),
        (_file({"a": ("U8", [1] * 66, [0, 1])}), None, "has the shape"),
        (_file({"a": ("U8", [2**32, 2**32], [0, 0])}), None, "do not fit"),
        (_file({"a": ("F64", [2**61], [0, 0])}), None, "do not fit"),
        (_file({"a": ("U8", [0, 2**62, 2**62], [0, 0])}), None, "do not fit"),
        (_file({"a": ("U8", [4], [4, 0])}), None, "do not fit"),
        (_file({"a": ("U8", [4], [0, 5])}), None, "do not fit"),
        (_file({"a": ("U8", [4], [0, 4, 4])}), None, "has no dtype"),
        (_file({"a": ("U8", [4], [-1, 3])}), None, "which are none"),
        (_file({"a": ("U8", [4], [0.0, 4.0])}), None, "which are none"),
        (_file({"a": ("U8", [4], [False, 4])}), None, "which are none"),
        (_file({"a": ("U8", [4], [2**63, 2**63 + 4])}), None, "which are none"),
        (_file({"a": GOOD, "b": ("U8", [4], [3, 7])}), None, "overlaps"),
        (_file({"a": GOOD, "b": ("U8", [4], [5, 9])}), None, "hole"),
        (_file({"a": ("U8", [4], [1, 5])}), None, "hole"),
        (_file({"a": GOOD, "b": ("U8", [0], [2, 2])}), None, "overlaps|hole"),
        (_file({"a": GOOD}), 3, "cut off"),
        (_file({"a": GOOD}), 5, "follows"),
    ],
)
def test_lies_are_refused(data, size, match):
    if size is None:
        size = len(data) + 4
    elif size < 8 < len(data):
        size += len(data)
    with pytest.raises(CorruptCheckpointError, match=match):
        parse_header(data, size)


def test_no_more_is_read_than_the_file_has():
    asked = []

    def read_at(offset, nbytes):
        asked.append((offset, nbytes))
        return struct.pack("<Q", 10**8)[:nbytes]

    for size in (0, 5, 8, 10**8):
        with pytest.raises(CorruptCheckpointError):
            read_header(read_at, size)
    assert asked == [(0, 0), (0, 5), (0, 8), (0, 8)]


def test_nesting_is_refused_where_python_would_recurse_too_deep():
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        for text in ("[" * 10**6, '{"]":' * 10**5, '["\\"[",' * 10**5):
            data = _with_length(text)
            with pytest.raises(CorruptCheckpointError, match="nested too deep"):
                parse_header(data, len(data))
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize(
    ("given_entries", "extra", "match"),
    [
        ([("a", "U8", (1,), 1), ("a", "U8", (1,), 1)], {}, "twice"),
        ([("__metadata__", "U8", (1,), 1)], {}, "reserved"),
        ([("__metadata__", "U8", (1,), 1)], {"a": "b"}, "reserved"),
        ([("\ud800", "U8", (1,), 1)], {}, "surrogate"),
        ([(3, "U8", (1,), 1)], {}, "must be a string"),
        ([("a", "U9", (1,), 1)], {}, "unknown dtype"),
        ([("a", "F32", (1,), 1)], {}, "do not fit"),
        ([], {"a": 1}, "must be a string"),
        ([], {1: "a"}, "must be a string"),
        ([], {"a": "\udfff"}, "surrogate"),
    ],
)
def test_what_a_header_cannot_say_is_refused(given_entries, extra, match):
    with pytest.raises(ArgumentError, match=match):
        build_header([TensorEntry(*entry) for entry in given_entries], extra)


HALF = 2**62


@pytest.mark.parametrize(
    ("tensors", "fits"),
    [
        ([("U8", (1,) * 65, 1)], True),  # of 64 axes, and one of the parts of complex numbers
        ([("U8", (1,) * 66, 1)], False),
        ([("U8", (2.0,), 2)], False),
        ([("U8", (True,), 1)], False),
        ([("U8", (-1, -1), 1)], False),
        ([("U8", (2**63, 0), 0)], False),
        ([("U8", (2**63 - 1, 0), 0)], True),
        ([("U8", (2**62, 4, 0), 0)], False),
        ([("F4", (3,), 1)], False),
        ([("F4", (4,), 2)], True),
        ([("U8", (HALF,), HALF), ("U8", (HALF - 1,), HALF - 1)], True),
        ([("U8", (HALF,), HALF), ("U8", (HALF,), HALF)], False),
    ],
)
def test_what_is_written_can_be_read_and_the_rest_neither(tensors, fits):
    entries, told, end = [], {}, 0
    for number, (code, shape, nbytes) in enumerate(tensors):
        entries.append(TensorEntry(str(number), code, shape, nbytes))
        told[str(number)] = (code, list(shape), [end, end + nbytes])
        end += nbytes
    data = _file(told)
    if fits:
        header = build_header(entries, {})
        for each in (data, header):
            found = parse_header(each, len(each) + end).entries
            assert [entry[:4] for entry in found] == [tuple(entry) for entry in entries]
    else:
        with pytest.raises(ArgumentError):
            build_header(entries, {})
        with pytest.raises(CorruptCheckpointError):
            parse_header(data, len(data) + end)


def test_a_header_that_is_too_large_is_refused():
    with pytest.raises(ArgumentError, match="in several files"):
        build_header([], {"a": "b" * 100_000_000})
