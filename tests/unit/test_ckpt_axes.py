"""Checkpoints written anew, cut along any axis; NumPy's slices and safetensors are the oracles."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from support.ckpt_make import make_checkpoint
from support.ckpt_regions import elements, shapes
from support.ckpt_samples import saved
from typer.testing import CliRunner

from fsdpcore.checkpoint import read, rewrite, verify
from fsdpcore.checkpoint.interchange import array_sources
from fsdpcore.checkpoint.interchange.array_sources import ArraySpec
from fsdpcore.checkpoint.interchange.splitting import by_axis
from fsdpcore.commands.main import app
from fsdpcore.core.errors import ArgumentError

STATE = {
    "block.weight": np.arange(35, dtype=np.float32).reshape(5, 7),
    "block.bias": np.arange(7, dtype=np.float32),
    "norm.weight": np.arange(7, dtype=np.float16),
    "cube": np.arange(60, dtype=np.int16).reshape(3, 4, 5),
    "scalar": np.array(3.0),
    "none": np.empty((0, 4)),
}


def shares(array, ranks, axis):
    """What each rank is to have: as many rows as fit, the last ones what is left."""
    share = max(1, -(-array.shape[axis] // ranks))
    return [
        np.moveaxis(np.moveaxis(array, axis, 0)[r * share :][:share], 0, axis) for r in range(ranks)
    ]


def files(folder, ranks):
    """The arrays in each rank's file, by the library of safetensors."""
    found = []
    for rank in range(ranks):
        path = folder / f"rank_{rank}.safetensors"
        found.append({})
        if path.exists():
            with safe_open(path, "numpy") as file:
                found[-1] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def check_cut(folder, name, array, ranks, axis):
    for here, wanted in zip(files(folder, ranks), shares(array, ranks, axis), strict=True):
        if not wanted.size:
            assert name not in here
            continue
        # A share that is a run of elements has that shape, or none.
        assert here[name].shape in (wanted.shape, (wanted.size,))
        assert here[name].reshape(-1).tolist() == wanted.reshape(-1).tolist()


def same(found, state):
    assert list(found) == list(state)
    return all(found[name].tobytes() == array.tobytes() for name, array in state.items())


@pytest.fixture
def run(tmp_path):
    saved(tmp_path / "run", STATE)
    return tmp_path / "run"


def test_along_one_axis(run, tmp_path):
    done = rewrite(run, tmp_path / "copy", 4, axis=1)
    folder = tmp_path / "copy" / done.name
    assert verify(folder).valid
    assert same(read(tmp_path / "copy"), STATE)
    check_cut(folder, "block.weight", STATE["block.weight"], 4, 1)
    check_cut(folder, "cube", STATE["cube"], 4, 1)
    again = rewrite(tmp_path / "copy", tmp_path / "again", 3, axis=-1)
    check_cut(tmp_path / "again" / again.name, "cube", STATE["cube"], 3, 2)
    check_cut(tmp_path / "again" / again.name, "block.bias", STATE["block.bias"], 3, 0)
    rewrite(tmp_path / "again", tmp_path / "one", 1)
    assert same(read(tmp_path / "one"), STATE)


def test_along_an_axis_for_each(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--axis", "norm*=flat", "--axis", "*.weight=1", "--axis", "cube=2", "--json"]
    done = CliRunner().invoke(app, ["ckpt", "reshard", str(run), "copy", "-n", "2", *options])
    assert done.exit_code == 0, done.output
    folder = tmp_path / "copy" / json.loads(done.stdout)["name"]
    check_cut(folder, "block.weight", STATE["block.weight"], 2, 1)
    check_cut(folder, "cube", STATE["cube"], 2, 2)
    check_cut(folder, "norm.weight", STATE["norm.weight"], 2, 0)
    assert same(read("copy"), STATE)


@given(st.data(), shapes(), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_any_shape_along_any_axis(data, shape, ranks):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1) if shape else st.just(None))
    files = by_axis({"a": ArraySpec(array.dtype, shape)}, ranks, {"a": axis})
    for here, wanted in zip(files, shares(array, ranks, axis or 0) if shape else [], strict=False):
        assert len(here) == bool(wanted.size)
        for piece in here:
            assert elements(piece.region, shape) == wanted.reshape(-1).tolist()
    assert sum(piece.region.size for here in files for piece in here) == array.size


def test_through_little_memory(tmp_path, monkeypatch):
    """Boxes in several windows, from boxes along another axis."""
    monkeypatch.setattr(array_sources, "WINDOW_BYTES", 1 << 16)
    array = np.random.default_rng(1).integers(0, 1 << 30, (70, 301, 9), np.int32)
    make_checkpoint(tmp_path / "run", {"a": array})
    rewrite(tmp_path / "run", tmp_path / "first", 3, axis=1)
    done = rewrite(tmp_path / "first", tmp_path / "second", 2, axis=2)
    assert verify(tmp_path / "second").valid
    check_cut(tmp_path / "second" / done.name, "a", array, 2, 2)
    assert same(read(tmp_path / "second"), {"a": array})


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        (3, "no array has the axis 3"),
        ({"*.weight": 1}, r"'norm\.weight' of shape \(7,\) does not have the axis 1"),
        ({"no*such": 0}, r"no array whose name fits 'no\*such'"),
        ({"cube": "rows"}, "the axis of 'cube' must be an integer"),
        ("rows", "axis must be an integer"),
        ({3: 0}, "patterns"),
    ],
)
def test_what_cannot_be_cut(run, tmp_path, axis, words):
    with pytest.raises(ArgumentError, match=words):
        rewrite(run, tmp_path / "copy", 2, axis=axis)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("option", ["one", "a=b", "cube=1.5"])
def test_an_option_that_is_none(run, option):
    done = CliRunner().invoke(
        app, ["ckpt", "reshard", str(run), "copy", "-n", "2", "--axis", option]
    )
    assert done.exit_code == 2
    assert f"PATTERN=AXIS, got '{option}'" in done.output
