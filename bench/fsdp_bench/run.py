"""A whole run: start the teams, let them take turns, print, save."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import gpt_model

from fsdp_bench import report
from fsdp_bench.cases import (
    ALONE,
    OURS,
    PEER,
    PEERS,
    SETTINGS,
    WITHOUT,
    Case,
    Training,
    to_order,
)
from fsdp_bench.report import Result
from fsdpcore.bench import plot, record
from fsdpcore.bench.main import check_writable, noise_warning
from fsdpcore.bench.memory import Memory
from fsdpcore.bench.session import Entrant, Plan, take_turns, versions_of
from fsdpcore.bench.start import Start, one_by_one, under_our_launcher
from fsdpcore.bench.team import RemoteTeam, Team
from fsdpcore.comm.registry import nearest
from fsdpcore.core.errors import ArgumentError, MissingDependencyError
from fsdpcore.launch.blas import available_cores

_MEMBER = ("-m", "fsdp_bench.member")
# Where a rank finds the modules of its program, which are in no package that is installed.
_FOLDERS = (Path(__file__).parents[1], Path(gpt_model.__file__).parent)
_TRIALS = 4
_TRIAL_STEPS = 2
_LOSSES = 3
_LOSS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Request:
    """What to measure, and where the results go.

    Attributes:
        cases: one after the other.
        ranks: of every contestant.
        transport: scheme or URL of ours.
        plan: of each case.
        against: peers; "fsdp2" or none.
        setting: of the peer, or "auto" for the one that is the fastest in a few trials.
        threads: of each rank's arithmetic; 0 shares the cores evenly.
        json, plot: files to write.
        command: the command line, for the record.
    """

    cases: tuple[Case, ...]
    ranks: int = 2
    transport: str = "zmq"
    plan: Plan = field(default_factory=Plan)
    against: tuple[str, ...] = ()
    setting: str = "auto"
    threads: int = 0
    json: Path | None = None
    plot: Path | None = None
    command: tuple[str, ...] = ()

    def check(self) -> None:
        """Check everything that can be wrong before a rank is started.

        Raises:
            ArgumentError: an option's value is wrong.
            MissingDependencyError: a package is needed that is not installed.
        """
        if self.ranks < 1 or self.threads < 0:
            raise ArgumentError(
                "-n must be at least 1 and --threads not negative, "
                f"got {self.ranks} and {self.threads}"
            )
        for peer in self.against:
            if peer not in PEERS:
                raise ArgumentError(
                    f"--against knows no {peer!r}{nearest(peer, PEERS)}; "
                    f"it knows {' and '.join(PEERS)}"
                )
        if self.setting not in ("auto", *SETTINGS):
            raise ArgumentError(
                f"--peer-setting must be auto or one of {', '.join(map(repr, SETTINGS))}, "
                f"got {self.setting!r}"
            )
        for case in self.cases:
            if isinstance(case, Training):
                case.check_ranks(self.ranks)
        for file in (self.json, self.plot):
            if file is not None:
                check_writable(file)
        if self.plot is not None:
            plot.check_installed()
        if PEER in self.against and importlib.util.find_spec("torch") is None:
            raise MissingDependencyError(
                f"--against {PEER} needs PyTorch, which no extra of fsdpcore installs; get the "
                "build for CPUs with: pip install torch --index-url "
                "https://download.pytorch.org/whl/cpu"
            )

    @property
    def threads_per_rank(self) -> int:
        """Of BLAS and of PyTorch."""
        return self.threads or max(1, available_cores() // self.ranks)


def run(request: Request, echo: Callable[[str], None]) -> int:
    """Measure all cases.

    Returns:
        How much was wrong, over all contestants.

    Raises:
        RankFailedError: a rank failed.
    """
    started, machine = record.started_now(), record.machine()
    for line in (*report.title(request, machine), *noise_warning(machine), "#"):
        echo(line)
    results = []
    for case in request.cases:
        result = _measure(request, case, echo)
        for line in report.table(result):
            echo(line)
        results.append(result)
    if request.json is not None:
        record.save(request.json, report.document(request, results, started, machine))
    if request.plot is not None:
        report.save_png(request.plot, results, report.short_title(request, machine))
    return sum(row.wrong or 0 for result in results for row in result.rows.values())


def _measure(request: Request, case: Case, echo: Callable[[str], None]) -> Result:
    """Measure one case with teams of its own, so that no case is seen in another's memory."""
    trials: dict[str, float] = {}
    if PEER in request.against:
        case = replace(case, setting=request.setting)
        if request.setting == "auto":
            trials = _trials(request, case)
            case = replace(case, setting=min(trials, key=lambda name: trials[name]))
    with contextlib.ExitStack() as stack:
        entrants = [
            Entrant(name, stack.enter_context(RemoteTeam(name, request.ranks, begin)))
            for name, begin in _starts(request, case)
        ]
        versions = versions_of(entrants)
        plan, wrong = request.plan, {}
        if isinstance(case, Training) and plan.check:
            wrong = _wrong_losses(entrants, case)
            plan = replace(plan, check=False)
        rows = take_turns(entrants, plan, to_order(case))
        for name, count in wrong.items():
            rows[name].wrong = count
        inside = []
        if isinstance(case, Training):
            inside = _inside(entrants[0].team, case, rows[OURS].iterations, plan.rounds)
        before = {
            name: [Memory.read(answer) for answer in team.ask(name, "before")]
            for name, team in entrants
        }
    return Result(case, request.ranks, rows, before, trials, inside, dict(versions))


