"""Metadata comes back as it went in; what lies is refused, in words that say where."""

from __future__ import annotations

import base64
import json
import zlib
from itertools import chain

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from support.ckpt_metadata import (
    assert_sound,
    described,
    example,
    json_values,
    metadata,
    numbers_of,
    packed,
    told_v1,
)

from fsdpcore.checkpoint.format.metadata import MAX_STEP, Metadata, StoredFile, make_metadata
from fsdpcore.checkpoint.format.packing import pack, unpack
from fsdpcore.checkpoint.format.strict_json import check_json, decode, encode
from fsdpcore.checkpoint.plan.shard_specs import ShardMetadata
from fsdpcore.checkpoint.storage.steps import StepName, check_step
from fsdpcore.core.errors import ArgumentError, CorruptCheckpointError
from fsdpcore.core.geometry.regions import Box, Range

# A busy machine is no failure.
SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@SETTINGS
@given(metadata())
def test_metadata_comes_back(made):
    assert_sound(made)
    data = made.to_bytes()
    read = Metadata.from_bytes(data)
    assert read == made
    assert list(read.tensors) == list(made.tensors)
    assert read.to_bytes() == data
    json.loads(data, parse_constant=pytest.fail)


@SETTINGS
@given(metadata())
def test_the_first_version_says_the_same(made):
    told = told_v1(made)
    for row in told["tensors"].values():
        row[2].reverse()  # which order a tensor's pieces had did not matter
    read = Metadata.from_bytes(json.dumps(told).encode())
    assert_sound(read)
    assert read == made
    assert read.to_bytes() == made.to_bytes()


@SETTINGS
@given(json_values)
def test_values_come_back_type_for_type(value):
    check_json(value, "a value")
    assert repr(decode(encode(value).encode(), "a value")) == repr(value)


def test_the_blocks_of_pieces_count_from_their_own_begin():
    made = described({"a": ("bool", (300,))}, {"a": [Range(0, 100), Range(100, 300)]}, files=1)
    assert [(p.offset, p.nbytes, p.block) for p in made.tensors["a"].pieces] == [
        (128, 100, 0),
        (228, 200, 2),
    ]
    assert made.files[0].blocks == 6
    assert made.tensors["a"].nbytes == 300
    assert made.tensors["a"].dtype == np.dtype(bool)


def test_pieces_stand_in_the_order_of_the_file_not_in_that_given():
    made = make_metadata(
        save_id="a",
        step=0,
        world_size=1,
        created="",
        files=[StoredFile("f", 64 + 16 + 16, 64, 80, 0, 0)],
        arrays={"x": ("float32", (2, 2))},
        pieces=[("x", Range(2, 4), 0, 72), ("x", Range(0, 2), 0, 64)],
    )
    pieces = made.tensors["x"].pieces
    assert [(piece.region.start, piece.offset, piece.block) for piece in pieces] == [
        (0, 64, 0),
        (2, 72, 1),
    ]


def test_all_agree_on_the_largest_step():
    """Else a save would begin that cannot end."""
    makers = [
        check_step,
        lambda step: described({}, {}, step=step).step,
        lambda step: ShardMetadata(step, 1, "s", ((),)).step,
    ]
    for made in makers:
        assert made(MAX_STEP) == MAX_STEP
        with pytest.raises(ArgumentError, match="step"):
            made(MAX_STEP + 1)
    name = StepName(MAX_STEP, 1)
    assert StepName.parse(name.name) == name
    assert StepName.parse(StepName(MAX_STEP + 1).name) is None


