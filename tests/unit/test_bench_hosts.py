"""``bench/hosts.py``: short runs on hosts of our own, and whether wrong results are noticed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import typer
from support.hosts.lab import why_no_hosts
from typer.testing import CliRunner

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Run the command in this process; its ranks are processes of their own."""
    if why := why_no_hosts():
        pytest.skip(why)
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("hosts", BENCH / "hosts.py")
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "hosts", script)  # where typer looks up the types
    monkeypatch.setattr(sys, "path", list(sys.path))  # which the script extends
    spec.loader.exec_module(script)
    app = typer.Typer()
    app.command()(script.main)
    return lambda *arguments: CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def smaller(bench, monkeypatch):
    """Give the parts fewer and smaller cases, on faster links."""
    run = importlib.import_module("hosts_bench.run")
    cases = importlib.import_module("hosts_bench.cases")
    wanted = (cases.Case("all_gather", 8), cases.Case("exchange", 4000, 1), cases.Case("barrier"))
    scenario = cases.Scenario("rate", 2, 1e9, wanted, delay=0.001)
    sizes = {"layers": 1, "width": 8, "heads": 1, "context": 4, "batch": 4}
    ways = (cases.Way("hybrid_shard"),)
    training = cases.TrainingScenario("train-1g", 1e9, ways, sizes=sizes)
    monkeypatch.setattr(run, "SCENARIOS", (scenario,))
    monkeypatch.setattr(run, "TRAININGS", (training,))


@pytest.mark.tools
def test_collectives_and_training_are_measured_beside_what_a_plain_stream_would_take(
    bench, smaller, tmp_path
):
    path = tmp_path / "hosts.json"
    results = []
    for part, peers in (("rate", ["encrypted"]), ("train-1g", [])):
        against = ["--against", *peers] if peers else []
        plain = ["--transport", "zmq://?security=none"] if peers else []
        done = bench("--parts", part, *plain, *against, "--rounds", 1, "--json", path)
        assert done.exit_code == 0, done.output
        found = json.loads(path.read_text())
        assert found["schema"] == "fsdpcore.bench.hosts/1"
        for result in found["results"]:
            assert list(result["samples_ms"]) == ["fsdpcore", *peers]
        results += found["results"]
    gather, exchange, barrier, training = results
    for result in (gather, exchange, barrier):
        assert result["goodput_mbit"] < 1000
        assert 1 <= result["bound_ms"] <= min(result["samples_ms"]["fsdpcore"]) + 2
    # Both ranks of a host send: what is gathered and reduced of all parameters, at least.
    assert training["moved_mb"] * 1e6 > 1000
    assert training["bound_ms"] >= training["computing_ms"]
    assert all(result["wrong"] == 0 for result in results)


def test_encrypted_ranks_are_compared_with_plain_ones(bench):
    refused = bench("--parts", "2x100m", "--against", "encrypted")
    assert refused.exit_code == 2
    assert "encrypted already" in refused.output


@pytest.mark.tools
def test_wrong_results_are_noticed(bench, smaller, monkeypatch):
    site = importlib.import_module("hosts_bench.site")
    real = site.start_all

    def start_all(*arguments):
        entrants = real(*arguments)
        for _, team in entrants:
            ask = team.ask
            team.ask = lambda name, do, _ask=ask, **more: (
                [[1.0], [0.0]] if do == "check" else _ask(name, do, **more)
            )
        return entrants

    monkeypatch.setattr(site, "start_all", start_all)
    assert bench("--parts", "rate", "--rounds", 1).exit_code == 1
    assert "knows no 'gigabit'" in bench("--parts", "gigabit").output


def test_a_part_that_does_not_exist(bench):
    done = bench("--parts", "rates")
    assert done.exit_code == 2
    assert "rates" in done.output
