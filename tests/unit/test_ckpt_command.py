"""``fsdpcore ckpt``, inside this process: what it prints, and exit codes."""

from __future__ import annotations

import json
import os
import subprocess

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.ckpt_make import make_checkpoint
from support.ckpt_samples import saved
from support.ckpt_steps import write as write_leftover
from support.jobs import python
from typer.testing import CliRunner

from fsdpcore.checkpoint.load.read import read
from fsdpcore.checkpoint.storage.local_storage import LocalStorage
from fsdpcore.checkpoint.storage.steps import StepName
from fsdpcore.commands.ckpt.progress import size
from fsdpcore.commands.main import app

COMMANDS = (
    "inspect",
    "verify",
    "reshard",
    "consolidate",
    "export",
    "import",
    "diff",
    "clean",
)
STATE = {
    "net.w": np.arange(6000, dtype=np.float32).reshape(60, 100),
    "net.b": np.array(1.5, np.float32),
    "optimizer/m/net.w": np.zeros((60, 100), np.float32),
}


@pytest.fixture
def ckpt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def ckpt(*arguments, code=0):
        result = CliRunner().invoke(app, ["ckpt", *map(str, arguments)])
        assert result.exit_code == code, result.output
        return result

    return ckpt


@pytest.fixture
def run(tmp_path):
    saved(tmp_path / "run", STATE, ranks=2, step=7, metrics={"loss": 0.5}, extra={"at": 3})
    return tmp_path / "run"


def told(result):
    return json.loads(result.stdout)


def only_line(result):
    (line,) = result.output.splitlines()
    assert line.startswith("fsdpcore: ")
    return line


def damage(run):
    path = run / "step_00000007" / "rank_1.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_the_exit_codes_mean(ckpt, command):
    text = " ".join(ckpt(command, "--help").output.split())
    assert "Exit codes: 0" in text
    assert " 2 " in text


def test_inspect_a_folder(ckpt, run):
    storage = LocalStorage(str(run))
    storage.make_directory("step_00000009")
    write_leftover(storage, StepName(9))
    make_checkpoint(run, {"a": np.ones(3)}, step=8)
    (run / "step_00000008" / "rank_0.safetensors").unlink()
    lines = ckpt("inspect", run).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "9", "8", "7"]
    assert "not valid: step_00000009 was not finished: it has no COMMIT" in lines[1]
    assert "not valid: step_00000008/rank_0.safetensors is missing" in lines[2]
    assert "complete" in lines[3]
    assert "46.9 KiB" in lines[3]
    rows = told(ckpt("inspect", run, "--json"))["steps"]
    assert [(row["step"], row["valid"]) for row in rows] == [(9, False), (8, False), (7, True)]
    assert rows[2]["ranks"] == 2
    assert rows[2]["tensors"] == 3
    assert rows[2]["nbytes"] == 48004
    assert rows[2]["metrics"] == {"loss": 0.5}


def test_inspect_a_step(ckpt, run):
    text = ckpt("inspect", run / "step_00000007").stdout
    assert "by 2 ranks, 3 tensors, 46.9 KiB in 2 files" in text
    assert "loss" in text
    (line,) = [line for line in text.splitlines() if line.split()[0] == "net.w"]
    assert line.split() == ["net.w", "float32", "(60,", "100)", "23.4", "KiB", "2"]
    assert "fits 'opt.*'" in only_line(ckpt("inspect", run, "--names", "opt.*", code=2))
    step = told(ckpt("inspect", run, "--step", 7, "--names", "net.*", "--json"))
    assert [array["name"] for array in step["arrays"]] == ["net.w", "net.b"]
    assert step["arrays"][0] == {
        "name": "net.w",
        "dtype": "float32",
        "shape": [60, 100],
        "nbytes": 24000,
        "pieces": 2,
        "missing": 0,
    }
    assert step["extra"] == {"at": 3}


def test_inspect_what_is_not_there(ckpt, run, tmp_path):
    assert "there is no checkpoint in" in only_line(ckpt("inspect", tmp_path / "x", code=2))
    assert "no checkpoint of step 9" in only_line(ckpt("inspect", run, "--step", 9, code=2))
    (run / "step_00000007" / "rank_0.safetensors").unlink()
    ckpt("inspect", run, code=1)


