"""A GPT that is trained on several hosts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from fsdp_bench.cases import ALONE, Training, to_order

from fsdpcore.bench.harness import options
from fsdpcore.bench.harness.measurements import OURS
from fsdpcore.bench.harness.turns import alternate, run_seconds, versions_of
from fsdpcore.core.policy import Costs
from hosts_bench.calibration import Calibration, free_of
from hosts_bench.cases import Scenario, TrainingScenario, Way
from hosts_bench.prediction import Model, computing_seconds
from hosts_bench.request import SIMULATED, HostsRun, line, milliseconds
from hosts_bench.site import COLLECTIVES, Site, opened, program

_STEPS = 2


@dataclass
class _Trained:
    """What was found of a way to train.

    Attributes:
        way, case: which.
        samples: seconds of a step, by contestant.
        computing: seconds of a step in which nobody sends anything.
        moved, rate: bytes of a step that the busier host sends, and bytes per second.
        costs: by which algorithms were chosen.
        planned: by plans, and found: see ``_by_plan``.
        wrong: whether losses were.
    """

    way: Way
    case: Training
    samples: dict[str, list[float]]
    computing: float
    moved: float
    rate: float
    costs: Costs
    planned: list[list[float]]
    wrong: bool


def measured(
    request: HostsRun, scenario: TrainingScenario, versions: dict[str, Any], echo: options.Echo
) -> Iterator[dict[str, Any]]:
    """Train in one way after the other; the results of each."""
    echo(f"#\n# {scenario.name}: {scenario.title}")
    hosts = Scenario(scenario.name, scenario.hosts, scenario.rate, (), scenario.per_host)
    ranks = program("fsdp_bench.member")
    model = calibration = None
    with contextlib.ExitStack() as stack:
        if request.simulated:
            calibration = _calibration(stack, request, hosts)
        site = stack.enter_context(opened(hosts, ranks, request.urls, [ALONE]))
        versions |= versions_of(site.entrants)
        trained = [_train(request, scenario, way, site, calibration) for way in scenario.ways]
        if calibration is not None:
            model = calibration.model(echo)
    for each in trained:
        yield _result(request, scenario, each, model, echo)


def _calibration(stack: contextlib.ExitStack, request: HostsRun, hosts: Scenario) -> Calibration:
    """What finds the model of the hosts on which is trained, by collectives on such hosts."""
    url = request.urls[OURS]
    free = stack.enter_context(free_of(hosts, url))
    like = stack.enter_context(opened(hosts, COLLECTIVES, {OURS: url}))
    return Calibration(free, like, hosts.large[:1])  # all hosts send, as in training


def _train(
    request: HostsRun,
    scenario: TrainingScenario,
    way: Way,
    site: Site,
    calibration: Calibration | None,
) -> _Trained:
    group = scenario.per_host if way.strategy == "hybrid_shard" else 0
    case = Training(**scenario.sizes, **way._asdict(), group=group)
    steps = case.every or _STEPS  # groups meet once
    losses = {}
    for name, team in site.entrants:
        team.ask(name, "prepare", case=to_order(case))
        if name != ALONE:
            losses[name] = [sum(ranks) for ranks in zip(*team.ask(name, "losses", count=2))]  # noqa: B905
    teams, rates, moved = dict(site.entrants), list[float](), list[float]()

    def turn(name: str, number: int) -> float:
        if name == OURS and calibration is not None:
            calibration.turn()
        before = site.sent()
        took = max(run_seconds(teams[name], name, 0, steps)) / steps
        if name == OURS:
            moved.append(site.sent_since(before) / steps)
            rates.append(site.rate_with_headers())
        return took

    samples = alternate(teams, request.rounds, turn)
    computing, costs = median(samples.pop(ALONE)), site.costs()
    planned = site.ours.ask(OURS, "planned", count=steps)
    for name, team in site.entrants:
        team.ask(name, "release")
    wrong = not _same(losses[OURS], losses.values())
    return _Trained(
        way, case, samples, computing, median(moved), median(rates), costs, planned, wrong
    )


def _result(
    request: HostsRun,
    scenario: TrainingScenario,
    trained: _Trained,
    model: Model | None,
    echo: options.Echo,
) -> dict[str, Any]:
    case, samples, computing = trained.case, trained.samples, trained.computing
    moving = trained.moved / trained.rate
    bound = max(computing, moving)
    if model is not None:
        samples[SIMULATED] = []
        for _ in range(request.rounds):  # it computes, on a machine that is not always as fast
            speed = computing_seconds(case, scenario.ranks) / computing
            simulated = replace(model, speed=speed, costs=trained.costs)
            samples[SIMULATED].append(simulated.step_seconds(case))
    echo(
        line(trained.way.name, bound, samples)
        + f"; {case.batch * case.context / median(samples[OURS]):.0f} tokens/s"
        + f"; computing {1e3 * computing:.1f} ms, {trained.moved / 1e6:.2f} MB: "
        f"{1e3 * moving:.1f} ms; {_by_plan(trained.planned)}"
    )
    return {
        "part": scenario.name,
        "way": trained.way.name,
        "case": to_order(case),
        "bound_ms": 1e3 * bound,
        "computing_ms": 1e3 * computing,
        "moved_mb": trained.moved / 1e6,
        "planned": trained.planned,
        "wrong": int(trained.wrong),
        "samples_ms": milliseconds(samples),
    }


def _same(first: Sequence[float], others: Iterable[Sequence[float]]) -> bool:
    """Whether all have the same losses, nearly."""
    return all(
        math.isclose(a, b, rel_tol=1e-3)
        for found in others
        for a, b in zip(found, first, strict=True)
    )


def _by_plan(ranks: Sequence[Sequence[float]]) -> str:
    """How plans compare with steps, in the worst case of all ranks: peak, and time."""
    peak = max((planned / found - 1 for planned, found, _, _ in ranks), key=abs)
    time = max((planned / found - 1 for _, _, planned, found in ranks), key=abs)
    return f"plan off by {100 * peak:+.1f} % of the peak, {100 * time:+.1f} % of the time"
