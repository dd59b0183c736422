"""A whole run: start the teams, measure, print, save."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdpcore import __version__
from fsdpcore.bench import cases, plot, record, start, table
from fsdpcore.bench.contestants import OURS
from fsdpcore.bench.member import make_member
from fsdpcore.bench.results import Row
from fsdpcore.bench.session import Entrant, Plan, Session, refusal, versions_of
from fsdpcore.bench.start import OurOptions
from fsdpcore.bench.team import LocalTeam, RemoteTeam
from fsdpcore.comm.backend import Backend
from fsdpcore.comm.registry import nearest
from fsdpcore.core.errors import ArgumentError
from fsdpcore.launch.config import parse_url

Echo = Callable[[str], None]
Results = list[dict[str, Row]]


@dataclass(frozen=True)
class Request:
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
    plan: Plan = field(default_factory=Plan)
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
    def ours(self) -> OurOptions:
        """How our ranks are to be."""
        contestants = (OURS, self.shared) if self.shared else (OURS,)
        return OurOptions(self.transport, self.algorithm, self.plain, contestants)

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
        for peer in self.against:
            if peer not in start.PEERS:
                raise ArgumentError(
                    f"--against knows no {peer!r}{nearest(peer, start.PEERS)}; "
                    f"it knows {', '.join(start.PEERS)}"
                )
        for file in (self.json, self.plot):
            if file is not None:
                check_writable(file)
        if self.plot is not None:
            plot.check_installed()

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


def check_writable(file: Path) -> None:
    """Check before hours of measuring rather than after that the result can be kept.

    Raises:
        ArgumentError: it cannot.
    """
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ArgumentError(f"cannot write {file}: there is no directory {file.parent}")
    if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise ArgumentError(f"cannot write {file}: it is a directory, or may not be written")


def run(request: Request, echo: Echo) -> int:
    """Start ranks, measure, and end them.

    Returns:
        The number of wrong elements that any contestant produced.

    Raises:
        RankFailedError: a rank failed.
    """
    start.check_installed(request.against)
    with contextlib.ExitStack() as stack:
        return _run_with(request, _start_teams(request, stack), echo)


def run_inside(backend: Backend, request: Request, echo: Echo) -> int:
    """Measure among the ranks of a job that a launcher started; every rank calls this.

    Returns:
        As ``run``, on every rank; rank 0 prints and saves.
    """
    member = make_member(backend, request.ours.as_dict())
    team = LocalTeam(backend, member)
    entrants = [Entrant(name, team) for name in request.ours.contestants]
    silent = backend.rank != 0
    wrong = _run_with(request, entrants, _nothing if silent else echo, save=not silent)
    member.close()
    return wrong


def _nothing(line: str) -> None: ...


def _start_teams(request: Request, stack: contextlib.ExitStack) -> list[Entrant]:
    """Start one team after the other; those that are up sleep meanwhile."""
    p = request.world_size
    ours = stack.enter_context(RemoteTeam(OURS, p, start.start_ours(p, request.ours)))
    entrants = [Entrant(OURS, ours)]
    for peer in request.against:
        team = ours
        if peer != request.shared:
            begin = start.start_gloo(p) if peer == "gloo" else start.start_mpi(p)
            team = stack.enter_context(RemoteTeam(peer, p, begin))
        entrants.append(Entrant(peer, team))
    return entrants


def _run_with(
    request: Request, entrants: Sequence[Entrant], echo: Echo, *, save: bool = True
) -> int:
    started, machine = record.started_now(), record.machine()
    versions = versions_of(entrants)
    for line in _title(request, machine, versions):
        echo(line)
    session = Session(entrants, request.plan)
    results: Results = []
    for operation in cases.chosen_operations(request.operations):
        echo(f"# {operation}")
        for batch in _measured(request, operation, session, echo):
            results += batch
        echo("#")
    rows = [row for case in results for row in case.values()]
    for line in table.footer(rows):
        echo(line)
    if save:
        _save(request, results, started, machine, versions)
    return sum(row.wrong or 0 for row in rows)


def _title(
    request: Request, machine: Mapping[str, Any], versions: Mapping[str, Mapping[str, str]]
) -> list[str]:
    plan = request.plan
    each = f"{plan.iterations} iterations" if plan.iterations else f"{plan.seconds:g} s"
    memory = "numpy.empty" if request.plain else "backend.empty"
    lines = [
        f"# fsdpcore {__version__}, transport {request.transport}, {request.world_size} ranks, "
        f"algorithm {request.algorithm}, arrays from {memory}",
        f"# {machine['cpu']}, {machine['cores']} cores",
        *noise_warning(machine),
        f"# {plan.rounds} rounds of {each} each, {plan.warmup} warm-up iterations; "
        "median over the rounds of the mean over the ranks",
    ]
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


def noise_warning(machine: Mapping[str, Any]) -> list[str]:
    """A line to print, if this machine is not quiet."""
    load, cores = machine["load_average_at_start"], machine["cores"]
    if load <= cores / 4:
        return []
    return [f"# NOTE: something else is computing here (load {load}); the numbers will be noisy"]


def _measured(request: Request, operation: str, session: Session, echo: Echo) -> Iterator[Results]:
    """Measure one operation and print its tables; what each size gave, as it comes."""
    by_place = {place: _cases(request, operation, place) for place in request.places}
    if not request.against:
        yield from _plain(by_place, session, echo)
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
            rows = session.measure(case)
            echo(table.versus_line(rows, names, request.shared))
            yield [rows]


def _plain(
    by_place: Mapping[str, Sequence[cases.Case]], session: Session, echo: Echo
) -> Iterator[Results]:
    for line in table.plain_header(list(by_place)):
        echo(line)
    count = max(len(wanted) for wanted in by_place.values())
    for index in range(count):
        measured = [
            session.measure(wanted[index]) if wanted else None for wanted in by_place.values()
        ]
        echo(table.plain_line([None if rows is None else rows[OURS] for rows in measured]))
        yield [rows for rows in measured if rows is not None]


def _cases(request: Request, operation: str, place: str) -> list[cases.Case]:
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


def _save(
    request: Request,
    results: Results,
    started: str,
    machine: Mapping[str, Any],
    versions: Mapping[str, Mapping[str, str]],
) -> None:
    if request.json is not None:
        content = record.document(
            results,
            command=request.command,
            started=started,
            place=machine,
            versions=versions,
            settings=request.settings(),
        )
        record.save(request.json, content)
    if request.plot is not None:
        labels = {name: name for name in (OURS, *request.against)}
        labels[OURS] = f"fsdpcore ({parse_url(request.transport).scheme})"
        title = f"{request.world_size} ranks, {request.dtype}, {machine['cpu']}"
        plot.save_png(request.plot, results, labels, title)
