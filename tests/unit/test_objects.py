"""Objects as bytes: they come back as they went in, and no bytes do anything but that or fail."""

from __future__ import annotations

import pickle
import random
import struct
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.bodies.objects import same

import fsdpcore as fc
from fsdpcore.core.errors import ArgumentError, ProtocolError
from fsdpcore.core.objects import HEADER_BYTES, MAX_DEPTH, pack, unpack

ML = [np.dtype(getattr(ml_dtypes, n)) for n in ("bfloat16", "float8_e5m2", "float8_e8m0fnu")]
DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(),
    hnp.integer_dtypes(endianness=">"),
    hnp.floating_dtypes(sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(sizes=(64, 128)),
    hnp.unicode_string_dtypes(max_len=5),
    hnp.byte_string_dtypes(max_len=5),
    hnp.datetime64_dtypes(),
    hnp.timedelta64_dtypes(endianness=">"),
    st.sampled_from(ML),
)


@st.composite
def arrays(draw: Any, least: int = 0) -> Any:
    """Of any bytes that are values of the dtype, and with strides of any kind."""
    dtype = draw(DTYPES)
    shape = draw(hnp.array_shapes(min_dims=least, max_dims=3, min_side=0, max_side=4))
    if dtype in ML:
        count = int(np.prod(shape)) * dtype.itemsize
        found = np.frombuffer(draw(st.binary(min_size=count, max_size=count)), dtype)
        found = found.reshape(shape)
    else:
        found = draw(hnp.arrays(dtype, shape))
    return draw(st.sampled_from([found, found.T, found[..., ::-1] if found.ndim else found]))


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = arrays(0).filter(lambda a: a.size and a.dtype.kind not in "SU").map(lambda a: a.flat[0])
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(0, 3).map(lambda n: (-1) ** n * 2 ** (64 * n - 1)),
    st.binary(min_size=8, max_size=8).map(lambda b: struct.unpack("<d", b)[0]),
    TEXT,
    st.binary(),
    arrays(),
    SCALARS,
)
OBJECTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(TEXT, st.integers()), inner, max_size=4),
    ),
    max_leaves=8,
)


@settings(max_examples=25)
@given(OBJECTS)
def test_what_goes_in_comes_out(value: Any) -> None:
    frame = pack(value, "here")
    assert same(unpack(frame), value)
    assert unpack(pack([value], "here", pickled=True), pickled=True) is not None


EVERY_KIND = {
    "a": [None, True, False, 3, 2**70, -(2**64), 0.5, "text", b"bytes", (1, ())],
    4: {"f": np.arange(3.0), "text": np.array(["a", "bcd"]), "none": np.zeros((0, 2), np.int8)},
    "bits": [np.array([True]), np.array(1, ml_dtypes.bfloat16), np.float32(2), np.uint8(3)],
    "when": np.datetime64("2020-01-01"),
}


def test_other_bytes_are_refused_or_are_another_object() -> None:
    frame, dice = pack(EVERY_KIND, "here").tobytes(), random.Random(0)
    for _ in range(1000):
        bad = bytearray(frame)
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(len(bad) - 8)
            match dice.randrange(5):
                case 0:
                    bad[at] ^= 1 << dice.randrange(8)
                case 1:
                    bad[at] = dice.choice(b"NTFiIDSBLUMAG\0\1\xff")
                case 2:
                    bad[at : at + 8] = dice.choice([2**31, 2**62, 2**64 - 1]).to_bytes(8, "little")
                case 3:
                    del bad[at]
                case 4:
                    bad.insert(at, 0)
        if dice.random() < 0.7:  # past the check of the size
            bad = bytearray(_framed(bytes(bad[HEADER_BYTES:])))
        _taken_or_refused(bytes(bad))


@settings(max_examples=60)
@given(st.lists(st.sampled_from([*b"NTFiIDSBLUMAG", *range(0, 256, 9)])).map(bytes))
def test_any_bytes_are_refused_or_an_object(body: bytes) -> None:
    _taken_or_refused(_framed(body))


