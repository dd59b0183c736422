"""``bench/checkpoint.py``: tiny states of real ranks, and whether it would notice wrong values."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from support.jobs import clean_environ
from typer.testing import CliRunner

import fsdpcore as fc

BENCH = Path(__file__).parents[2] / "bench"
TINY = ["--size", "64KiB", "--layers", 1, "--rounds", 2]
SMALL = 64 << 10

HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.fixture
def module(monkeypatch):
    """Import a module of the bench by name."""
    monkeypatch.syspath_prepend(str(BENCH))
    return lambda name: importlib.import_module(f"checkpoint_bench.{name}")


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Run the command in this process; its ranks are processes of their own."""
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])  # which the script extends
    for name in set(os.environ) - set(clean_environ()):
        monkeypatch.delenv(name)
    spec = importlib.util.spec_from_file_location("checkpoint_script", BENCH / "checkpoint.py")
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "checkpoint_script", script)  # where typer looks up the types
    spec.loader.exec_module(script)
    app = typer.Typer()
    app.command()(script.main)
    for place in ("disk", "memory"):
        (tmp_path / place).mkdir()
    folders = ["--dir", tmp_path / "disk", "--shm", tmp_path / "memory"]
    return lambda *arguments: CliRunner().invoke(app, [*map(str, [*folders, *arguments])])


@pytest.mark.tools
def test_every_operation(bench, tmp_path):
    record = tmp_path / "checkpoint.json"
    cases = ["save-tmpfs", "reshard-disk", "stall-disk"]  # a load with as many ranks is less
    options = ["--cases", ",".join(cases), "--transport", "sim", "--against", "none"]
    done = bench(*TINY, *options, "--cold", "--json", record)
    assert done.exit_code == 0, done.output

    content = json.loads(record.read_text())
    assert content["schema"] == "fsdpcore.bench.checkpoint/1"
    assert content["settings"]["cases"] == cases
    assert [result["case"] for result in content["results"]] == cases
    for result in content["results"]:
        ours, beside = result["rows"]
        ranks = 4 if result["operation"] == "reshard" else 2
        stalled = result["operation"] == "stall"
        assert [ours["contestant"], beside["contestant"]] == [
            "fsdpcore",
            "memcpy" if stalled else "plain files",
        ]
        assert (ours["wrong"], beside["wrong"]) == (0, None)
        assert [len(each) for each in ours["samples_ms"]] == [ranks, ranks]
        assert ours["time_ms"]["lowest"] == min(map(max, ours["samples_ms"])) > 0
        assert len(ours["added_mib"]) == ranks
        assert set(result["ratios"]) == set(result["best_ratios"]) == {beside["contestant"]}
        assert (result["stall_over_memcpy"] is not None) == stalled
        if stalled:
            assert ours["durable_ms"] >= ours["time_ms"]["median"]
            assert "times a memcpy of the shard" in done.output
    # Nothing of it is left.
    assert [*(tmp_path / "disk").iterdir(), *(tmp_path / "memory").iterdir()] == []


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
def test_beside_dcp(bench, tmp_path):
    record = tmp_path / "checkpoint.json"
    options = ["--transport", "sim", "--against", "dcp", "--json", record]
    done = bench(*TINY, *options, "--cases", "save-disk,reshard-disk,stall-disk")
    assert done.exit_code == 0, done.output
    assert "dcp writes with" in done.output
    for result in json.loads(record.read_text())["results"]:
        assert [row["contestant"] for row in result["rows"]][:2] == ["fsdpcore", "dcp"]
        assert result["rows"][1]["wrong"] == 0
        assert result["ratios"]["dcp"]["median"] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cases", "save-disc"], "did you mean 'save-disk'"),
        (["--cases", ","], "--cases needs at least one of save-disk"),
        (["--size", "many"], "is no size"),
        (["--size", "1KiB"], "choose a larger --size"),
        (["--size", "4000000GiB"], "MiB free, too little for 2 checkpoints"),
        (["--rounds", 0], "--rounds must be at least 1"),
        (["--readers", 3], "--readers must be a multiple of -n"),
        (["-n", 0], "must be at least 1"),
        (["--against", "dpc"], "did you mean 'dcp'"),
        (["--peer-setting", "best"], "--peer-setting must be auto or one of"),
        (["--dir", "nowhere/at/all", "--cases", "save-disk"], "no directory that can be written"),
        (["--json", "nowhere/at/all.json"], "there is no directory"),
    ],
)
def test_what_is_wrong_is_one_line(bench, options, words):
    done = bench(*options)
    assert done.exit_code == 2
    (line,) = done.output.splitlines()
    assert line.startswith("fsdpcore: ")
    assert words in line