def test_the_content_is_what_the_docstring_says():
    told = json.loads(example().to_bytes())
    assert (told["format"], told["version"]) == ("fsdpcore.checkpoint", 2)
    sums = [f"{11:016x}", "f" * 15 + "e"]
    assert told["files"][1] == ["rank_1.safetensors", 366, 128, 318, *sums, 4]
    assert list(told["tensors"].values()) == [
        ["float32", [6, 5]],
        ["bfloat16", [4, 4]],
        ["complex128", []],
        ["bool", [3, 0]],
        ["float8_e4m3fn", [100]],
    ]
    tensors, kinds, bounds = map(numbers_of, told["pieces"])
    # In one file w [0, 7), the boxes from (0, 0) to (4, 1) and (2, 1) to (4, 4), [90, 100) of part;
    # in the other w [7, 30), the box from (0, 1) to (2, 4), the 0-d array, [5, 75) of part.
    assert tensors == [0, 1, 0, 3, -4, 1, 1, 2]
    assert kinds == [0, 1, 1, 0, 0, 1, 0, 0]
    runs = [[0, 90, 7, 0, 5 - 90], [7, 10, 23 - 7, 1, 70 - 10]]
    starts, extents = [[0, 2, 0 - 2], [0, 1, 1 - 1]], [[4, 2 - 4, 0], [1, 3 - 1, 0]]
    assert bounds == list(chain(*runs, *starts, *extents))


def _told():
    """One array of 4 by 4 bytes in two pieces, and one of 8 bytes that is stored nowhere."""
    made = described(
        {"m": ("bool", (4, 4)), "v": ("bool", (8,))},
        {"m": [Range(0, 8), Range(8, 16)], "v": []},
        files=1,
    )
    return told_v1(made)


def _set(*path):
    *steps, last, value = path

    def change(told):
        for step in steps:
            told = told[step]
        told[last] = value

    return change


def _drop(key):
    return lambda told: told.pop(key)


FIRST, SECOND = ("tensors", "m", 2, 0), ("tensors", "m", 2, 1)

