"""Collectives and exchanges of messages between hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from fsdpcore.bench.harness import options
from fsdpcore.bench.harness.measurements import OURS
from fsdpcore.bench.harness.turns import versions_of
from hosts_bench.calibration import Calibration, free_of
from hosts_bench.cases import Case, Scenario
from hosts_bench.prediction import Model
from hosts_bench.request import SIMULATED, HostsRun, line, milliseconds
from hosts_bench.site import COLLECTIVES, Found, opened, typical
from hosts_bench.start import GLOO


def measured(
    request: HostsRun, scenario: Scenario, versions: dict[str, Any], echo: options.Echo
) -> Iterator[dict[str, Any]]:
    """Measure all cases in every round; the results of each."""
    others = [name for name in request.against if name == GLOO]
    echo(f"#\n# {scenario.name}: {scenario.title}")
    cases: list[tuple[Case, Found]] = [(case, Found()) for case in scenario.cases]
    model = calibration = None
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(opened(scenario, COLLECTIVES, request.urls, others))
        versions |= versions_of(site.entrants)
        if request.simulated:
            free = stack.enter_context(free_of(scenario, request.urls[OURS]))
            calibration = Calibration(free, site, scenario.large)
        for _ in range(request.rounds):
            if calibration is not None:
                calibration.turn()
            for case, found in cases:
                site.turn(case, found)
        if calibration is not None:
            model = calibration.model(echo)
    for case, found in cases:
        yield _result(scenario, case, found, model, echo)


def _result(
    scenario: Scenario, case: Case, found: Found, model: Model | None, echo: options.Echo
) -> dict[str, Any]:
    link, samples = typical(found.links), found.seconds
    bound = case.bound(scenario.ranks, link)
    if scenario.per_host > 1:
        bound *= 2 / 3  # of an all_reduce: half of it passes between two hosts, twice
    if model is not None:
        samples[SIMULATED] = [model.seconds(case)]
    echo(line(case.name, bound, samples, case.limit))
    return {
        "part": scenario.name,
        "case": case.order(),
        "bound_ms": 1e3 * bound,
        "goodput_mbit": 8e-6 * link.goodput,
        "round_trip_ms": 1e3 * link.round_trip,
        "wrong": found.wrong,
        "model": None if model is None else asdict(model),
        "samples_ms": milliseconds(samples),
    }