def _starts(request: Request, case: Case) -> list[tuple[str, Start]]:
    """How to start each contestant's ranks, ours first."""
    ranks, environ = request.ranks, _environ(request)
    starts = [
        (
            name,
            under_our_launcher(
                ranks, request.transport, _MEMBER, {"contestant": name}, environ=environ
            ),
        )
        for name in (OURS, *(name for name in request.against if name == WITHOUT))
    ]
    others = [ALONE] if isinstance(case, Training) else []
    for name in (*others, *(name for name in request.against if name != WITHOUT)):
        options = {"contestant": name, "threads": request.threads_per_rank}
        starts.append((name, one_by_one(ranks, _MEMBER, options, environ)))
    return starts


def _environ(request: Request) -> dict[str, str]:
    paths = [*map(str, _FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "FSDPCORE_BLAS_THREADS": str(request.threads_per_rank),
    }


def _trials(request: Request, case: Case) -> dict[str, float]:
    """Seconds of the peer's fastest steps by setting; the settings take turns."""
    (begin,) = [begin for name, begin in _starts(request, case) if name == PEER]
    seconds = dict.fromkeys(SETTINGS, math.inf)
    with contextlib.ExitStack() as stack:
        # What is done to the C library cannot be taken back, so that has ranks of its own.
        teams = [stack.enter_context(RemoteTeam(PEER, request.ranks, begin)) for _ in range(2)]
        for _ in range(_TRIALS):
            for setting in SETTINGS:
                team = teams["malloc" in setting]
                team.ask(PEER, "prepare", case=to_order(replace(case, setting=setting)))
                answers = team.ask(PEER, "run", warmup=1, iterations=_TRIAL_STEPS)
                team.ask(PEER, "release")
                took = max(value for (value,) in answers) / _TRIAL_STEPS
                seconds[setting] = min(seconds[setting], took)
    return seconds


def _inside(team: Team, case: Case, count: int, rounds: int) -> list[float]:
    """Per cent of our steps that are not in layers, loss and AdamW: one value per round."""
    team.ask(OURS, "prepare", case=to_order(case))
    team.ask(OURS, "run", warmup=2, iterations=1)
    found = []
    for _ in range(rounds):
        answers = team.ask(OURS, "split", count=count)
        found.append(mean(100 * (whole - computing) / whole for whole, computing in answers))
    team.ask(OURS, "release")
    return found


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