LIES = {
    "another format": (_set("format", "other"), "format"),
    "newer version": (_set("version", 3), "version 3"),
    "version as bool": (_set("version", True), "version True"),
    "version as float": (_set("version", 1.0), "version 1.0"),
    "no version": (_drop("version"), "version None"),
    "key missing": (_drop("extra"), "lacks the key 'extra'"),
    "key too many": (_set("more", 1), "also has the key 'more'"),
    "step negative": (_set("step", -1), "step"),
    "step float": (_set("step", 3.0), "step"),
    "step bool": (_set("step", True), "step"),
    "step huge": (_set("step", 10**400), "step"),
    "no ranks": (_set("world_size", 0), "world_size"),
    "other number of ranks": (_set("world_size", 3), "2 values in ranks"),
    "giant world": (_set("world_size", 2**30), "2 values in ranks"),
    "ranks no list": (_set("ranks", {}), "ranks"),
    "save id": (_set("save_id", "a/b"), "id of a save"),
    "created": (_set("created", 5), "created"),
    "block 0": (_set("block_bytes", 0), "block_bytes"),
    "block huge": (_set("block_bytes", 2**62), "block_bytes"),
    "another block": (_set("block_bytes", 7), "checksums"),
    "info no object": (_set("info", []), "info"),
    "metrics int": (_set("metrics", {"a": 1}), "metrics"),
    "metrics list": (_set("metrics", [1.0]), "metrics"),
    "files no list": (_set("files", {}), "files"),
    "file no row": (_set("files", 0, "x"), "6 values"),
    "file short": (_set("files", 0, ["a", 1]), "6 values"),
    "no files": (_set("files", []), "file 0 of 0"),
    "checksum int": (_set("files", 0, 4, 5), "hexadecimal"),
    "checksum long": (_set("files", 0, 4, "0" * 17), "hexadecimal"),
    "checksum sign": (_set("files", 0, 5, "-" + "0" * 15), "hexadecimal"),
    "size float": (_set("files", 0, 1, 160.0), "number of bytes"),
    "size bool": (_set("files", 0, 1, True), "number of bytes"),
    "size over 2**63": (_set("files", 0, 1, 2**63), "number of bytes"),
    "size smaller than its parts": (_set("files", 0, 1, 100), "cannot have"),
    "size larger": (_set("files", 0, 1, 168), "3 checksums"),
    "size odd": (_set("files", 0, 1, 161), "part of a checksum"),
    "header too small": (_set("files", 0, 2, 9), "cannot have"),
    "header giant": (lambda t: t["files"][0].__setitem__(slice(1, 4), [2**61] * 3), "header of"),
    "data later": (_set("files", 0, 2, 130), "overlap"),
    "data earlier": (_set("files", 0, 2, 120), "hole"),
    "table earlier": (_set("files", 0, 3, 136), "data end at byte 136"),
    "table later": (lambda t: t["files"][0].__setitem__(slice(1, 4), [168, 128, 152]), "hole"),
    "tensors no object": (_set("tensors", []), "tensors"),
    "tensor no list": (_set("tensors", "m", {}), "'m' has no list"),
    "tensor short": (_set("tensors", "m", ["bool", [16]]), "'m' has no list"),
    "dtype unknown": (_set("tensors", "m", 0, "object"), "'m': the dtype 'object'"),
    "dtype list": (_set("tensors", "m", 0, ["bool"]), "'m': the dtype"),
    "another size": (_set("tensors", "m", 0, "int16"), "'m' has 16 bytes at byte 136"),
    "shape text": (_set("tensors", "m", 1, "44"), "'m' has no list"),
    "shape negative": (_set("tensors", "v", 1, [-8]), r"'v' has the shape \[-8\]"),
    "shape float": (_set("tensors", "v", 1, [8.0]), r"'v' has the shape \[8.0\]"),
    "shape bool": (_set("tensors", "v", 1, [True]), r"'v' has the shape \[True\]"),
    "shape nested": (_set("tensors", "v", 1, [[8]]), r"'v' has the shape \[a list\]"),
    "shape over 2**63": (_set("tensors", "v", 1, [2**63]), "2\\*\\*62 bytes"),
    "shape overflows": (_set("tensors", "v", 1, [2**32, 2**32]), "2\\*\\*62 bytes"),
    "shape overflows with 0": (_set("tensors", "v", 1, [2**32, 2**32, 0]), "2\\*\\*62 bytes"),
    "65 axes": (_set("tensors", "v", 1, [1] * 65), "65 axes"),
    "pieces no list": (_set("tensors", "m", 2, {}), "'m' has no list"),
    "piece no list": (_set(*FIRST, 5), "piece 0 of 'm'"),
    "piece long": (_set(*FIRST, [0, 128, 0, 8, 0]), "piece 0 of 'm'"),
    "file negative": (_set(*FIRST, 0, -1), "'m' lies in file -1 of 1"),
    "file that is not there": (_set(*FIRST, 0, 1), "'m' lies in file 1 of 1"),
    "file bool": (_set(*FIRST, 0, False), "'m' lies in file False"),
    "file text": (_set(*FIRST, 0, "rank_0.safetensors"), "'m' lies in file"),
    "offset negative": (_set(*FIRST, 1, -8), "at byte -8"),
    "offset float": (_set(*FIRST, 1, 128.0), "at byte 128.0"),
    "offset over 2**63": (_set(*FIRST, 1, 2**63), "at byte"),
    "offset of another piece": (_set(*FIRST, 1, 136), "pieces in the file .* hole"),
    "offset in another piece": (_set(*SECOND, 1, 135), "pieces in the file .* overlap"),
    "offset past the data": (_set(*SECOND, 1, 137), "data end at byte 144"),
    "range overlaps": (_set(*SECOND, [0, 136, 7, 15]), "pieces 0 and 1 of 'm' share"),
    "range leaves": (_set(*SECOND, [0, 136, 9, 17]), "piece 1 of 'm'"),
    "range negative": (_set(*FIRST, [0, 128, -1, 7]), "piece 0 of 'm'"),
    "range backwards": (_set(*FIRST, [0, 128, 8, 0]), "piece 0 of 'm'"),
    "range empty": (_set(*FIRST, [0, 128, 8, 8]), "piece 0 of 'm' is empty"),
    "range float": (_set(*FIRST, [0, 128, 0, 8.0]), "piece 0 of 'm'"),
    "range bool": (_set(*FIRST, [0, 128, False, 8]), "piece 0 of 'm'"),
    "range over 2**63": (_set(*FIRST, [0, 128, 2**63, 2**63 + 8]), "piece 0 of 'm'"),
    "half a box": (_set(*FIRST, [0, 128, [0, 0], 8]), "piece 0 of 'm'"),
    "box overlaps": (_set(*SECOND, [0, 136, [1, 0], [3, 4]]), "pieces 0 and 1 of 'm' share"),
    "box leaves": (_set(*SECOND, [0, 136, [3, 0], [5, 4]]), "piece 1 of 'm'"),
    "box negative": (_set(*SECOND, [0, 136, [-1, 0], [1, 4]]), "piece 1 of 'm'"),
    "box backwards": (_set(*SECOND, [0, 136, [4, 0], [2, 4]]), "piece 1 of 'm'"),
    "box empty": (_set(*SECOND, [0, 136, [2, 0], [2, 4]]), "piece 1 of 'm' is empty"),
    "box float": (_set(*SECOND, [0, 136, [2.0, 0], [4, 4]]), "piece 1 of 'm'"),
    "box bool": (_set(*SECOND, [0, 136, [2, False], [4, 4]]), "piece 1 of 'm'"),
    "box over 2**63": (_set(*SECOND, [0, 136, [2, 0], [2**63, 4]]), "piece 1 of 'm'"),
    "box of other axes": (_set(*SECOND, [0, 136, [8], [16]]), "piece 1 of 'm'"),
    "box uneven": (_set(*SECOND, [0, 136, [2, 0], [4]]), "piece 1 of 'm'"),
    "piece gone": (lambda told: told["tensors"]["m"][2].pop(), "hole"),
    "piece twice": (lambda told: told["tensors"]["m"][2].append([0, 136, 8, 16]), "share"),
    "alias of another's bytes": (_set("tensors", "v", 2, [[0, 128, 0, 8]]), "overlap"),
    "deep": (_set("extra", json.loads("[" * 65 + "]" * 65)), "extra.* nested more than 64"),
    "deep in ranks": (_set("ranks", 1, json.loads("[" * 65 + "]" * 65)), r"ranks\[1\].* nested"),
    "deep where it is no use": (_set(*FIRST, 3, json.loads("[" * 500 + "]" * 500)), "piece 0"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused(lie):
    told = _told()
    Metadata.from_bytes(json.dumps(told).encode())
    change, match = LIES[lie]
    change(told)
    with pytest.raises(CorruptCheckpointError, match=match) as caught:
        Metadata.from_bytes(json.dumps(told).encode())
    assert len(str(caught.value)) < 1000


def _told_v2():
    """A range and a box, both of 8 bytes, in one file; and an array that is stored nowhere."""
    made = described(
        {"m": ("bool", (4, 4)), "v": ("bool", (8,)), "n": ("bool", (2, 4))},
        {"m": [Range(0, 8)], "v": [], "n": [Box((0, 0), (2, 4))]},
        files=1,
    )
    return json.loads(made.to_bytes())


def _pack(column, *numbers):
    return _set("pieces", column, packed([*numbers]))


def _cut(text):
    return text[0] + base64.b64encode(base64.b64decode(text[1:])[:-1]).decode()


TENSORS, KINDS, BOUNDS = [0, 2], [0, 1], [0, 8, 0, 0, 2, 4]
MANY = "8" + base64.b64encode(zlib.compress(bytes(8 << 20))).decode()

LIES_V2 = {
    "no pieces": (_drop("pieces"), "lacks the key 'pieces'"),
    "newer version": (_set("version", 3), "version 3"),
    "rows of version 1": (lambda told: told["files"][0].pop(), "7 values"),
    "array of version 1": (lambda told: told["tensors"]["m"].append([]), "'m' has no list"),
    "shape text": (_set("tensors", "m", 1, "44"), "'m' has no list"),
    "dtype unknown": (_set("tensors", "m", 0, "object"), "'m': the dtype 'object'"),
    "shape over 2**63": (_set("tensors", "v", 1, [2**63]), "2\\*\\*62 bytes"),
    "more pieces than there are": (_set("files", 0, 6, 3), "the arrays of the pieces"),
    "fewer pieces than there are": (_set("files", 0, 6, 1), "the arrays of the pieces"),
    "pieces negative": (_set("files", 0, 6, -2), "number of pieces"),
    "pieces float": (_set("files", 0, 6, 2.0), "number of pieces"),
    "pieces huge": (_set("files", 0, 6, 2**61), "the arrays of the pieces"),
    "pieces beyond what can be counted": (_set("files", 0, 6, 2**62), "number of pieces"),
    "two texts": (lambda told: told["pieces"].pop(), "3 texts"),
    "no text": (_set("pieces", 1, 5), "are no text"),
    "no width": (_set("pieces", 1, ""), "where their width belongs"),
    "another width": (_set("pieces", 1, "3AAAA"), "where their width belongs"),
    "no base64": (_set("pieces", 1, "1~"), "cannot be unpacked"),
    "not ASCII": (_set("pieces", 1, "1é"), "cannot be unpacked"),
    "no zlib": (_set("pieces", 1, "1AAAA"), "cannot be unpacked"),
    "cut": (lambda told: told["pieces"].__setitem__(2, _cut(told["pieces"][2])), "6 numbers"),
    "more": (_pack(2, *BOUNDS, 0), "6 numbers"),
    "a bomb": (_set("pieces", 2, MANY), "6 numbers"),
    "array negative": (_pack(0, -1, 3), "arrays from -1 to 2"),
    "array that is not there": (_pack(0, 0, 3), "arrays from 0 to 3"),
    "arrays that wrap around": (_pack(0, 2**63 - 1, 2**63 - 1), "arrays from"),
    "neither range nor box": (_pack(1, 0, 2), "neither a range nor a box"),
    "range empty": (_pack(2, 0, 0, *BOUNDS[2:]), "piece 0 of 'm' is empty"),
    "range leaves": (_pack(2, 9, 8, *BOUNDS[2:]), "piece 0 of 'm'"),
    "range negative": (_pack(2, -1, 8, *BOUNDS[2:]), "piece 0 of 'm'"),
    "range that would be one in fewer bits": (_pack(2, 2**32, 8, *BOUNDS[2:]), "piece 0 of 'm'"),
    "range over 2**63": (_pack(2, 2**62, 2**62, *BOUNDS[2:]), "piece 0 of 'm'"),
    "box leaves": (_pack(2, *BOUNDS[:2], 1, 0, 2, 4), "piece 0 of 'n'"),
    "box backwards": (_pack(2, *BOUNDS[:2], 2, 0, -2, 4), "piece 0 of 'n'"),
    "they overlap": (
        lambda t: (_pack(0, 0, 0)(t), _pack(2, 0, 8, 1, 0, 2, 4)(t)),
        "0 and 1 of 'm'",
    ),
    "data longer": (_pack(2, 0, 9, *BOUNDS[2:]), "overlap"),
    "data shorter": (_pack(2, 0, 7, *BOUNDS[2:]), "hole"),
    "another size": (_set("tensors", "m", 0, "int16"), "overlap"),
    "another block": (_set("block_bytes", 7), "checksums"),
    "size larger": (_set("files", 0, 1, 168), "3 checksums"),
}


@pytest.mark.parametrize("bits", [14, 15, 16, 30, 31, 32, 60])
def test_bounds_come_back_whatever_their_size(bits):
    most = 2**bits
    cuts = {"m": [Range(0, 3), Range(most - 1, most + 5)], "n": [Box((most - 2, 1), (most + 1, 2))]}
    made = described({"m": ("bool", (most + 5,)), "n": ("bool", (most + 1, 2))}, cuts)
    found = Metadata.from_bytes(made.to_bytes())
    assert found == made
    for name, regions in cuts.items():
        assert [each.region for each in found.tensors[name].pieces] == regions


@pytest.mark.parametrize("lie", LIES_V2)
def test_lies_of_the_second_version_are_refused(lie):
    told = _told_v2()
    assert [numbers_of(each) for each in told["pieces"]] == [TENSORS, KINDS, BOUNDS]
    change, match = LIES_V2[lie]
    change(told)
    with pytest.raises(CorruptCheckpointError, match=match) as caught:
        Metadata.from_bytes(json.dumps(told).encode())
    assert len(str(caught.value)) < 1000


NAMES = [
    *("", ".", "..", ".hidden", "a/b", "/etc/passwd", "../a", "a\\b", "a\0", "a\nb", "COMMIT"),
    *("metadata.json", "x" * 256, "é" * 128, 5, None, ["a"], True),
]


@pytest.mark.parametrize("name", NAMES)
def test_files_are_in_the_folder(name):
    told = _told()
    told["files"][0][0] = name
    with pytest.raises(CorruptCheckpointError, match="name of a file"):
        Metadata.from_bytes(json.dumps(told).encode())


def test_files_have_names_of_their_own():
    told = _told()
    told["files"].append([told["files"][0][0], 128, 128, 128, "0" * 16, "0" * 16])
    with pytest.raises(CorruptCheckpointError, match="the same name"):
        Metadata.from_bytes(json.dumps(told).encode())


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (b'"step":', b'"step":5,\n"step":', "'step' is there twice"),
        (b'"m":[', b'"m":[],\n"m":[', "'m' is there twice"),
        (b'"extra":null', b'"extra":{"a":1,"a":1}', "'a' is there twice"),
        (b'"extra":null', b'"extra":NaN', "NaN is no number"),
        (b'"extra":null', b'"extra":-Infinity', "-Infinity is no number"),
        (b'"extra":null', b'"extra":1e999', "more than a float"),
        (b'"extra":null', b'"extra":' + b"9" * 5000, "strict JSON"),
        (b'"extra":null', b'"extra":' + b"9" * 1000, "2048 bits"),
        (b'"extra":null', b'"extra":"\\ud83d"', "surrogate"),
        (b'"extra":null', b'"extra":{"\\udc00\\ud83d":1}', "surrogate"),
        (b'"extra":null', b'"extra":"\xff"', "not UTF-8"),
        (b'"extra":null', b'"extra":"\xed\xa0\x80"', "not UTF-8"),
        (b'"extra":null', b'"extra":"a\nb"', "no JSON"),
        (b'"extra":null', b'"extra":' + b"[" * 100_000, "nested too deep"),
        (b'"extra":null', b'"extra":' + b'{"a":' * 100_000, "nested too deep"),
        (b'"extra":null', b'"extra":', "no JSON"),
        (b"{", b"\xef\xbb\xbf{", "no JSON|strict JSON"),
        (b"{", b"", "no JSON"),
        (b"{", b"[{", "no JSON"),
        (b"}\n", b"}\n}", "no JSON"),
    ],
)
def test_what_is_no_strict_json_is_refused(old, new, match):
    data = described({"m": ("bool", (2,))}, {"m": [Range(0, 2)]}).to_bytes()
    assert old in data
    at = data.rindex(old) if old == b"}\n" else data.index(old)
    with pytest.raises(CorruptCheckpointError, match=match):
        Metadata.from_bytes(data[:at] + new + data[at + len(old) :])


