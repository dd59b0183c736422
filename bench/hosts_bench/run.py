"""A whole run: make hosts, start the contestants on them, let them take turns, print, save."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import gpt_model
from fsdp_bench.cases import ALONE, Training, to_order
from support.hosts import plain
from support.hosts.lab import Lab, burst, why_no_hosts
from support.hosts.places import PORT

from fsdpcore import __version__
from fsdpcore.bench.harness import options, record, table
from fsdpcore.bench.harness.measurements import OURS
from fsdpcore.bench.harness.start import RankProgram, Start
from fsdpcore.bench.harness.team import Team
from fsdpcore.bench.harness.turns import Entrant, alternate, run_seconds, start_all, versions_of
from fsdpcore.core.errors import ConfigError
from fsdpcore.core.policy import Costs
from hosts_bench import start
from hosts_bench.cases import (
    SCENARIOS,
    TRAININGS,
    Case,
    Link,
    Scenario,
    TrainingScenario,
)
from hosts_bench.prediction import Model, computing_seconds
from hosts_bench.start import GLOO

# Ours with what it says encrypted; by the transport's own option.
ENCRYPTED = "encrypted"
# What virtual time says that ours takes.
SIMULATED = "simulated"
PEERS = (ENCRYPTED, SIMULATED, GLOO)
PARTS = (*(each.name for each in SCENARIOS), *(each.name for each in TRAININGS))
_BENCH = Path(__file__).parents[1]
_FOLDERS = (_BENCH, _BENCH.parent / "tests", Path(gpt_model.__file__).parent)
_PROGRAM = RankProgram.module("hosts_bench.member", *_FOLDERS, threads=1)
_WARMUP = 2
# Before all ranks have got an order and wait for its time.
_LEAD_SECONDS = 0.02
# A plain stream of about a tenth of a second.
_STREAM_SECONDS = 0.1
_STEPS = 2
_NO_LIMIT = 100e9  # bits per second, which no link of a lab carries


@dataclass(frozen=True)
class HostsRun:
    """What to measure, and where the results go.

    Attributes:
        parts: some of ``PARTS``.
        transport: URL of ours.
        against: some of ``PEERS``.
        rounds: how often the contestants take turns.
        json: file to write.
    """

    parts: tuple[str, ...]
    transport: str = "zmq://"
    against: tuple[str, ...] = ()
    rounds: int = 5
    json: Path | None = None

    def check(self) -> None:
        """Check everything that can be wrong before a rank is started.

        Raises:
            ArgumentError: an option's value is wrong.
            ConfigError: this machine can make no hosts.
            MissingDependencyError: a package is needed that is not installed.
        """
        options.check_known("--parts", self.parts, PARTS)
        options.check_known("--against", self.against, PEERS)
        options.check_torch([peer for peer in self.against if peer == GLOO])
        options.check_writable(self.json)
        if why := why_no_hosts():
            raise ConfigError(why)


def measure(request: HostsRun, echo: options.Echo) -> int:
    """Measure all parts; how much was wrong, over all contestants."""
    run = record.RunRecord("hosts")
    first = f"fsdpcore {__version__}, transport {request.transport}"
    for line in table.heading(run.machine, first, f"median of {request.rounds} rounds"):
        echo(line)
    results: list[dict[str, Any]] = []
    versions: dict[str, Any] = {}
    for scenario in SCENARIOS:
        if scenario.name in request.parts:
            results += _collectives(request, scenario, versions, echo)
    for training in TRAININGS:
        if training.name in request.parts:
            results += _training(request, training, versions, echo)
    if SIMULATED in request.against and results:
        echo(_verdict(results))
    run.save(request.json, versions=versions, settings=_settings(request), results=results)
    return sum(each["wrong"] for each in results)


def _verdict(results: Sequence[Mapping[str, Any]]) -> str:
    """How far off the simulated times are."""
    errors = sorted(abs(_error(each["samples_ms"])) for each in results)
    return (
        f"#\n# simulated: off by {100 * median(errors):.1f} % (median of {len(errors)} cases), "
        f"at most {100 * errors[-1]:.1f} %"
    )


def _error(samples: Mapping[str, Sequence[float]]) -> float:
    return median(samples[SIMULATED]) / median(samples[OURS]) - 1


def _settings(request: HostsRun) -> dict[str, Any]:
    return {name: value for name, value in vars(request).items() if name != "json"}


@contextlib.contextmanager
def _started(
    request: HostsRun,
    scenario: Scenario | TrainingScenario,
    program: RankProgram,
    others: Sequence[str],
) -> Iterator[tuple[Lab, list[Entrant]]]:
    """Hosts, and the contestants on them: ours first."""
    delay = scenario.delay if isinstance(scenario, Scenario) else 0.0
    with Lab(scenario.hosts, rate=scenario.rate, delay=delay) as lab, contextlib.ExitStack() as all:
        starts: dict[str, Start] = {}
        for port, (name, url) in enumerate(_urls(request).items(), PORT):
            starts[name] = start.on_hosts(
                lab, scenario.per_host, program, url, port, contestant=name
            )
        for name in others:
            starts[name] = start.one_by_one(lab, scenario.per_host, program, contestant=name)
        yield lab, start_all(all, scenario.ranks, starts)


def _urls(request: HostsRun) -> dict[str, str]:
    found = {OURS: request.transport}
    if ENCRYPTED in request.against:
        found[ENCRYPTED] = request.transport.replace("security=none", "security=curve")
    return found


# Collectives.


def _collectives(
    request: HostsRun, scenario: Scenario, versions: dict[str, Any], echo: options.Echo
) -> Iterator[dict[str, Any]]:
    others = [name for name in request.against if name == GLOO]
    echo(f"#\n# {scenario.name}: {scenario.title}")
    simulated = SIMULATED in request.against
    processor = _processor(request, scenario) if simulated else None
    with _started(request, scenario, _PROGRAM, others) as (lab, entrants):
        _set_rates(lab, scenario)
        versions |= versions_of(entrants)
        model = None
        if processor is not None:
            model = _fitted(request, scenario, scenario.large, lab, entrants[:1], processor, echo)
        for case in scenario.cases:
            yield _case(request, scenario, case, lab, entrants, model, echo)


def _set_rates(lab: Lab, scenario: Scenario) -> None:
    for host in range(scenario.hosts):
        lab.set_rate(host, scenario.rate)
    if scenario.slowest:
        lab.set_rate(scenario.hosts - 1, scenario.slowest)


def _processor(request: HostsRun, scenario: Scenario) -> Callable[[Model], Model]:
    """What finds for a model the processor's part, from hosts whose links have no limit.

    They are other ranks: how fast links are, ranks find out as they meet.
    """
    free = replace(scenario, rate=_NO_LIMIT, slowest=0.0)
    with _started(request, free, _PROGRAM, ()) as (lab, entrants):
        ((name, team),) = entrants[:1]
        seconds = {}
        for part, case in scenario.alone.items():
            _, samples, _ = _measured(request, free, case, lab, entrants[:1])
            seconds[part] = case, median(samples[name])
        costs = _agreed_costs(team, name, scenario)

    def on(model: Model) -> Model:
        alone = replace(model, hosts=scenario.hosts, per_host=scenario.per_host)
        found = alone.with_processor(seconds, costs)
        return replace(model, byte=found.byte, message=found.message, wake=found.wake)

    return on


def _fitted(
    request: HostsRun,
    scenario: Scenario,
    large: Sequence[Case],
    lab: Lab,
    entrants: Sequence[Entrant],
    processor: Callable[[Model], Model],
    echo: options.Echo,
) -> Model:
    """The model of the hosts, whose links are as fast as large cases say."""
    ((name, team),) = entrants
    seconds, links = {}, []
    for case in large:
        _, samples, link = _measured(request, scenario, case, lab, entrants)
        seconds[case] = median(samples[name])
        links.append(link)
    costs, cores = _agreed_costs(team, name, scenario), len(os.sched_getaffinity(0))
    model = processor(replace(_model(scenario, _typical(links)), costs=costs, cores=cores))
    model = model.with_rate(seconds)
    echo(
        f"# model: {8e-6 * model.rate:.1f} Mbit/s, latency {1e6 * model.latency:.0f} us, "
        f"{1e6 * model.message:.0f} us for a message, {1e6 * model.wake:.0f} us to wake a rank, "
        f"{1e-6 / model.byte:.0f} MB/s of a core"
    )
    return model


def _agreed_costs(team: Team, name: str, scenario: Scenario) -> Costs:
    team.ask(name, "prepare", case=scenario.large[0].order())
    costs = _costs(team)
    team.ask(name, "release")
    return costs


def _costs(team: Team) -> Costs:
    """What the ranks choose algorithms by."""
    return Costs(*team.ask(OURS, "costs")[0])


def _measured(
    request: HostsRun,
    scenario: Scenario,
    case: Case,
    lab: Lab,
    entrants: Sequence[Entrant],
) -> tuple[int, dict[str, list[float]], Link]:
    """What was wrong, what the contestants took, and how the link was meanwhile."""
    wrong = 0
    for name, team in entrants:
        team.ask(name, "prepare", case=case.order())
        wrong += int(sum(sum(ranks) for ranks in team.ask(name, "check")))
        for _ in range(_WARMUP):
            _once(team, name)
    teams, links = dict(entrants), list[Link]()

    def turn(name: str, number: int) -> float:
        if name == OURS:
            links.append(_link(lab, scenario))
        return _once(teams[name], name)

    samples = alternate(teams, request.rounds, turn)
    for name, team in entrants:
        team.ask(name, "release")
    return wrong, samples, _typical(links)


def _typical(links: Sequence[Link]) -> Link:
    """The median of what was found."""
    return Link(*(median(values) for values in zip(*links, strict=True)))


def _case(
    request: HostsRun,
    scenario: Scenario,
    case: Case,
    lab: Lab,
    entrants: Sequence[Entrant],
    model: Model | None,
    echo: options.Echo,
) -> dict[str, Any]:
    wrong, samples, link = _measured(request, scenario, case, lab, entrants)
    bound = case.bound(scenario.ranks, link)
    if scenario.per_host > 1:
        bound *= 2 / 3  # of an all_reduce: half of it passes between two hosts, twice
    if model is not None:
        samples[SIMULATED] = [model.seconds(case)]
    echo(_line(case.name, bound, samples, case.limit))
    return {
        "part": scenario.name,
        "case": case.order(),
        "bound_ms": 1e3 * bound,
        "goodput_mbit": 8e-6 * link.goodput,
        "round_trip_ms": 1e3 * link.round_trip,
        "wrong": wrong,
        "model": None if model is None else asdict(model),
        "samples_ms": {name: [1e3 * each for each in taken] for name, taken in samples.items()},
    }


def _once(team: Team, name: str) -> float:
    """Have all ranks do it at one time; seconds until the last is done."""
    answers = team.ask(name, "once", at=time.monotonic() + _LEAD_SECONDS)
    return max(seconds for (seconds,) in answers)


def _link(lab: Lab, scenario: Scenario | TrainingScenario) -> Link:
    """What plain TCP finds of the slowest link."""
    slowest = scenario.slowest if isinstance(scenario, Scenario) else 0.0
    size = int((slowest or scenario.rate) / 8 * _STREAM_SECONDS)
    one, other = lab.hosts[0], lab.hosts[-1]
    around = [(host, lab.hosts[host.number - 1]) for host in lab]
    far = isinstance(scenario, Scenario) and scenario.delay
    return Link(
        plain.goodput(one, other, size),
        plain.goodput_of_all(around if not slowest else [(one, other), (other, one)], size),
        plain.round_trip(one, other, 3 if far else 20),
    )


def _model(scenario: Scenario, link: Link) -> Model:
    """The hosts, with links like the one that was measured."""
    rate, slowest, slowest_rate = link.together, 0.0, 0.0
    if scenario.slowest:
        slowest_rate = scenario.slowest
        rate, slowest = rate * scenario.rate / scenario.slowest, rate
    return Model(
        scenario.hosts,
        scenario.per_host,
        rate,
        link.round_trip / 2,
        slowest,
        burst=burst(scenario.rate),
        slowest_burst=burst(slowest_rate),
    )


def _line(
    name: str, bound: float, samples: Mapping[str, Sequence[float]], limit: float = 0.0
) -> str:
    parts = [f"  {name:42} bound {1e3 * bound:8.1f} ms"]
    for contestant, taken in samples.items():
        parts.append(
            f"{contestant} {1e3 * median(taken):8.1f} ms ({median(taken) / bound:.2f} of the "
            f"bound, {1e3 * min(taken):.1f} to {1e3 * max(taken):.1f})"
        )
    if SIMULATED in samples:
        parts.append(f"off by {100 * _error(samples):+.1f} %")
    if limit:
        parts.append(f"limit {1e3 * limit:g} ms")
    return "; ".join(parts)


# Training.


def _training(
    request: HostsRun, scenario: TrainingScenario, versions: dict[str, Any], echo: options.Echo
) -> Iterator[dict[str, Any]]:
    program = RankProgram.module("fsdp_bench.member", *_FOLDERS, threads=1)
    echo(f"#\n# {scenario.name}: {scenario.title}")
    model = _of_hosts(request, scenario, echo) if SIMULATED in request.against else None
    with _started(request, scenario, program, [ALONE]) as (lab, entrants):
        versions |= versions_of(entrants)
        for way in scenario.ways:
            group = scenario.per_host if way.strategy == "hybrid_shard" else 0
            case = Training(**scenario.sizes, **way._asdict(), group=group)
            yield _way(request, scenario, way.name, case, lab, entrants, model, echo)


def _of_hosts(request: HostsRun, scenario: TrainingScenario, echo: options.Echo) -> Model:
    """The model of the hosts on which is trained, found by collectives.

    What a message between hosts takes is found among as many ranks on as many hosts.
    """
    apart = Scenario(scenario.name, scenario.ranks, scenario.rate, ())
    processor = _processor(request, apart)
    hosts = replace(apart, hosts=scenario.hosts, per_host=scenario.per_host)
    with _started(request, hosts, _PROGRAM, ()) as (lab, entrants):
        _set_rates(lab, hosts)
        all_send = hosts.large[:1]  # as in training
        return _fitted(request, hosts, all_send, lab, entrants, processor, echo)


def _way(
    request: HostsRun,
    scenario: TrainingScenario,
    title: str,
    case: Training,
    lab: Lab,
    entrants: Sequence[Entrant],
    model: Model | None,
    echo: options.Echo,
) -> dict[str, Any]:
    losses = {}
    steps = case.every or _STEPS  # groups meet once
    for name, team in entrants:
        team.ask(name, "prepare", case=to_order(case))
        if name != ALONE:
            losses[name] = [sum(ranks) for ranks in zip(*team.ask(name, "losses", count=2))]  # noqa: B905
    teams, rates, moved = dict(entrants), list[float](), list[float]()

    def turn(name: str, number: int) -> float:
        before = _sent(lab)
        took = max(run_seconds(teams[name], name, 0, steps)) / steps
        if name == OURS:
            moved.append((_sent(lab) - before) / steps)
            before, link = _sent(lab), _link(lab, scenario)
            # One stream, and one from each host. What warms the link up is a quarter of each.
            size = 2 * 1.25 * scenario.rate / 8 * _STREAM_SECONDS
            rates.append(link.goodput * (_sent(lab) - before) / size)
        return took

    samples = alternate(teams, request.rounds, turn)
    costs = _costs(teams[OURS])
    planned = teams[OURS].ask(OURS, "planned", count=steps)
    for name, team in entrants:
        team.ask(name, "release")
    computing = median(samples.pop(ALONE))
    moving = median(moved) / median(rates)
    bound = max(computing, moving)
    if model is not None:
        speed = computing_seconds(case, scenario.ranks) / computing
        samples[SIMULATED] = [replace(model, speed=speed, costs=costs).step_seconds(case)]
    echo(
        _line(title, bound, samples)
        + f"; {case.batch * case.context / median(samples[OURS]):.0f} tokens/s"
        + f"; computing {1e3 * computing:.1f} ms, {median(moved) / 1e6:.2f} MB: "
        f"{1e3 * moving:.1f} ms; {_by_plan(planned)}"
    )
    return {
        "part": scenario.name,
        "way": title,
        "case": to_order(case),
        "bound_ms": 1e3 * bound,
        "computing_ms": 1e3 * computing,
        "moved_mb": median(moved) / 1e6,
        "planned": planned,
        "wrong": 0 if _same(losses[OURS], losses.values()) else 1,
        "samples_ms": {name: [1e3 * each for each in taken] for name, taken in samples.items()},
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


def _sent(lab: Lab) -> float:
    """Bytes that the host that sends the most has sent."""
    return max(lab.sent(host.number) for host in lab)