def test_names_cannot_control_the_terminal(ckpt, tmp_path):
    make_checkpoint(tmp_path, {"\x1b[31m[bold]red": np.ones(3)})
    text = ckpt("inspect", tmp_path, "--step", 30).stdout
    assert "\x1b" not in text
    assert "[bold]red" in text


def test_verify(ckpt, run):
    assert ckpt("verify", run).stdout.startswith("step_00000007: valid; 4 files, ")
    damage(run)
    result = ckpt("verify", run, "--threads", 2, code=1)
    first, last = result.stdout.splitlines()
    assert first.startswith("rank_1.safetensors: bytes [")
    assert last.startswith("step_00000007: 1 problem; 4 files")
    found = told(ckpt("verify", run, "--json", code=1))
    assert (found["valid"], found["step"]) == (False, 7)
    assert [problem["file"] for problem in found["problems"]] == ["rank_1.safetensors"]
    assert "there is no" in only_line(ckpt("verify", run, "--step", 8, code=2))


def test_reshard_and_consolidate(ckpt, run, tmp_path):
    assert "step_00000007, 46.9 KiB" in ckpt("reshard", run, "three", "-n", 3).stdout
    assert len(list((tmp_path / "three" / "step_00000007").glob("rank_*"))) == 3
    found = told(ckpt("consolidate", "three", "one", "--json"))
    assert (found["path"], found["step"], found["nbytes"]) == ("one", 7, 48004)
    assert len(list((tmp_path / "one" / "step_00000007").glob("rank_*"))) == 1
    assert "equal" in ckpt("diff", run, "one").stdout
    only_line(ckpt("consolidate", run, "one", code=2))
    ckpt("consolidate", run, "one", "--overwrite")
    damage(run)
    assert "checksum" in only_line(ckpt("reshard", run, "four", "-n", 4, code=1))
    assert os.listdir(tmp_path / "four") == []


def test_export_and_import(ckpt, run, tmp_path):
    text = ckpt(
        "export", run, "x.safetensors", "--strip-prefix", "net.", "--dtype", "fp16"
    ).stdout.splitlines()
    assert text[0] == "step_00000007: 2 tensors, 11.7 KiB"
    assert text[1].strip() == str(tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors")
    assert set(found) == {"w", "b"}
    assert found["b"].dtype == np.float16
    assert "is there already" in only_line(ckpt("export", run, "x.safetensors", code=2))

    done = told(ckpt("export", run, "hf", "--max-shard-size", "20KB", "--json"))
    assert (done["tensors"], len(done["files"])) == (2, 3)
    ckpt("import", "hf", "again", "--step", 5, "--max-file-size", "10kb")
    assert len(list((tmp_path / "again" / "step_00000005").glob("rank_*"))) == 3
    arrays = read(tmp_path / "again")
    assert np.array_equal(arrays["net.w"], STATE["net.w"])
    found = told(ckpt("diff", run, "again", "--json", code=1))
    assert (found["only_one"], found["compared"]) == (["optimizer/m/net.w"], 2)
    assert not found["values"]


def test_new_names(ckpt, run, tmp_path):
    (tmp_path / "names.json").write_text(json.dumps({"net.w": "weight"}))
    ckpt("export", run, "x.safetensors", "--rename-file", "names.json", "--rename", "net.b=bias")
    assert set(load_file(tmp_path / "x.safetensors")) == {"weight", "bias"}
    options = ("--names", "weight", "--add-prefix", "net.", "-n", 2)
    ckpt("import", "x.safetensors", "again", *options)
    assert list(read(tmp_path / "again")) == ["net.weight"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--dtype", "float7"), "float7"),
        (("--rename", "a"), "OLD=NEW"),
        (("--rename-file", "absent"), "cannot be read"),
        (("--max-shard-size", "much"), "much"),
        (("--names", "x*"), "no array whose name fits"),
        (("--step", "-1"), "step must be at least 0"),
    ],
)
def test_wrong_options(ckpt, run, tmp_path, arguments, words):
    assert words in only_line(ckpt("export", run, "x", *arguments, code=2))
    assert os.listdir(tmp_path) == ["run"]