def test_every_truncation_is_noticed():
    data = example().to_bytes()
    for size in range(len(data) - 2):
        with pytest.raises(CorruptCheckpointError, match=r"metadata\.json"):
            Metadata.from_bytes(data[:size])


def test_escaped_pairs_of_surrogates_are_text():
    data = described({}, {}, extra="@").to_bytes().replace(b"@", b"\\ud83d\\ude00")
    assert Metadata.from_bytes(data).extra == "\U0001f600"


CYCLE: list[object] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ((1, 2), r"extra\['a'\]\[0\] is a builtins.tuple"),
        ({1: 2}, "has the key 1, which is no string"),
        ({None: 2}, "which is no string"),
        ({True: 2}, "which is no string"),
        ({"\ud800": 2}, "surrogate"),
        ("\udfff", "surrogate"),
        (float("nan"), "is nan"),
        (float("-inf"), "is -inf"),
        (np.float64(1.0), "numpy.float64"),
        (np.int64(1), "numpy.int64"),
        (np.zeros(2), "numpy.ndarray"),
        (b"a", "bytes"),
        ({1}, "set"),
        (1j, "complex"),
        (2**2048, "2048 bits"),
        (object(), "object"),
        (CYCLE, "nested more than 64"),
    ],
)
def test_values_that_json_cannot_hold_are_refused_at_save(value, match):
    for key, more in (("extra", {"a": [value]}), ("info", {"a": [value]})):
        with pytest.raises(ArgumentError, match=match.replace("extra", key)):
            described({}, {}, **{key: more})
    with pytest.raises(ArgumentError, match=r"ranks\[1\]"):
        described({}, {}, ranks=[None, value])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1, True, None, np.float64(1)])
