"""A whole run: start the teams, let them take turns, print, save."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import gpt_model

from fsdp_bench import report
from fsdp_bench.cases import (
    ALONE,
    OFFLOADS,
    PEER,
    PEERS,
    SETTINGS,
    VARIANTS,
    VIRTUAL,
    VIRTUAL_RANKS,
    Case,
    Exchange,
    Training,
    to_order,
)
from fsdp_bench.job import Moved
from fsdp_bench.report import Result
from fsdpcore.bench.harness import options, picture, record
from fsdpcore.bench.harness.measurements import OURS, wrong_in
from fsdpcore.bench.harness.memory import Memory
from fsdpcore.bench.harness.start import RankProgram, Start
from fsdpcore.bench.harness.team import RemoteTeam, Team
from fsdpcore.bench.harness.turns import (
    Entrant,
    RoundPlan,
    run_seconds,
    start_all,
    take_turns,
    versions_of,
)
from fsdpcore.core.errors import ArgumentError

# Where a rank finds the modules of its program, which are in no package that is installed.
FOLDERS = (Path(__file__).parents[1], Path(gpt_model.__file__).parent)
_TRIALS = 4
_TRIAL_STEPS = 2
_LOSSES = 3
_LOSS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class StepRun:
    """What to measure, and where the results go.

    Attributes:
        cases: one after the other.
        ranks: of every contestant.
        transport: scheme or URL of ours.
        plan: of each case.
        against: some of ``PEERS``.
        setting: of the peer, or "auto" for the one that is the fastest in a few trials.
        threads: of each rank's arithmetic; 0 shares the cores evenly.
        directory: where offloaded arrays are.
        json, plot: files to write.
    """

    cases: tuple[Case, ...]
    ranks: int = 2
    transport: str = "zmq"
    plan: RoundPlan = field(default_factory=RoundPlan)
    against: tuple[str, ...] = ()
    setting: str = "auto"
    threads: int = 0
    directory: Path = Path()
    json: Path | None = None
    plot: Path | None = None

    def check(self) -> None:
        """Check everything that can be wrong before a rank is started.

        Raises:
            ArgumentError: an option's value is wrong.
            MissingDependencyError: a package is needed that is not installed.
        """
        options.threads_per_rank(self.ranks, self.threads)
        options.check_known("--against", self.against, PEERS)
        if self.setting not in ("auto", *SETTINGS):
            raise ArgumentError(
                f"--peer-setting must be auto or one of {', '.join(map(repr, SETTINGS))}, "
                f"got {self.setting!r}"
            )
        for case in self.cases:
            if isinstance(case, Training):
                case.check_ranks(self.ranks)
                case.check_ranks(VIRTUAL_RANKS if VIRTUAL in self.against else 1)
        options.check_writable(self.json, self.plot)
        if not self.directory.is_dir():
            raise ArgumentError(f"--dir {self.directory} is no directory")
        if self.plot is not None:
            picture.check_installed()
        options.check_torch([peer for peer in self.against if peer == PEER])

    @property
    def threads_per_rank(self) -> int:
        """Of BLAS and of PyTorch."""
        return options.threads_per_rank(self.ranks, self.threads)


def measure(request: StepRun, echo: options.Echo) -> int:
    """Measure all cases.

    Returns:
        How much was wrong, over all contestants.

    Raises:
        RankFailedError: a rank failed.
    """
    run = record.RunRecord("fsdp_step")
    for line in report.title(request, run.machine):
        echo(line)
    results = []
    for case in request.cases:
        result = _measure(request, case)
        for line in report.table(result):
            echo(line)
        results.append(result)
    run.save(request.json, **report.content(request, results))
    if request.plot is not None:
        report.save_png(request.plot, results, report.short_title(request, run.machine))
    return sum(wrong_in(result.rows) for result in results)


def _measure(request: StepRun, case: Case) -> Result:
    """Measure one case with teams of its own, so that no case is seen in another's memory."""
    trials: dict[str, float] = {}
    if PEER in request.against:
        case = replace(case, setting=request.setting)
        if request.setting == "auto":
            trials = _trials(request, case)
            case = replace(case, setting=min(trials, key=lambda name: trials[name]))
    with contextlib.ExitStack() as stack:
        entrants = start_all(stack, request.ranks, _starts(request, case))
        plan, wrong = request.plan, {}
        if isinstance(case, Training) and plan.check:
            wrong = _wrong_losses(entrants, case)
            plan = replace(plan, check=False)
        rows = take_turns(entrants, plan, to_order(case))
        for name, count in wrong.items():
            rows[name].wrong = count
        outside: list[float] = []
        slower: list[float] = []
        if isinstance(case, Training):
            outside, slower = _outside(entrants[0].team, case, rows[OURS].iterations, plan.rounds)
        moved = {name: _moved(team, name, case) for name, team in entrants if name in OFFLOADS}
        before = {
            name: [Memory.read(answer) for answer in team.ask(name, "before")]
            for name, team in entrants
        }
        versions = versions_of(entrants)
    return Result(case, request.ranks, rows, before, trials, outside, slower, moved, versions)


