"""Comparing two commits: what is measured, what chance explains, a run of all kinds of cases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert {case.name for case in one.cases} == {f"step.{name}" for name in cases.STRATEGIES}
    whole = cases.settings(["zmq", "sim"], [2, 4], ["*"], cases.SIZES, cases.MEMORIES)
    assert [(one.transport, one.ranks) for one in whole] == [
        ("zmq", 2), ("zmq", 4), ("sim", 2), ("sim", 4), ("sim", 1),
    ]  # fmt: skip
    assert cases.settings(["zmq"], [2], ["nothing"], [8], ["plain"]) == []


@pytest.mark.parametrize("transport", ["sim", "zmq"])
def test_all_kinds_of_cases_run_and_each_is_a_line(tmp_path, transport):
    file = tmp_path / "found.json"
    only = "barrier,scatter,all_to_all_v,reduce_scatter_v,step.full_shard,save,load,optimizer.adamw"
    options = ["--transport", transport, "--ranks", "2", "--sizes", "8", "--only", only]
    options += ["--rounds", "1", "--starts", "1", "--seconds", "0.0001", "--json", str(file)]
    command = [sys.executable, str(BENCH / "compare_commits.py"), "--old", sys.executable, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode in (0, 1), done.stderr
    run = json.loads(file.read_text())
    found = run["rows"]
    assert len(file.read_text().splitlines()) == 10 + len(found), "a line is more than a record"
    assert run["schema"] == "fsdpcore.bench.compare_commits/1"
    assert {one["name"] for one in found} == set(only.split(","))
    assert all(one["starts_us"][0][0][0] > 0 for one in found)


def test_what_seems_slower_once_only_is_not():
    slow, same = compared(*[(1.0, 1.2)] * 15), compared(*[(1.0, 1.0)] * 15)
    assert slow.slower
    slow.again = same
    assert not slow.slower
    slow.again = compared(*[(1.0, 1.3)] * 15)
    assert slow.slower
