"""Comparing two commits: what is measured, what chance explains, a run of all kinds of cases."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fsdpcore.bench.harness.measurements import Measurement, median_interval

BENCH = Path(__file__).parents[2] / "bench"
sys.path.append(str(BENCH))

from commits_bench import cases, report  # noqa: E402


def test_the_interval_is_that_of_the_sign_test():
    assert median_interval([float(n) for n in range(1, 16)]) == (4.0, 12.0)
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)  # too few to leave any out


def compared(*pairs):
    one = report.Compared(cases.Setting("sim", 2, ()), cases.Case("all_reduce", 8, "plain"))
    old, new = ([[value] for value in values] for values in zip(*pairs, strict=True))
    one.add(Measurement("old", 1, None, old), Measurement("new", 1, None, new))
    return one


def test_slower_is_what_chance_does_not_explain():
    assert compared(*[(1.0, 1.1 + 0.001 * n) for n in range(15)]).slower
    assert not compared(*[(1.0, 1.1 if n % 2 else 0.9) for n in range(15)]).slower
    assert not compared(*[(1.0, 1.04)] * 15).slower
    assert compared(*[(1.0, 0.5)] * 15).faster


def test_settings_take_names_and_patterns():
    (one,) = cases.settings(["zmq"], [2], ["step.*"], [8], ["plain"])
    assert {case.name for case in one.cases} == {
        cases.SMALL_UNITS,
        *(f"step.{name}" for name in cases.STRATEGIES),
    }
    whole = cases.settings(["zmq", "sim"], [2, 4], ["*"], cases.SIZES, cases.MEMORIES)
    assert [(one.transport, one.ranks) for one in whole] == [
        ("zmq", 2), ("zmq", 4), ("sim", 2), ("sim", 4), ("sim", 1),
    ]  # fmt: skip
    assert cases.settings(["zmq"], [2], ["nothing"], [8], ["plain"]) == []


@pytest.fixture
def compare(monkeypatch):
    """Run the command in this process, with small cases; its ranks are processes of their own."""
    monkeypatch.setattr(cases, "LARGER", (1 << 12, 1 << 13))
    monkeypatch.setattr(sys, "path", list(sys.path))  # which the script extends
    spec = importlib.util.spec_from_file_location("compare_commits", BENCH / "compare_commits.py")
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compare_commits", script)  # where typer looks up the types
    spec.loader.exec_module(script)
    app = typer.Typer()
    app.command()(script.main)

    def compare(*options):
        given = ["--old", sys.executable, "--rounds", "1", "--starts", "1", "--seconds", "0.0001"]
        return CliRunner().invoke(app, [*given, *map(str, options)])

    compare.script = script
    return compare


@pytest.mark.tools
def test_all_kinds_of_cases_run_and_each_is_a_line(compare, monkeypatch, tmp_path):
    monkeypatch.setattr(report.Compared, "slower", False)  # so that nothing is measured again
    file = tmp_path / "found.json"
    only = "barrier,scatter,all_to_all_v,reduce_scatter_v,step.full_shard,save,load,optimizer.adamw"
    options = ["--transport", "sim", "--ranks", 2, "--sizes", 8, "--only", only, "--json", file]
    done = compare(*options)
    assert done.exit_code == 0, done.output
    run = json.loads(file.read_text())
    found = run["rows"]
    assert len(file.read_text().splitlines()) == 10 + len(found), "a line is more than a record"
    assert run["schema"] == "fsdpcore.bench.compare_commits/1"
    assert {one["name"] for one in found} == set(only.split(","))
    assert all(one["starts_us"][0][0][0] > 0 for one in found)


def test_what_seems_slower_is_measured_once_more(compare, monkeypatch):
    slow, same = compared(*[(1.0, 1.2)] * 15), compared(*[(1.0, 1.0)] * 15)
    asked, answers = [], [[same, slow], [compared(*[(1.0, 1.3)] * 15)]]

    def measured(setting, pythons, plan, starts, versions):
        asked.append([case.name for case in setting.cases])
        return answers.pop(0)

    monkeypatch.setattr(compare.script, "_measure", measured)
    done = compare("--transport", "sim", "--ranks", 2, "--sizes", 8, "--only", "barrier,scatter")
    assert done.exit_code == 1, done.output
    assert asked == [["barrier", "scatter", "scatter"], [slow.case.name]]
    assert "once more" in done.output
    assert slow.again is not None
    assert same.again is None


def test_what_seems_slower_once_only_is_not():
    slow, same = compared(*[(1.0, 1.2)] * 15), compared(*[(1.0, 1.0)] * 15)
    assert slow.slower
    slow.again = same
    assert not slow.slower
    slow.again = compared(*[(1.0, 1.3)] * 15)
    assert slow.slower
