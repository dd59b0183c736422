"""``Report``: what was planned beside what was measured."""

from __future__ import annotations

import json
import math

import pytest

from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.policy import Costs
from fsdpcore.fsdp.plan.make_plan import make_plan
from fsdpcore.fsdp.plan.report import MeasuredStep, Report
from fsdpcore.fsdp.plan.sizes import even_units


@pytest.fixture
def plan():
    # Takes 10 s, of which 4 s are exposed; test_plan.py has the reckoning.
    return make_plan(even_units(8, 2), 2, costs=Costs(1, 0, 0), compute_seconds=[1.0, 1.0])


def test_ratios_are_measured_over_predicted(plan):
    measured = MeasuredStep(
        peak_bytes=2 * plan.peak_bytes,
        bytes_sent=plan.bytes_sent,
        step_seconds=5.0,
        exposed_seconds=1.0,
        gathers=4,
        reductions=3,
    )
    rows = {row.name: row for row in Report(plan, measured).rows}
    assert {name: row.ratio for name, row in rows.items()} == {
        "peak_bytes": 2.0,
        "bytes_sent": 1.0,
        "step_seconds": 0.5,
        "exposed_seconds": 0.25,
        "gathers": 1.0,
        "reductions": 1.5,
    }
    assert (rows["gathers"].predicted, rows["reductions"].predicted) == (4, 2)


def test_what_was_not_measured_or_not_predicted_has_no_ratio():
    plan = make_plan(even_units(8, 2), 2)
    rows = Report(plan, MeasuredStep(step_seconds=3.0)).rows
    assert all(row.ratio is None for row in rows)
    assert [row.measured for row in rows] == [None, None, 3.0, None, None, None]
    assert [row.predicted for row in rows][2:] == [None, None, 4, 2]


@pytest.mark.parametrize(("sent", "ratio"), [(0, 1.0), (8, None)])
def test_where_nothing_was_predicted(sent, ratio):
    plan = make_plan(even_units(8, 2), 1)
    assert Report(plan, MeasuredStep(bytes_sent=sent)).rows[1].ratio == ratio


def test_what_it_looks_like(plan):
    report = Report(plan, MeasuredStep(peak_bytes=plan.peak_bytes, step_seconds=12.0))
    lines = str(report).splitlines()
    assert "rank 0 of 2" in lines[0]
    assert lines[2].split() == ["predicted", "measured", "ratio"]
    words = [line.split() for line in lines[3:]]
    assert words[0] == ["peak", "112", "B", "112", "B", "1.000"]
    assert words[2] == ["step", "10", "s", "12", "s", "1.200"]
    assert words[4] == ["gathers", "4", "-", "-"]
    told = json.loads(json.dumps(report.as_dict()))
    assert told["step_seconds"] == {"predicted": 10.0, "measured": 12.0, "ratio": 1.2}
    assert told["exposed_seconds"] == {"predicted": 4.0, "measured": None, "ratio": None}


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "many", True])
def test_what_cannot_have_been_measured(value):
    with pytest.raises(ArgumentError, match="bytes_sent of MeasuredStep"):
        MeasuredStep(bytes_sent=value)


def test_other_things_are_refused(plan):
    with pytest.raises(
        ArgumentError, match="measured of a Report must be a MeasuredStep, got dict"
    ):
        Report(plan, {"bytes_sent": 3})
