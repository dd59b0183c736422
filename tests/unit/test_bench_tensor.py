"""``bench/tensor_parallel.py``: tiny blocks on real ranks, and whether wrong ones are noticed."""

from __future__ import annotations

import importlib
import importlib.util
import json
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
QUICK = ["--rounds", 2, "--iters", 2, "--warmup", 1]
SMALL = ["--width", 8, "--heads", 2, "--hidden", 12, "--batch", 2, "--length", 6]
HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Run the command in this process; its ranks are processes of their own."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.chdir(tmp_path)
    for name in set(os.environ) - set(clean_environ()):
        monkeypatch.delenv(name)
    spec = importlib.util.spec_from_file_location("tensor_parallel", BENCH / "tensor_parallel.py")
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tensor_parallel", script)  # where typer looks up the types
    monkeypatch.setattr(sys, "path", list(sys.path))  # which the script extends
    spec.loader.exec_module(script)
    app = typer.Typer()
    app.command()(script.main)
    return lambda *arguments: CliRunner().invoke(app, [*map(str, arguments)])


@pytest.mark.parametrize(
    "peer",
    [
        pytest.param("", marks=pytest.mark.tools),
        pytest.param("dtensor", marks=pytest.mark.skipif(not HAS_TORCH, reason="no PyTorch here")),
    ],
)
def test_blocks_are_measured_and_right(bench, peer, tmp_path):
    record = tmp_path / "block.json"
    done = bench(*QUICK, *SMALL, "--against", peer, "--json", record)
    assert done.exit_code == 0, done.output
    content = json.loads(record.read_text())
    assert [result["case"]["sequence"] for result in content["results"]] == [False, True]
    for result in content["results"]:
        assert [row["contestant"] for row in result["rows"]] == ["fsdpcore", *filter(None, [peer])]
        assert all(row["wrong"] == 0 for row in result["rows"])
        assert all(len(row["samples_ms"]) == 2 for row in result["rows"])
        assert list(result["ratios"]) == [*filter(None, [peer])]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--length", 5], "--length 5 does not divide by 2 ranks"),
        (["--against", "megatron"], "--against knows no 'megatron'; it knows dtensor"),
        (["--mode", "half"], "--mode"),
        (["-n", 0], "-n must be at least 1"),
    ],
)
def test_wrong_options_are_refused(bench, arguments, words):
    done = bench(*QUICK, *SMALL, *arguments)
    assert done.exit_code == 2
    assert words in done.output


def test_wrong_results_are_counted(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    cases = importlib.import_module("tensor_bench.cases")
    ours = importlib.import_module("tensor_bench.ours")
    case = cases.Case(8, 2, 12, 2, 6)

    def body(backend):
        block = ours.OurBlock(case, backend)
        y, dx = block.step()
        assert case.wrong(y, dx, 0, 1) == 0
        y[0, 1, 2] += 0.1
        dx[1, 0, 3:5] = np.nan
        return case.wrong(y, dx, 0, 1)

    assert fc.launch(body, world_size=1, transport="sim") == [3]