@pytest.mark.parametrize(
    "body",
    [
        b"L" + (2**40).to_bytes(8, "little"),
        b"U" + (2**64 - 1).to_bytes(8, "little"),
        b"B" + (2**63).to_bytes(8, "little"),
        b"A" + struct.pack("<Q3sQQQ", 3, b"<f8", 2, 2**40, 2**40),
        b"A" + struct.pack("<Q3sQQQ", 3, b"<f8", 2, 0, 2**63),
        b"A" + struct.pack("<Q3sQQ", 3, b"<f8", 2**63, 1),
        b"A" + struct.pack("<Q2sQ", 2, b"|O", 0) + bytes(8),
        b"A" + struct.pack("<Q3sQ", 3, b"|V8", 0) + bytes(8),
        b"A" + struct.pack("<Q3sQB", 3, b"|b1", 0, 2),
        b"A" + struct.pack("<Q3sQI", 3, b"<U1", 0, 0x110000),
        b"G" + struct.pack("<Q3sQQ", 3, b"|u1", 1, 1) + b"\0",
        b"M" + struct.pack("<Q", 2) + (b"i" + bytes(8) + b"N") * 2,
        b"M" + struct.pack("<Q", 1) + b"NN",
        b"NN",
        b"S" + struct.pack("<Q", 1) + b"\xff",
        (b"L" + struct.pack("<Q", 1)) * (MAX_DEPTH + 1) + b"N",
        (b"L" + struct.pack("<Q", 1)) * 100_000 + b"N",
        pickle.dumps(print),
    ],
    ids=lambda body: ascii(body[:20]),
)
def test_bytes_that_are_no_object(body: bytes) -> None:
    assert not _taken_or_refused(_framed(body))


def _framed(body: bytes) -> bytes:
    return struct.pack("<3sBQ", b"FCO", 0, len(body)) + body


def _taken_or_refused(data: bytes) -> bool:
    """Whether the bytes are an object; little memory is used for them either way."""
    tracemalloc.start()
    try:
        found = unpack(np.frombuffer(data, np.uint8))
    except ProtocolError:
        return False
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 100_000 + 300 * len(data)
    assert same(unpack(pack(found, "again")), found)
    return True


def test_pickled_ones_are_made_only_for_who_asks() -> None:
    frame = pack(print, "here", pickled=True)
    assert unpack(frame, pickled=True) is print
    with pytest.raises(ProtocolError):
        unpack(frame)
    with pytest.raises(ProtocolError):
        unpack(pack(1, "here"), pickled=True)


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_nesting_has_a_limit() -> None:
    assert same(unpack(pack(_nested(MAX_DEPTH), "here")), _nested(MAX_DEPTH))
    itself: list[Any] = []
    itself.append(itself)
    for value in (_nested(MAX_DEPTH + 1), itself):
        with pytest.raises(ArgumentError, match=f"more than {MAX_DEPTH} deep"):
            pack(value, "here")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1, {2, 3}], r"here: at \[1\]: a set cannot be sent; convert it"),
        ({"a": (0, 1j)}, r"at \['a'\]\[1\]: a complex cannot"),
        ({True: 1}, "a dict with the key True"),
        (np.array([None]), "an array of dtype object"),
        (np.ma.array([1]), r"MaskedArray cannot be sent; np.asarray\(\)"),
        (np.zeros(2, "f4,i4"), "an array of dtype"),
        (np.zeros(1, ml_dtypes.int4), "an array of dtype int4"),
        (np.str_("a\0"), "ends with a null"),
        ("\udc80", "half of a surrogate pair"),
    ],
)
def test_what_is_refused(value: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        pack(value, "here")


class Tracked:
    """An array that gives its numbers without its history only, as PyTorch's does."""

    def __init__(self, kept: bool = True) -> None:
        self._kept = kept

    def detach(self) -> Tracked:
        return Tracked(False)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if self._kept:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad")
        return np.array([0.5, 2.0], np.float32)


def test_metrics_of_other_libraries() -> None:
    def main(backend: fc.Backend) -> list[float]:
        masked = np.ma.array([1.0, 2.0], mask=[False, True])
        with pytest.raises(ArgumentError, match="'loss' is a masked array"):
            fc.average_metrics({"loss": masked}, backend)
        found: list[float] = fc.average_metrics({"loss": Tracked()}, backend)["loss"].tolist()
        return found

    assert fc.launch(main, world_size=1, transport="sim") == [[0.5, 2.0]]
