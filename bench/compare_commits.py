"""Compare the speed of two commits: the same cases under both, in turn.

    python bench/compare_commits.py --old ../old-venv/bin/python --new ../new-venv/bin/python
    python bench/compare_commits.py --old ... --transport zmq --ranks 2 --only all_reduce,step.*

Each interpreter has one of the two installed. The ranks of both live at the same time and take
turns in every round. A turn is a few blocks of calls, of which the fastest counts. ``ratio`` is
new over old in the same round, its median over the rounds; ``low`` and ``high`` bound that median
with 95 % confidence (sign test). How fast a process is depends a little on how it has started,
which more rounds do not average; so the ranks are started several times, and ``starts`` are the
ratios of each. A case is slower where ``ratio`` is above 1.05 and ``low`` above 1.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.append(str(Path(__file__).parent))  # the parts, where this is not run as a script

from commits_bench import cases, report
from commits_bench.cases import Setting
from commits_bench.report import NEW, OLD, Compared

from fsdpcore.bench import record
from fsdpcore.bench.cases import parse_size
from fsdpcore.bench.main import check_writable, noise_warning
from fsdpcore.bench.session import Entrant, Plan, take_turns
from fsdpcore.bench.start import under_our_launcher
from fsdpcore.bench.team import RemoteTeam
from fsdpcore.commands.bench import ending_well_on_sigterm
from fsdpcore.commands.usage import one_line
from fsdpcore.core.errors import ArgumentError, RankFailedError

SLOWER = 1
_MEMBER = str(Path(__file__).parent / "commits_bench" / "member.py")


def main(
    old: Annotated[Path, typer.Option(help="Interpreter with the old commit.")],
    new: Annotated[Path, typer.Option(help="Interpreter with the new one.")] = Path(sys.executable),
    transport: Annotated[str, typer.Option(help="Schemes or URLs.")] = "zmq,sim,mpi",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2,4",
    only: Annotated[
        str, typer.Option(help=f"Names, or patterns such as step.*, of {', '.join(cases.NAMES)}.")
    ] = "*",
    sizes: Annotated[str, typer.Option(help="Of collectives.")] = ",".join(map(str, cases.SIZES)),
    memory: Annotated[str, typer.Option(help="Arrays: plain, backend.")] = "plain,backend",
    rounds: Annotated[int, typer.Option(help="Over all starts.")] = 15,
    starts: Annotated[int, typer.Option(help="How often the ranks are started anew.")] = 3,
    seconds: Annotated[float, typer.Option(help="Of one contestant in a round, roughly.")] = 0.008,
    json: Annotated[Path | None, typer.Option(help="File for all samples.")] = None,
) -> None:
    """Compare the speed of two commits. The exit code is 1 if a case has become slower."""
    with one_line():
        wanted = cases.settings(
            _names(transport),
            [int(one) for one in _names(ranks)],
            _names(only),
            [parse_size(one) for one in _names(sizes)],
            _names(memory),
        )
        if not wanted:
            raise ArgumentError(f"--only {only} names no case; there are {', '.join(cases.NAMES)}")
        if starts < 1 or rounds < starts:
            raise ArgumentError("--starts must be at least 1, and --rounds no fewer")
        if json is not None:
            check_writable(json)
        pythons = {OLD: old, NEW: new}
        plan = Plan(rounds // starts, seconds=seconds, warmup=3, check=False, fewest=1)
        started, machine = record.started_now(), record.machine()
        for line in (f"# {machine['cpu']}, {machine['cores']} cores", *noise_warning(machine)):
            typer.echo(line)
        run = {
            "schema": "fsdpcore.bench.compare_commits/1",
            "started": started,
            "command": ["python", *sys.argv],
            "machine": machine,
            "settings": {"plan": asdict(plan), "starts": starts},
        }
        found: list[Compared] = []
        with ending_well_on_sigterm():
            for setting in wanted:
                found += _measure(setting, pythons, plan, starts)
                if json is not None:
                    report.save(json, run, found)
        for line in report.summary(found):
            typer.echo(line)
    raise typer.Exit(SLOWER if any(one.slower for one in found) else 0)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _measure(setting: Setting, pythons: dict[str, Path], plan: Plan, starts: int) -> list[Compared]:
    """Measure all cases of a setting; a start that fails is left out, and a line says why."""
    found = {case: Compared(setting, case) for case in setting.cases}
    for number in range(starts):
        # Who starts first may lie better in memory.
        order = [OLD, NEW] if number % 2 == 0 else [NEW, OLD]
        try:
            with ExitStack() as stack:
                teams = {name: _team(name, setting, pythons[name], stack) for name in order}
                if number == 0:
                    typer.echo(
                        f"# old: {_module(teams[OLD], OLD)}, new: {_module(teams[NEW], NEW)}"
                    )
                entrants = [Entrant(name, teams[name]) for name in order]
                for case, compared in found.items():
                    with tempfile.TemporaryDirectory(prefix="bench-", dir=_memory()) as folder:
                        timings = take_turns(entrants, plan, {**asdict(case), "folder": folder})
                    compared.add(timings[OLD], timings[NEW])
        except RankFailedError as error:
            typer.echo(f"# {setting.transport}, {setting.ranks} ranks: {error}")
    measured = [one for one in found.values() if one.starts]
    for line in (*report.header(setting), *(one.line() for one in measured)):
        typer.echo(line)
    return measured


def _team(name: str, setting: Setting, python: Path, stack: ExitStack) -> RemoteTeam:
    # Each interpreter finds the commit that it has installed, wherever this is run.
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environ.update(PYTHONSAFEPATH="1", FSDPCORE_BLAS_THREADS="1")
    start = under_our_launcher(
        setting.ranks,
        setting.transport,
        (_MEMBER,),
        {"contestant": name},
        environ,
        str(python.absolute()),
    )
    return stack.enter_context(RemoteTeam(name, setting.ranks, start))


def _module(team: RemoteTeam, name: str) -> str:
    """Where the package lies that its ranks have imported."""
    return team.versions[name]["fsdpcore"]


def _memory() -> Any:
    """A folder in memory, where there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108


if __name__ == "__main__":
    typer.run(main)
