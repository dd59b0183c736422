"""``bench/optimizer.py``: tiny runs, and whether it would notice a wrong contestant."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fsdpcore.fsdp.optim import kernels

BENCH = Path(__file__).parents[2] / "bench"
TINY = ["--elements", 100, "--rounds", 2, "--iters", 1]

HAS_TORCH = importlib.util.find_spec("torch") is not None
OURS = ["fsdpcore", *(["fsdpcore-numba"] if kernels.available() else [])]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run the command in this process."""
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])  # which the script extends
    spec = importlib.util.spec_from_file_location("optimizer", BENCH / "optimizer.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "optimizer", script)  # where typer looks up the types
    spec.loader.exec_module(script)
    app = typer.Typer()
    app.command()(script.main)
    return lambda *arguments: CliRunner().invoke(app, [*map(str, arguments)])


def contestants(done: Any) -> list[str]:
    return [line.split()[0] for line in done.output.splitlines() if line.startswith("  fsdpcore")]


@pytest.mark.tools
def test_every_optimizer_runs(bench: Callable[..., Any]) -> None:
    for name in ("adamw", "adam", "sgd", "adagrad", "rmsprop"):
        done = bench(*TINY, "--optimizer", name)
        assert done.exit_code == 0, done.output
        expected = OURS if name.startswith("adam") else OURS[:1]
        assert contestants(done) == expected


def test_json_holds_all_samples(bench: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "optimizer.json"
    assert bench(*TINY, "--json", path).exit_code == 0
    document = json.loads(path.read_text())
    assert document["schema"] == "fsdpcore.bench.optimizer/1"
    assert document["settings"] == {
        "optimizer": "adamw",
        "elements": 100,
        "tensors": 20,
        "against": [],
        "rounds": 2,
        "iterations": 1,
    }
    assert [row["contestant"] for row in document["rows"]] == OURS
    for row in document["rows"]:
        assert len(row["samples_ms"]) == 2
        assert min(row["samples_ms"]) == row["time_ms"]["best"] > 0
    assert set(document["ratios"]) == set(OURS[1:])


def test_a_contestant_that_disagrees_is_noticed(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = importlib.import_module("optimizer_bench.contestants")
    make = run.contestants

    def with_a_wrong_one(*arguments: Any) -> Any:
        found = make(*arguments)
        wrong = make(*arguments)["fsdpcore"]
        wrong.param[:3] += 1e-3
        return {"fsdpcore": found["fsdpcore"], "fsdpcore-wrong": wrong}

    monkeypatch.setattr(run, "contestants", with_a_wrong_one)
    done = bench(*TINY)
    assert done.exit_code == 1
    assert done.output.splitlines()[-1].split()[-1] == "3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer", "sdg"], "--optimizer knows no 'sdg' (did you mean 'sgd'?)"),
        (["--against", "torch-forech"], "no 'torch-forech' (did you mean 'torch-foreach'?)"),
        (["--elements", 0], "elements must be at least 1, got 0"),
        (["--json", "nowhere/at/all.json"], "there is no directory"),
        (["--optimizer", "rmsprop", "--against", "torch-fused"], "has no fused RMSprop"),
    ],
)
def test_wrong_options_are_named(
    bench: Callable[..., Any], arguments: list[Any], message: str
) -> None:
    done = bench(*arguments)
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.skipif(HAS_TORCH, reason="PyTorch is installed")
def test_without_torch_it_says_what_to_install(bench: Callable[..., Any]) -> None:
    done = bench(*TINY, "--against", "torch-foreach")
    assert done.exit_code == 2
    assert "pip install torch" in done.output


@pytest.mark.skipif(not HAS_TORCH, reason="PyTorch is not installed")
def test_torch_agrees(bench: Callable[..., Any]) -> None:
    done = bench(*TINY, "--against", "torch-foreach,torch-fused")
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.output.splitlines()[-2:]] == [
        "torch-foreach",
        "torch-fused",
    ]
