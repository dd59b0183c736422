"""Compare the speed of two commits: the same cases under both, in turn.

    python bench/compare_commits.py --old ../old-venv/bin/python --new ../new-venv/bin/python
    python bench/compare_commits.py --old ... --transport zmq --ranks 2 --only all_reduce,step.*

Each interpreter has one of the two installed. The ranks of both live at the same time and take
turns in every round. A turn is a few blocks of calls, of which the fastest counts. ``ratio`` is
new over old in the same round, its median over the rounds; ``low`` and ``high`` bound that median
with 95 % confidence (sign test). How fast a process is depends a little on how it has started,
which more rounds do not average; so the ranks are started several times, and ``starts`` are the
ratios of each. A case seems slower where ``ratio`` is above 1.05 and ``low`` above 1; it is then
measured once more, and is slower if it seems so again.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parent))  # the parts, where this is not run as a script

from commits_bench import cases, report
from commits_bench.cases import Setting
from commits_bench.report import NEW, OLD, Compared

from fsdpcore.bench.cases import parse_size
from fsdpcore.bench.harness import options, record, table
from fsdpcore.bench.harness.start import RankProgram, Start
from fsdpcore.bench.harness.turns import RoundPlan, start_all, take_turns, versions_of
from fsdpcore.core.errors import ArgumentError, RankFailedError

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
    rounds: Annotated[int, typer.Option(help="Over all starts.")] = 12,
    starts: Annotated[int, typer.Option(help="How often the ranks are started anew.")] = 3,
    seconds: Annotated[float, typer.Option(help="Of one contestant in a round, roughly.")] = 0.006,
    json: options.Json = None,
) -> None:
    """Compare the speed of two commits. The exit code is 1 if a case has become slower."""

    def bench() -> int:
        wanted = cases.settings(
            options.names(transport),
            [int(one) for one in options.names(ranks)],
            options.names(only),
            [parse_size(one) for one in options.names(sizes)],
            options.names(memory),
        )
        if not wanted:
            raise ArgumentError(f"--only {only} names no case; there are {', '.join(cases.NAMES)}")
        if starts < 1 or rounds < starts:
            raise ArgumentError("--starts must be at least 1, and --rounds no fewer")
        options.check_writable(json)
        plan = RoundPlan(rounds // starts, seconds=seconds, warmup=3, check=False, fewest=1)
        run = record.RunRecord("compare_commits")
        for line in table.heading(run.machine, f"old: {old}, new: {new}"):
            typer.echo(line)
        found: list[Compared] = []
        versions: dict[str, dict[str, str]] = {}
        for setting in wanted:
            measured = _measure(setting, {OLD: old, NEW: new}, plan, starts, versions)
            found += measured
            if doubtful := [one for one in measured if one.slower]:
                typer.echo("# once more, what seems slower:")
                same = replace(setting, cases=tuple(one.case for one in doubtful))
                again = _measure(same, {OLD: old, NEW: new}, plan, starts, versions)
                for one, other in zip(doubtful, again, strict=False):
                    one.again = other
            run.save(
                json,
                versions=versions,
                settings={"plan": asdict(plan), "starts": starts},
                rows=[one.record() for one in found],
            )
        for line in report.summary(found):
            typer.echo(line)
        return sum(one.slower for one in found)

    options.measure(bench)


def _measure(
    setting: Setting,
    pythons: dict[str, Path],
    plan: RoundPlan,
    starts: int,
    versions: dict[str, dict[str, str]],
) -> list[Compared]:
    """Measure all cases of a setting; a start that fails is left out, and a line says why."""
    found = {case: Compared(setting, case) for case in setting.cases}
    for number in range(starts):
        # Who starts first may lie better in memory.
        order = [OLD, NEW] if number % 2 == 0 else [NEW, OLD]
        try:
            with ExitStack() as stack:
                wanted = {name: _start(name, setting, pythons[name]) for name in order}
                entrants = start_all(stack, setting.ranks, wanted)
                versions.update(versions_of(entrants))
                for case, compared in found.items():
                    with tempfile.TemporaryDirectory(prefix="bench-", dir=_memory()) as folder:
                        rows = take_turns(entrants, plan, {**asdict(case), "folder": folder})
                    compared.add(rows[OLD], rows[NEW])
        except RankFailedError as error:
            typer.echo(f"# {setting.transport}, {setting.ranks} ranks: {error}")
    measured = [one for one in found.values() if one.starts]
    for line in (*report.header(setting, versions), *(one.line() for one in measured)):
        typer.echo(line)
    return measured


def _start(name: str, setting: Setting, python: Path) -> Start:
    program = RankProgram((_MEMBER,), threads=1, python=str(python.absolute()))
    # Each interpreter finds the commit that it has installed, wherever this is run.
    environ = {key: value for key, value in program.environ.items() if key != "PYTHONPATH"}
    environ["PYTHONSAFEPATH"] = "1"
    return program.under_our_launcher(
        setting.ranks, setting.transport, environ=environ, contestant=name
    )


def _memory() -> str | None:
    """A folder in memory, where there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108


if __name__ == "__main__":
    typer.run(main)
