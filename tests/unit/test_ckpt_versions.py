"""A checkpoint of the first version, written without code of ours, is one like any other."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.ckpt_make import make_checkpoint
from support.fsdp_steps import launch
from typer.testing import CliRunner

import fsdpcore as fc
from fsdpcore.commands.main import app

ARRAYS = {
    "w": np.arange(60, dtype=np.float32).reshape(6, 10),
    "columns": np.arange(24, dtype=np.int16).reshape(4, 6),
    "scalar": np.array(2.5),
    "none": np.empty((0, 3), np.float32),
}
CUTS = {
    "w": [(1, ("range", 25, 60)), (0, ("range", 0, 25))],
    "columns": [(0, ("box", (0, 2), (4, 6))), (1, ("box", (0, 0), (4, 2)))],
    "scalar": [(1, ("box", (), ()))],
    "none": [],
}


@pytest.fixture
def ckpt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def ckpt(*arguments, code=0):
        done = CliRunner().invoke(app, ["ckpt", *map(str, arguments)])
        assert done.exit_code == code, done.output
        return done.stdout

    return ckpt


@pytest.fixture
def first(tmp_path):
    folder = make_checkpoint(tmp_path / "first", ARRAYS, CUTS, step=7, world_size=2)
    assert json.loads((folder / "metadata.json").read_bytes())["version"] == 1
    return folder


def saved(path, state):
    launch(lambda backend: fc.checkpoint.save(path, state, backend, step=7), 2)
    folder = path / "step_00000007"
    assert json.loads((folder / "metadata.json").read_bytes())["version"] == 2
    return folder


def test_every_command_takes_it_as_one_of_the_second(ckpt, first, tmp_path):
    second = saved(tmp_path / "second", ARRAYS)
    shown = [json.loads(ckpt("inspect", each, "--step", 7, "--json")) for each in (first, second)]
    of_first, of_second = ({each["name"]: each for each in found["arrays"]} for found in shown)
    assert {name: each["pieces"] for name, each in of_first.items()} == {
        name: len(cuts) for name, cuts in CUTS.items()
    }
    for name, each in of_first.items():
        assert each["missing"] == 0
        assert each | {"pieces": 1} == of_second[name] | {"pieces": 1}
    ckpt("verify", first)
    ckpt("diff", first, second)
    ckpt("diff", second, first)
    ckpt("export", first, "exported")
    again = saved(tmp_path / "again", fc.checkpoint.read(first))
    ckpt("diff", first, again)
    ckpt("reshard", first, "resharded", "--ranks", 3)
    told = json.loads((tmp_path / "resharded/step_00000007/metadata.json").read_bytes())
    assert told["version"] == 2
    ckpt("diff", first, "resharded")


def test_its_damage_is_found(ckpt, first):
    data = bytearray((first / "rank_1.safetensors").read_bytes())
    table = json.loads((first / "metadata.json").read_bytes())["files"][1][3]
    data[table - 1] ^= 1
    (first / "rank_1.safetensors").write_bytes(data)
    assert "rank_1.safetensors" in ckpt("verify", first, code=1)
    with pytest.raises(fc.CorruptCheckpointError):
        fc.checkpoint.read(first)


@pytest.mark.parametrize("ranks", [1, 3])
def test_any_number_of_ranks_loads_it(first, ranks):
    def body(backend):
        state = {name: np.zeros_like(array) for name, array in ARRAYS.items()}
        fc.checkpoint.load(first, state, backend)
        for name, array in ARRAYS.items():
            assert state[name].tobytes() == array.tobytes()

    launch(body, ranks)
