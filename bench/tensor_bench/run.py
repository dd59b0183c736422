"""A whole run: start the teams, let them take turns, print, save."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gpt_model

from fsdpcore import __version__
from fsdpcore.bench import record
from fsdpcore.bench.main import check_writable, noise_warning
from fsdpcore.bench.results import Timing, compare
from fsdpcore.bench.session import Entrant, Plan, take_turns, versions_of
from fsdpcore.bench.start import Start, one_by_one, under_our_launcher
from fsdpcore.bench.team import RemoteTeam
from fsdpcore.core.errors import ArgumentError, MissingDependencyError
from fsdpcore.launch.blas import available_cores
from tensor_bench.cases import OURS, PEER, PEERS, Case

SCHEMA = "fsdpcore.bench.tensor_parallel/1"

_MEMBER = ("-m", "tensor_bench.member")
# Where a rank finds the modules of its program, which are in no package that is installed.
_FOLDERS = (Path(__file__).parents[1], Path(gpt_model.__file__).parent)
_LINE = "{:<14}{:>10}{:>10}{:>9}{:>8}{:>8}{:>8}"


@dataclass(frozen=True)
class Request:
    """What to measure, and where the results go.

    Attributes:
        cases: one after the other.
        ranks: of every contestant.
        transport: scheme or URL of ours.
        plan: of each case.
        against: peers; "dtensor" or none.
        threads: of each rank's arithmetic; 0 shares the cores evenly.
        json: file to write.
        command: the command line, for the record.
    """

    cases: tuple[Case, ...]
    ranks: int = 2
    transport: str = "zmq"
    plan: Plan = field(default_factory=Plan)
    against: tuple[str, ...] = ()
    threads: int = 0
    json: Path | None = None
    command: tuple[str, ...] = ()

    def check(self) -> None:
        """Check everything that can be wrong before a rank is started.

        Raises:
            ArgumentError: an option's value is wrong.
            MissingDependencyError: a package is needed that is not installed.
        """
        if self.ranks < 1 or self.threads < 0:
            raise ArgumentError("-n must be at least 1 and --threads not negative")
        for peer in self.against:
            if peer not in PEERS:
                raise ArgumentError(f"--against knows {', '.join(PEERS)}, not {peer!r}")
        for case in self.cases:
            case.check_ranks(self.ranks)
        if self.json is not None:
            check_writable(self.json)
        if self.against and importlib.util.find_spec("torch") is None:
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
    """Measure all cases; returns how many elements were wrong, over all contestants.

    Raises:
        RankFailedError: a rank failed.
    """
    started, machine = record.started_now(), record.machine()
    echo(
        f"# fsdpcore {__version__}, transport {request.transport}, {request.ranks} ranks, "
        f"{request.threads_per_rank} threads each; {machine['cpu']}, {machine['cores']} cores"
    )
    for line in noise_warning(machine):
        echo(line)
    with contextlib.ExitStack() as stack:
        entrants = [
            Entrant(name, stack.enter_context(RemoteTeam(name, request.ranks, begin)))
            for name, begin in _starts(request)
        ]
        results = []
        for case in request.cases:
            rows = take_turns(entrants, request.plan, asdict(case))
            for line in _table(case, rows):
                echo(line)
            results.append((case, rows))
        versions = versions_of(entrants)
    if request.json is not None:
        document = {
            "schema": SCHEMA,
            "started": started,
            "command": list(request.command),
            "machine": dict(machine),
            "versions": dict(versions),
            "settings": {
                "ranks": request.ranks,
                "transport": request.transport,
                "threads": request.threads_per_rank,
                "plan": asdict(request.plan),
            },
            "results": [_result(case, rows) for case, rows in results],
        }
        record.save(request.json, document)
    return sum(row.wrong or 0 for _, rows in results for row in rows.values())


def _starts(request: Request) -> list[tuple[str, Start]]:
    paths = [*map(str, _FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "FSDPCORE_BLAS_THREADS": str(request.threads_per_rank),
    }
    ours = under_our_launcher(
        request.ranks, request.transport, _MEMBER, {"contestant": OURS}, environ=environ
    )
    starts = [(OURS, ours)]
    for name in request.against:
        options = {"contestant": name, "threads": request.threads_per_rank}
        starts.append((name, one_by_one(request.ranks, _MEMBER, options, environ)))
    return starts


def _table(case: Case, rows: Mapping[str, Timing]) -> list[str]:
    how = "cut along the sequence between" if case.sequence else "whole between"
    lines = [
        f"# block: width {case.width}, {case.heads} heads, hidden {case.hidden}, input "
        f"{case.batch} x {case.length}, {how}; forward and backward",
        "# " + _LINE.format("contestant", "time", "best", "ratio", "min", "max", "wrong"),
        "# " + _LINE.format("", "(ms)", "(ms)", "", "", "", ""),
    ]
    for name, row in rows.items():
        ratio = ["", "", ""]
        if name != OURS:
            ratio = [f"{value:.2f}" for value in compare(rows[OURS], row).ratio]
        wrong = "-" if row.wrong is None else str(row.wrong)
        times = (f"{1e3 * row.seconds:.2f}", f"{1e3 * min(row.rounds):.2f}")
        lines.append("  " + _LINE.format(name, *times, *ratio, wrong))
    return lines


def _result(case: Case, rows: Mapping[str, Timing]) -> dict[str, Any]:
    return {
        "case": asdict(case),
        "rows": [
            {
                "contestant": name,
                "iterations": row.iterations,
                "wrong": row.wrong,
                "time_ms": {"avg": 1e3 * row.seconds, "best": 1e3 * min(row.rounds)},
                "memory_mib": record.memory(row),
                "samples_ms": [[1e3 * seconds for seconds in ranks] for ranks in row.samples],
            }
            for name, row in rows.items()
        ],
        "ratios": {
            name: compare(rows[OURS], row).ratio._asdict()
            for name, row in rows.items()
            if name != OURS
        },
    }