def test_diff(ckpt, run, tmp_path):
    other = {**STATE, "net.w": STATE["net.w"].copy(), "more": np.ones(2), "net.b": np.ones(3)}
    other["net.w"][5, 5] += 0.25
    del other["optimizer/m/net.w"]
    saved(run, other, ranks=1, step=8)
    lines = ckpt("diff", run, "--step", 7, "--other-step", 8, code=1).stdout.splitlines()
    assert lines == [
        "only in the first: optimizer/m/net.w",
        "only in the second: more",
        "net.b: float32 of shape () in the first, float64 of shape (3,) in the second",
        "net.w: 1 of 6000 elements differ, by at most 0.25",
        "0 arrays are equal; 23.4 KiB compared",
    ]
    found = told(ckpt("diff", run / "step_00000007", run / "step_00000008", "--json", code=1))
    assert found["values"] == [{"name": "net.w", "elements": 1, "size": 6000, "max_abs": 0.25}]
    assert ckpt("diff", run, run, "--names", "net.*").exit_code == 0
    assert "fits 'opt.*'" in only_line(ckpt("diff", run, run, "--names", "opt.*", code=2))
    assert "compare with what?" in only_line(ckpt("diff", run, code=2))
    only_line(ckpt("diff", run, tmp_path / "absent", code=2))


def test_the_best_step_by_a_metric(ckpt, run):
    saved(run, STATE | {"n": np.int8(5)}, ranks=1, step=8, metrics={"loss": 0.7})
    assert "n: int8 5" in ckpt("inspect", run, "--step", "latest").stdout
    for step, number in (("best:loss", 7), ("best:-loss", 8), ("latest", 8), ("7", 7)):
        name = f"step_{number:08}"
        assert name in ckpt("inspect", run, "--step", step).stdout
        assert ckpt("verify", run, "--step", step).stdout.startswith(name)
    both = ("--step", "best:loss", "--other-step", "best:-loss")
    assert "n: the values differ" in ckpt("diff", run, *both, code=1).stdout
    for command in (("inspect", run), ("verify", run), ("diff", run, run)):
        line = only_line(ckpt(*command, "--step", "best:los", code=2))
        assert "'los'" in line
        assert "metrics are" in line
    damage(run)
    assert "1 problem" in ckpt("verify", run, "--step", "best:loss", code=1).stdout


def test_differences_that_json_has_no_number_for(ckpt, tmp_path):
    for name, value in (("x", 1.0), ("y", np.nan)):
        save_file({"a": np.array([value])}, tmp_path / f"{name}.safetensors")
    found = told(ckpt("diff", "x.safetensors", "y.safetensors", "--json", code=1))
    assert found["values"][0]["max_abs"] == "nan"


def test_clean(ckpt, run):
    assert ckpt("clean", run).stdout == "there was nothing to remove\n"
    storage = LocalStorage(str(run))
    storage.make_directory("step_00000009")
    write_leftover(storage, StepName(9))
    assert ckpt("clean", run).stdout == "removed step_00000009\n"
    assert told(ckpt("clean", run, "--json")) == {"removed": [], "failed": []}
    assert os.listdir(run) == ["step_00000007"]


def test_a_bar_on_a_terminal_only(ckpt, run):
    """On stderr, so that stdout is the same in a script and on a terminal."""
    command = python("-m", "fsdpcore", "ckpt", "verify", run)
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", 0) as screen:
        try:
            shown = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=theirs, check=True, timeout=120
            )
        finally:
            os.close(theirs)
        assert b"verify" in screen.read(4096)
    hidden = subprocess.run(command, capture_output=True, check=True, timeout=120)
    assert hidden.stdout == shown.stdout
    assert hidden.stderr == b""


def test_sizes_in_words():
    assert [size(n) for n in (0, 1023, 1024, 3 << 29)] == ["0 B", "1023 B", "1.0 KiB", "1.5 GiB"]
