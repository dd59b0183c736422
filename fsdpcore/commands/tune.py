"""``fsdpcore tune``: measure a transport, and write a table that selection uses from then on."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdpcore.bench.harness.usage import one_line
from fsdpcore.bench.tune import FULL, KIB, MIB, QUICK, Findings, measure
from fsdpcore.collectives.selection.costs import read_table, write_table
from fsdpcore.commands.run import finish
from fsdpcore.commands.shares import whole_job
from fsdpcore.core.errors import ConfigError
from fsdpcore.core.policy import AlgorithmRanges, Tuning
from fsdpcore.launch.config import Config, resolve
from fsdpcore.launch.environment import detect, launched_threads
from fsdpcore.launch.launch import launch
from fsdpcore.launch.run.scripts import run_script

DEFAULT_FILE = Path("fsdpcore-tuning.toml")


def tune(
    ranks: Annotated[int | None, typer.Option("-n", "--ranks", help="Number of ranks.")] = None,
    transport: Annotated[
        str | None, typer.Option("--transport", help="Scheme or URL, such as sim or zmq.")
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Table to write, or to add to.")
    ] = DEFAULT_FILE,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few seconds, for a rough impression.")
    ] = False,
) -> None:
    """Measure a transport on this machine, for the choice of algorithms.

    Writes what messages and reductions cost, and which algorithm of each collective is fastest
    for which sizes with this number of ranks. A table that is there already keeps what it says
    about other transports and numbers of ranks. To measure across hosts, start this command as
    any script of yours, with mpirun or srun.
    """
    # What an earlier table or a setting says must not influence what is measured.
    settings: dict[str, Any] = {"tuning": "", "deterministic": False}
    given = {"transport": transport, "world_size": ranks, **settings}
    with one_line():
        config = resolve(given, os.environ, Path.cwd(), default_transport="zmq")
        launched = detect(os.environ) is not None or launched_threads(os.environ) > 0
        known = read_table(output) if output.exists() else {}
        if not launched:
            _run_ranks(config, output, quick=quick)
        effort = QUICK if quick else FULL
        results = launch(measure, transport=transport, args=(effort,), **settings)
        findings = next((result for result in results if result is not None), None)
        if findings is None:
            return  # this process is another rank, and the first one speaks
        known[findings.transport] = findings.tuning.over(known.get(findings.transport, Tuning()))
        write_table(output, known)
    show(findings, Console())
    typer.echo(f"Written to {output}. To use it: export FSDPCORE_TUNING={output}")
    typer.echo(f'or, in fsdpcore.toml: tuning = "{output}"')


def _run_ranks(config: Config, output: Path, *, quick: bool) -> NoReturn:
    """Run this command again on every rank."""
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"{output} cannot be written: there is no such directory")
    if not config.world_size:
        raise ConfigError("how many ranks? Say so with -n, as in 'fsdpcore tune -n 4'")
    if config.world_size < 2:
        raise ConfigError("a single rank exchanges no messages; tune with 2 or more (-n)")
    command = [sys.executable, "-m", "fsdpcore", "tune", "--output", str(output)]
    command += ["--quick"] if quick else []
    finish(run_script(command, config, os.environ, whole_job(config)))


def show(findings: Findings, console: Console) -> None:
    """Print what was found as two tables."""
    (entry,) = findings.tuning.measured
    where = f"{entry.ranks} ranks, {entry.hosts} host{'s' if entry.hosts > 1 else ''}"
    console.print(_costs(findings, f"{findings.transport}, {where}"))
    table = Table(title="Fastest algorithms", title_justify="left")
    table.add_column("collective", no_wrap=True)
    table.add_column("by size", overflow="fold")
    table.add_column("gain over the formulas", overflow="fold")
    for collective, ranges in entry.best.items():
        factor, nbytes = findings.gains[collective]
        gain = f"{factor:.2f}x at {_size(nbytes)}" if factor > 1 else "none"
        table.add_row(collective, Text(_words(ranges)), gain)
    console.print(table)


def _costs(findings: Findings, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("costs of", "a message", "moving bytes", "reducing bytes"):
        table.add_column(name, overflow="fold")
    known = {"messages": findings.tuning.costs, **findings.tuning.own}
    for name, costs in known.items():
        if costs is not None:
            rates = (_rate(costs.beta), _rate(costs.gamma))
            trip = f", {costs.latency * 1e3:.2f} ms a trip" if costs.latency else ""
            table.add_row(Text(name), f"{costs.alpha * 1e6:.1f} us{trip}", *rates)
    return table


def _rate(seconds: float) -> str:
    return f"{1e-9 / seconds:.2f} GB/s" if seconds > 0 else "nothing"


def _words(ranges: AlgorithmRanges) -> str:
    words = [
        item.algorithm if item.high is None else f"{item.algorithm} to {_size(item.high)}"
        for item in ranges
    ]
    return ", ".join(words)


def _size(nbytes: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} B"