def _starts(request: StepRun, case: Case) -> dict[str, Start]:
    """How to start each contestant's ranks, ours first."""
    against, others = request.against, [ALONE]
    if isinstance(case, Exchange):  # nothing is stored but parameters, and gradients are not set
        against, others = tuple(name for name in against if name not in OFFLOADS), []
    program = RankProgram.module("fsdp_bench.member", *FOLDERS, threads=request.threads_per_rank)
    return program.starts(
        request.ranks,
        request.transport,
        [OURS, *(name for name in against if name in VARIANTS)],
        [*others, *(name for name in against if name not in VARIANTS)],
        directory=str(request.directory.absolute()),
    )


def _trials(request: StepRun, case: Case) -> dict[str, float]:
    """Seconds of the peer's fastest steps by setting; the settings take turns."""
    begin = _starts(request, case)[PEER]
    seconds = dict.fromkeys(SETTINGS, math.inf)
    with contextlib.ExitStack() as stack:
        # What is done to the C library cannot be taken back, so that has ranks of its own.
        teams = [stack.enter_context(RemoteTeam(PEER, request.ranks, begin)) for _ in range(2)]
        for _ in range(_TRIALS):
            for setting in SETTINGS:
                team = teams["malloc" in setting]
                team.ask(PEER, "prepare", case=to_order(replace(case, setting=setting)))
                took = max(run_seconds(team, PEER, 1, _TRIAL_STEPS)) / _TRIAL_STEPS
                team.ask(PEER, "release")
                seconds[setting] = min(seconds[setting], took)
    return seconds


def _outside(team: Team, case: Case, count: int, rounds: int) -> tuple[list[float], list[float]]:
    """What of our steps is not in layers, loss and AdamW, and what waits for a slower rank.

    The shortest wait of any rank in a pass of a unit counts as the exchange, what others wait
    beyond it as waiting for a slower rank.

    Returns:
        Per cent of a step for both, one value per round.
    """
    team.ask(OURS, "prepare", case=to_order(case))
    run_seconds(team, OURS, 2, 1)
    outside, slower = [], []
    for _ in range(rounds):
        whole = computing = lost = 0.0
        for _ in range(count):
            seconds, computed, *waits = zip(*team.ask(OURS, "split"), strict=True)
            whole += sum(seconds)
            computing += sum(computed)
            lost += sum(sum(ranks) - len(ranks) * min(ranks) for ranks in waits)
        outside.append(100 * (whole - computing) / whole)
        slower.append(100 * lost / whole)
    team.ask(OURS, "release")
    return outside, slower


def _moved(team: Team, name: str, case: Case) -> Moved:
    """What a step moves to and from files, the mean over the ranks."""
    team.ask(name, "prepare", case=to_order(case))
    run_seconds(team, name, 2, 1)
    answers = team.ask(name, "moved")
    team.ask(name, "release")
    return Moved(*map(mean, zip(*answers, strict=True)))


def _wrong_losses(entrants: Sequence[Entrant], case: Training) -> dict[str, int]:
    """How many losses of each contestant are not what others found independently.

    All start from the same values. Without communication, only the loss before the first update
    is that of all ranks; the peer's model has to go the same way as ours.
    """
    losses: dict[str, list[float]] = {}
    for name, team in entrants:
        team.ask(name, "prepare", case=to_order(case))
        answers = team.ask(name, "losses", count=_LOSSES)
        losses[name] = [sum(ranks) / len(ranks) for ranks in zip(*answers, strict=True)]
        team.ask(name, "release")
    right: dict[str, Any] = dict.fromkeys(PEERS, losses[OURS])
    right.update({OURS: losses[ALONE][:1], ALONE: losses[OURS][:1]})
    return {
        name: sum(
            not abs(mine - other) <= _LOSS_TOLERANCE * abs(other)
            for mine, other in zip(found, right[name], strict=False)
        )
        for name, found in losses.items()
    }
