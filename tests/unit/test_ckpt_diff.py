"""``diff``: names, dtypes, shapes and every bit, however the two are sharded."""

from __future__ import annotations

import math
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.ckpt_make import make_checkpoint
from support.ckpt_samples import bits, samples, saved

from fsdpcore.checkpoint.interchange.diff import compare, diff
from fsdpcore.core.errors import ArgumentError, CheckpointError, CheckpointNotFoundError


def test_equal_however_they_are_sharded(tmp_path):
    saved(tmp_path / "one", samples(), ranks=3)
    saved(tmp_path / "other", samples(), ranks=2, step=31)
    calls = []
    found = diff(tmp_path / "one", tmp_path / "other", progress=lambda *call: calls.append(call))
    assert found.equal
    nbytes = sum(array.nbytes for array in samples().values())
    assert (found.compared, found.nbytes) == (len(samples()), nbytes)
    assert (calls[0], calls[-1]) == ((0, nbytes), (nbytes, nbytes))


def test_names_shapes_and_dtypes(tmp_path):
    common = {"same": np.ones(3)}
    make_checkpoint(
        tmp_path,
        {**common, "a": np.ones(2), "shape": np.ones((2, 3)), "dtype": np.ones(4, np.float32)},
        step=1,
    )
    make_checkpoint(
        tmp_path,
        {**common, "b": np.ones(2), "shape": np.ones((3, 2)), "dtype": np.ones(4, np.int32)},
        step=2,
    )
    found = diff(tmp_path, tmp_path, step=1)
    assert (found.only_one, found.only_other) == (("a",), ("b",))
    assert [each.name for each in found.changed] == ["dtype", "shape"]
    dtype, shape = found.changed
    assert (dtype.one.dtype, dtype.other.dtype) == (np.float32, np.int32)
    assert (shape.one.shape, shape.other.shape) == ((2, 3), (3, 2))
    assert (found.values, found.compared, found.equal) == ((), 1, False)
    assert diff(tmp_path / "step_00000001", tmp_path, names="same").equal
    other_way = diff(tmp_path, tmp_path, other_step=1)
    assert (other_way.only_one, other_way.only_other) == (("b",), ("a",))


def test_patterns_that_fit_nothing_are_refused(tmp_path):
    make_checkpoint(tmp_path, {"a": np.ones(2), "only[1]": np.ones(2)}, step=1)
    make_checkpoint(tmp_path, {"a": np.ones(2)}, step=2)
    for names in ("b*", ["a", "b*"], "A"):
        with pytest.raises(ArgumentError, match=r"fits .* in .*_00000001 or .*_00000002"):
            diff(tmp_path, tmp_path, step=1, names=names)
    assert diff(tmp_path, tmp_path, step=1, names=["*", "a"]).only_one == ("only[1]",)
    # It is enough if one of the two has it, and a name fits itself.
    assert diff(tmp_path, tmp_path, step=1, names="only[1]").only_one == ("only[1]",)
    assert diff(tmp_path, tmp_path, other_step=1, names="only*").only_other == ("only[1]",)


def test_values(tmp_path):
    one = {"x": np.linspace(0, 1, 5_000_000, dtype=np.float32), "y": np.arange(5)}
    other = {name: array.copy() for name, array in one.items()}
    # Far apart, so that they are in different parts of the stream.
    other["x"][[3, 4_999_999]] += np.float32([0.25, 0.5])
    saved(tmp_path / "one", one)
    saved(tmp_path / "other", other, ranks=1)
    tracemalloc.start()
    try:
        found = diff(tmp_path / "one", tmp_path / "other", threads=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    (x,) = found.values
    assert (x.name, x.elements, x.size, x.max_abs) == ("x", 2, 5_000_000, 0.5)
    assert not found.equal
    assert peak < 48 << 20


@pytest.mark.parametrize(
    ("dtype", "one", "other", "gap"),
    [
        ("float32", 0.0, -0.0, 0.0),
        ("float32", np.nan, 1.0, math.nan),
        ("float64", np.inf, 1.0, math.inf),
        ("float64", np.inf, -np.inf, math.inf),
        ("float16", 60000, -60000, 120000),
        ("float64", 1e308, -1e308, math.inf),
        ("int8", -128, 127, 255),
        ("int64", -(2**63), 2**63 - 1, float(2**64 - 1)),
        ("uint64", 2**64 - 1, 0, float(2**64 - 1)),
        ("uint8", 3, 7, 4),
        ("bool", True, False, None),
        ("complex64", 3j, 4, 5),
        ("complex128", 3j, 4, 5),
        ("bfloat16", 1.5, -2, 3.5),
        ("float8_e4m3fn", 1.5, -2, 3.5),
        ("float8_e4m3fn", np.nan, 1, math.nan),
        ("int4", -8, 7, 15),
        ("uint4", 0, 15, 15),
    ],
)
def test_largest_difference(dtype, one, other, gap):
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    arrays = [np.array([1, value, 1, 1]).astype(kind) for value in (1, 1)]
    arrays[0][1], arrays[1][1] = one, other
    count, found = compare(*arrays)
    assert count == 1
    if gap is not None and math.isnan(gap):
        assert math.isnan(found)
    else:
        assert found == gap


def test_payloads_of_nan_are_bits():
    one = np.array([0x7FC00000, 0x3F800000], np.uint32).view(np.float32)
    other = np.array([0x7FC00001, 0x3F800000], np.uint32).view(np.float32)
    assert compare(one, other) == (1, 0.0)
    assert compare(one, one.copy()) == (0, None)


def test_with_files_of_safetensors(tmp_path):
    array = bits(4, (50, 7), np.dtype(np.float16))
    make_checkpoint(tmp_path / "run", {"a": array})
    save_file({"a": array, "b": array}, tmp_path / "x.safetensors")
    found = diff(tmp_path / "run", tmp_path / "x.safetensors")
    assert (found.only_other, found.values, found.compared) == (("b",), (), 1)
    assert diff(tmp_path / "x.safetensors", tmp_path / "x.safetensors").equal


def test_what_cannot_be_compared(tmp_path):
    make_checkpoint(tmp_path, {"a": np.ones(7)}, {"a": [(0, ("range", 2, 5))]})
    with pytest.raises(CheckpointError, match="4 of 7 elements were not saved"):
        diff(tmp_path, tmp_path)
    with pytest.raises(CheckpointNotFoundError):
        diff(tmp_path, tmp_path / "absent")
    with pytest.raises(ArgumentError, match="patterns"):
        diff(tmp_path, tmp_path, names=[])
