"""A whole run: start the teams, measure, print, save."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdpcore import __version__
from fsdpcore.bench import cases, peer_gloo, peer_mpi, plot, table
from fsdpcore.bench.cases import Case
from fsdpcore.bench.harness import picture, record
from fsdpcore.bench.harness.measurements import OURS, wrong_in
from fsdpcore.bench.harness.options import Echo, check_known, check_torch, check_writable
from fsdpcore.bench.harness.start import RankProgram
from fsdpcore.bench.harness.table import heading
from fsdpcore.bench.harness.team import LocalTeam, RemoteTeam
from fsdpcore.bench.harness.turns import Entrant, RoundPlan, take_turns, versions_of
from fsdpcore.bench.member import make_member
from fsdpcore.bench.rows import Row, content
from fsdpcore.comm.backend import Backend
from fsdpcore.core.errors import ArgumentError, MissingDependencyError
from fsdpcore.launch.config import parse_url
from fsdpcore.launch.run.mpirun import find_mpirun

PEERS = ("gloo", "mpi")
_REFUSALS = {"gloo": peer_gloo.refusal, "mpi": peer_mpi.refusal}
_PROGRAM = RankProgram.module("fsdpcore.bench.member")

Results = list[dict[str, Row]]


@dataclass(frozen=True)
class CollectivesRun:
    """What to measure, and where the results go.

    Attributes:
        operations: names, or "all".
        world_size: number of ranks.
        transport: scheme or URL of ours.
        first, last, factor: the sizes in bytes.
        dtype, op, root: of the cases.
        algorithm: as the collectives take it.
        plain: measure arrays of NumPy's rather than ``backend.empty``'s.
        places: "out" and "in", or one of them.
        plan: how each case is measured.
        against: peers to measure beside ours.
        json, plot: files to write.
        command: the command line, for the record.
    """

    operations: Sequence[str]
    world_size: int
    transport: str
    first: int = 8
    last: int = 64 * 2**20
    factor: int = 2
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    algorithm: str = "auto"
    plain: bool = False
    places: tuple[str, ...] = cases.PLACES
    plan: RoundPlan = field(default_factory=RoundPlan)
    against: tuple[str, ...] = ()
    json: Path | None = None
    plot: Path | None = None
    command: tuple[str, ...] = ()

    @property
    def shared(self) -> str:
        """The peer that runs in our processes: a bare MPI loop, where ours run on MPI too."""
        on_mpi = parse_url(self.transport).scheme == "mpi"
        return "mpi" if on_mpi and "mpi" in self.against else ""

    @property
    def contestants(self) -> tuple[str, ...]:
        """Those in our processes."""
        return (OURS, self.shared) if self.shared else (OURS,)

    @property
    def member_options(self) -> dict[str, Any]:
        """How our ranks are to be, as ``make_member`` takes it."""
        contestants = list(self.contestants)
        return {"algorithm": self.algorithm, "plain": self.plain, "contestants": contestants}

    def check(self) -> None:
        """Check everything that can be wrong before a rank is started.

        Raises:
            ArgumentError: an option's value is wrong.
            MissingDependencyError: a package is needed that is not installed.
        """
        operations = cases.chosen_operations(self.operations)
        if not any(cases.has_place(name, place) for name in operations for place in self.places):
            raise ArgumentError(f"{', '.join(operations)} cannot be measured in place")
        cases.sizes(self.first, self.last, self.factor)
        cases.check_kind(self.dtype, self.op, self.root, self.world_size)
        check_known("--against", self.against, PEERS)
        check_writable(self.json, self.plot)
        if self.plot is not None:
            picture.check_installed()

    def check_inside(self) -> None:
        """Check what must hold besides where a launcher has started the ranks.

        Raises:
            ArgumentError: a peer was asked for that needs processes of its own.
        """
        apart = [peer for peer in self.against if peer != self.shared]
        if apart:
            raise ArgumentError(
                f"--against {','.join(apart)} starts processes of its own; leave the launcher out "
                "and say how many ranks with -n"
            )

    def settings(self) -> dict[str, Any]:
        """All options, for the record."""
        found = asdict(self)
        for name in ("json", "plot", "command"):
            del found[name]
        return found


def refusal(contestant: str, case: Case) -> str:
    """Why a contestant cannot do a case; empty if it can."""
    refuse = _REFUSALS.get(contestant)
    return refuse(case) if refuse is not None else ""


def measure(entrants: Sequence[Entrant], plan: RoundPlan, case: Case) -> dict[str, Row]:
    """Measure one case; the rows by contestant. Those who cannot do it are left out."""
    able = [each for each in entrants if not refusal(each.contestant, case)]
    rows = take_turns(able, plan, asdict(case))
    return {name: Row(**vars(row), case=case) for name, row in rows.items()}


def _check_installed(peers: Sequence[str]) -> None:
    check_torch([peer for peer in peers if peer == "gloo"])
    if "mpi" in peers:
        if importlib.util.find_spec("mpi4py") is None:
            raise MissingDependencyError(
                '--against mpi needs mpi4py; install it with: pip install "fsdpcore[mpi]"'
            )
        find_mpirun(1, os.environ)


def run(request: CollectivesRun, echo: Echo) -> int:
    """Start ranks, measure, and end them.

    Returns:
        The number of wrong elements that any contestant produced.

    Raises:
        RankFailedError: a rank failed.
    """
    _check_installed(request.against)
    with contextlib.ExitStack() as stack:
        return _run_with(request, _start_teams(request, stack), echo)


def run_inside(backend: Backend, request: CollectivesRun, echo: Echo) -> int:
    """Measure among the ranks of a job that a launcher started; every rank calls this.

    Returns:
        As ``run``, on every rank; rank 0 prints and saves.
    """
    member = make_member(backend, request.member_options)
    team = LocalTeam(backend, member)
    entrants = [Entrant(name, team) for name in request.contestants]
    silent = backend.rank != 0
    wrong = _run_with(request, entrants, _nothing if silent else echo, save=not silent)
    member.close()
    return wrong


def _nothing(line: str) -> None: ...


def _start_teams(request: CollectivesRun, stack: contextlib.ExitStack) -> list[Entrant]:
    """Start one team after the other; those that are up sleep meanwhile."""
    p = request.world_size
    starts = {
        OURS: lambda: _PROGRAM.under_our_launcher(p, request.transport, **request.member_options),
        "gloo": lambda: _PROGRAM.one_by_one(p, contestants=["gloo"]),
        "mpi": lambda: _PROGRAM.under_mpirun(p, contestants=["mpi"]),
    }
    teams: dict[str, RemoteTeam] = {}
    for name in (OURS, *request.against):
        if name == request.shared:
            teams[name] = teams[OURS]
        else:
            teams[name] = stack.enter_context(RemoteTeam(name, p, starts[name]()))
    return [Entrant(name, team) for name, team in teams.items()]


def _run_with(
    request: CollectivesRun, entrants: Sequence[Entrant], echo: Echo, *, save: bool = True
) -> int:
    run = record.RunRecord("collectives", request.command)
    versions = versions_of(entrants)
    for line in _title(request, run.machine, versions):
        echo(line)
    results: Results = []
    for operation in cases.chosen_operations(request.operations):
        echo(f"# {operation}")
        for batch in _measured(request, operation, entrants, echo):
            results += batch
        echo("#")
    rows = [row for case in results for row in case.values()]
    for line in table.footer(rows):
        echo(line)
    if save:
        settings = request.settings()
        run.save(request.json, versions=versions, settings=settings, **content(results))
        if request.plot is not None:
            _draw(request.plot, request, results, run.machine)
    return sum(map(wrong_in, results))


def _title(
    request: CollectivesRun, machine: Mapping[str, Any], versions: Mapping[str, Mapping[str, str]]
) -> list[str]:
    plan = request.plan
    each = f"{plan.iterations} iterations" if plan.iterations else f"{plan.seconds:g} s"
    memory = "numpy.empty" if request.plain else "backend.empty"
    lines = heading(
        machine,
        f"fsdpcore {__version__}, transport {request.transport}, {request.world_size} ranks, "
        f"algorithm {request.algorithm}, arrays from {memory}",
        f"{plan.rounds} rounds of {each} each, {plan.warmup} warm-up iterations; "
        "median over the rounds of the mean over the ranks",
    )
    if request.against:
        lines.append(
            "# ratio: the peer's time over ours in the same round, so more than 1 where ours is "
            "faster; median, min and max over the rounds"
        )
    if request.shared:
        lines.append(
            f"# {request.shared}: a bare loop in our processes; ours-bare and overhead are medians "
            "over the rounds, best is between the fastest rounds of the two"
        )
    for name, found in versions.items():
        libraries = ", ".join(f"{key} {value}" for key, value in found.items())
        lines.append(f"# {name}: {libraries}")
    return [*lines, "#"]


def _measured(
    request: CollectivesRun, operation: str, entrants: Sequence[Entrant], echo: Echo
) -> Iterator[Results]:
    """Measure one operation and print its tables; what each size gave, as it comes."""
    by_place = {place: _cases(request, operation, place) for place in request.places}
    if not request.against:
        yield from _plain(request.plan, by_place, entrants, echo)
        return
    names = [OURS, *request.against]
    for place, wanted in by_place.items():
        if not wanted:
            continue
        for line in table.versus_header(names, place, request.shared):
            echo(line)
        for reason in filter(None, (refusal(name, wanted[0]) for name in names)):
            echo(f"# {reason}")
        for case in wanted:
            rows = measure(entrants, request.plan, case)
            echo(table.versus_line(rows, names, request.shared))
            yield [rows]


def _plain(
    plan: RoundPlan, by_place: Mapping[str, Sequence[Case]], entrants: Sequence[Entrant], echo: Echo
) -> Iterator[Results]:
    for line in table.plain_header(list(by_place)):
        echo(line)
    count = max(len(wanted) for wanted in by_place.values())
    for index in range(count):
        measured = [
            measure(entrants, plan, wanted[index]) if wanted else None
            for wanted in by_place.values()
        ]
        echo(table.plain_line([None if rows is None else rows[OURS] for rows in measured]))
        yield [rows for rows in measured if rows is not None]


def _cases(request: CollectivesRun, operation: str, place: str) -> list[Case]:
    if not cases.has_place(operation, place):
        return []
    return cases.make_cases(
        operation,
        cases.sizes(request.first, request.last, request.factor),
        request.world_size,
        dtype=request.dtype,
        op=request.op,
        root=request.root,
        in_place=place == "in",
    )


def _draw(
    path: Path, request: CollectivesRun, results: Results, machine: Mapping[str, Any]
) -> None:
    labels = {name: name for name in (OURS, *request.against)}
    labels[OURS] = f"fsdpcore ({parse_url(request.transport).scheme})"
    title = f"{request.world_size} ranks, {request.dtype}, {machine['cpu']}"
    plot.save_png(path, results, labels, title)