def test_the_peer_is_not_installed(module, monkeypatch):
    request = module("run").CheckpointRun(cases=(), against=("dcp",))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(fc.MissingDependencyError, match="pip install torch --index-url"):
        request.check()


@pytest.mark.parametrize(("nbytes", "layers"), [(1 << 30, 12), (100 << 20, 3), (1 << 18, 1)])
def test_the_state_has_the_size_that_was_asked_for(module, nbytes, layers):
    shapes = module("model").arrays(nbytes, layers)
    found = 4 * sum(map(math.prod, shapes.values()))
    assert nbytes - max(8192, nbytes // 1000) <= found <= nbytes
    assert len(shapes) == 3 * (12 * layers + 4)
    assert min(map(min, shapes.values())) > 0


def test_wrong_values_are_counted(module):
    model = module("model")
    whole = np.empty(3_000_000, np.float32)  # longer than what is compared at a time
    model.fill("block0.out.bias", 0, whole)
    assert model.wrong("block0.out.bias", 0, whole) == 0
    assert model.wrong("block0.out.bias", 1_234_567, whole[1_234_567:]) == 0
    assert model.wrong("block0.out.bias", 1, whole) == whole.size
    assert model.wrong("optimizer/exp_avg/block0.out.bias", 0, whole) == whole.size
    whole[[0, 2_000_000, -1]] += 1
    assert model.wrong("block0.out.bias", 0, whole) == 3


def jobs(module, folder, change):
    """Save on three ranks, let ``change`` spoil something, load; wrong elements of each rank."""
    case = module("cases").Case("save", "disk", nbytes=SMALL, layers=1)

    def main(backend):
        job = module("ours").OurJob(case, backend)
        job.save(folder, 1)
        change(job, backend.rank)
        job.load(folder, 1)
        found = job.wrong()
        job.close()
        return found

    return fc.launch(main, world_size=3, transport="sim")


def test_what_is_saved_comes_back(module, tmp_path):
    assert jobs(module, tmp_path, lambda job, rank: job.spoil()) == [0, 0, 0]


def test_what_does_not_come_back_is_counted(module, tmp_path, monkeypatch):
    job = module("ours").OurJob
    monkeypatch.setattr(job, "load", lambda self, folder, step: None)

    def change(job, rank):
        part = next(iter(job.parts()))
        with job._engine.writing_state() as state:
            state[part.name].pieces[0].array[:rank] += 1

    assert jobs(module, tmp_path, change) == [0, 1, 2]


def test_plain_files_are_read_by_more_ranks(module, tmp_path):
    class Job:
        def __init__(self, values):
            self.array = values

        def parts(self):
            yield module("job").OwnPart("x", 0, self.array)

    limit = module("ours").Limit
    for rank in range(2):
        limit(Job(np.arange(6, dtype=np.float32) + 6 * rank), rank, 2).save(tmp_path, 0)
    found = np.zeros((4, 3), np.float32)
    for rank in range(4):
        limit(Job(found[rank]), rank, 4).load(tmp_path, 0)
    assert found.reshape(-1).tolist() == list(range(12))
