"""Training steps on a GPU: the contestants take turns on the same model, ours and PyTorch's."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import gpt_model
from fsdp_bench.cases import OURS, PEER

from fsdpcore.bench.start import one_by_one, under_our_launcher
from fsdpcore.bench.team import RemoteTeam
from fsdpcore.core.errors import RankFailedError
from gpu_bench.cases import CONTESTANTS, PLAIN, Step, to_order

_MEMBER = ("-m", "gpu_bench.member")
# Where a rank finds the modules of its program, which are in no package that is installed.
FOLDERS = (Path(__file__).parents[1], Path(gpt_model.__file__).parent)
_LOSSES = 3
_TOLERANCES = {"fp32": 1e-3, "bf16": 2e-2}
_MOST = 400

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Attributes:
        rounds: how often the contestants take turns.
        seconds: of one turn, roughly.
        budget: when so many seconds are over, what is left to do is left out.
    """

    rounds: int = 5
    seconds: float = 0.15
    budget: float = 120.0


def measure(cases: list[Step], ranks: int, transport: str, plan: Plan, tell: Tell) -> None:
    """Measure all cases, and ``tell`` a row for each as soon as it is there.

    A contestant that fails is left out from then on, and a row says why.
    """
    end = time.monotonic() + plan.budget
    with contextlib.ExitStack() as stack:
        teams: dict[str, RemoteTeam] = {}
        for name, start in _starts(ranks, transport, share_gpu=cases[0].share_gpu):
            try:
                teams[name] = stack.enter_context(RemoteTeam(name, ranks, start))
            except (RankFailedError, OSError) as error:
                tell({"contestant": name, "error": str(error)})
        if OURS not in teams:
            return
        asking = _Asking(teams, tell)
        for case in cases:
            if time.monotonic() > end:
                tell({"left_out": to_order(case)})
                continue
            tell(_one(asking, case, ranks, plan))


def _starts(ranks: int, transport: str, *, share_gpu: bool) -> Iterator[tuple[str, Any]]:
    paths = [*map(str, FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ours = {"contestant": OURS}
    yield OURS, under_our_launcher(ranks, transport, _MEMBER, ours, environ=environ)
    if importlib.util.find_spec("torch") is not None:
        peer = {"contestant": PEER, "share_gpu": share_gpu}
        yield PEER, one_by_one(ranks, _MEMBER, peer, environ)


class _Asking:
    """Who is still there, and how each is asked."""

    def __init__(self, teams: Mapping[str, RemoteTeam], tell: Tell) -> None:
        self._teams = dict(teams)
        self._tell = tell

    @property
    def contestants(self) -> list[str]:
        """Those who can be asked."""
        return [name for name in CONTESTANTS if self._team(name) in self._teams]

    def ask(self, contestant: str, do: str, **details: Any) -> list[list[float]] | None:
        """Answers in rank order; None from one that has failed, now or before."""
        team = self._teams.get(self._team(contestant))
        if team is None:
            return None
        try:
            return team.ask(contestant, do, **details)
        except RankFailedError as error:
            del self._teams[self._team(contestant)]
            self._tell({"contestant": contestant, "order": do, "error": str(error)})
            return None

    @staticmethod
    def _team(contestant: str) -> str:
        return PEER if contestant == PEER else OURS


def _one(asking: _Asking, case: Step, ranks: int, plan: Plan) -> dict[str, Any]:
    order = to_order(case)
    losses: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    for name in asking.contestants:  # each by itself, for its memory
        asking.ask(name, "prepare", case=order)
        if answers := asking.ask(name, "losses", count=_LOSSES):
            losses[name] = [mean(step) for step in zip(*answers, strict=True)]
        if answers := asking.ask(name, "memory"):
            memory[name] = int(max(value for (value,) in answers))
        asking.ask(name, "release")
    counts: dict[str, int] = {}
    for name in asking.contestants:
        asking.ask(name, "prepare", case=order)
        counts[name] = _iterations(asking, name, plan.seconds)
    samples: dict[str, list[float]] = {name: [] for name in counts}
    for _ in range(plan.rounds):
        for name, count in counts.items():
            if answers := asking.ask(name, "run", warmup=1, iterations=count):
                samples[name].append(mean(value for (value,) in answers) / count)
    for name in counts:
        asking.ask(name, "release")
    return _row(case, ranks, losses, memory, samples)


def _iterations(asking: _Asking, contestant: str, seconds: float) -> int:
    asking.ask(contestant, "run", warmup=2, iterations=1)
    answers = asking.ask(contestant, "run", warmup=0, iterations=3)
    if answers is None:
        return 1
    return int(min(_MOST, max(2, seconds * 3 / max(value for (value,) in answers))))


def _row(
    case: Step,
    ranks: int,
    losses: Mapping[str, list[float]],
    memory: Mapping[str, int],
    samples: Mapping[str, list[float]],
) -> dict[str, Any]:
    ours = samples.get(OURS, [])
    found: dict[str, Any] = {}
    for name, values in samples.items():
        if not values:
            continue
        found[name] = {
            "step_ms": 1e3 * median(values),
            "tokens_per_second": case.tokens / median(values),
            "gpu_memory_bytes": memory.get(name),
            "losses": losses.get(name),
            "agrees": _agrees(name, losses, case.precision),
            "time_over_ours": median(b / a for a, b in zip(ours, values, strict=False)),
            "samples_ms": [round(1e3 * value, 4) for value in values],
        }
    row = {"case": to_order(case), "ranks": ranks, "contestants": found}
    if ours and samples.get(PLAIN):
        # What of our step is neither layers nor loss, norm and optimizer.
        pairs = list(zip(ours, samples[PLAIN], strict=False))
        row["exposed_ms"] = 1e3 * median(a - b for a, b in pairs)
        row["exposed_percent"] = median(100 * (a - b) / a for a, b in pairs)
    return row


def _agrees(contestant: str, losses: Mapping[str, list[float]], precision: str) -> bool | None:
    """Whether the losses are ours; without other ranks only the first one has to be."""
    mine, ours = losses.get(contestant), losses.get(OURS)
    if not mine or not ours:
        return None
    count = 1 if contestant == PLAIN else _LOSSES
    tolerance = _TOLERANCES[precision]
    return all(
        abs(a - b) <= tolerance * abs(b) for a, b in zip(mine[:count], ours[:count], strict=True)
    )