def test_metrics_are_finite_floats(value):
    with pytest.raises(ArgumentError, match="metrics"):
        described({}, {}, metrics={"loss": value})


@pytest.mark.parametrize(
    ("arrays", "cuts", "match"),
    [
        ({"\ud800": ("bool", (1,))}, {}, "surrogate"),
        ({3: ("bool", (1,))}, {}, "must be a string"),
        ({"a": ("bool", (np.int64(1),))}, {}, "has the shape"),
        ({"a": ("int3", (1,))}, {}, "int3"),
        ({"a": ("bool", (4,))}, {"a": [Range(0, 3), Range(2, 4)]}, "share elements"),
        ({"a": ("bool", (4,))}, {"a": [Range(0, 5)]}, "piece 0 of 'a'"),
        ({"a": ("bool", (4,))}, {"a": [Box((0,), (5,))]}, "piece 0 of 'a'"),
        ({"a": ("bool", (4,))}, {"a": [Range(1, 1)]}, "empty"),
    ],
)
def test_what_does_not_fit_is_refused_at_save(arrays, cuts, match):
    with pytest.raises(ArgumentError, match=match):
        described(arrays, cuts)


def test_a_piece_of_no_array_is_refused():
    with pytest.raises(ArgumentError, match="no such array"):
        make_metadata(
            save_id="a",
            step=0,
            world_size=1,
            created="",
            files=[],
            arrays={},
            pieces=[("x", Range(0, 2), 0, 64)],
        )


@pytest.mark.parametrize("width", [1, 2, 4])
def test_numbers_are_packed_in_the_bits_that_they_need(width):
    most = 2 ** (8 * width - 1)
    for numbers in ([most - 1, -most], [most], [-most - 1]):
        assert unpack(pack(np.array(numbers)), len(numbers), "they").tolist() == numbers


@pytest.mark.parametrize("bits", [15, 31])
def test_a_bound_that_is_too_large_is_refused(bits):
    most = 2**bits - 1
    told = json.loads(
        described(
            {"m": ("bool", (most,))}, {"m": [Range(0, most)]}, files=1, block_bytes=2**30
        ).to_bytes()
    )
    _pack(2, 1, most)(told)
    with pytest.raises(CorruptCheckpointError, match="piece 0 of 'm'"):
        Metadata.from_bytes(json.dumps(told).encode())
