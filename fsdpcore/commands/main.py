"""The ``fsdpcore`` command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fsdpcore import __version__
from fsdpcore.bench.harness.usage import one_line
from fsdpcore.commands.later import CommandsLater
from fsdpcore.core.errors import ConfigError
from fsdpcore.launch.config import PREFIX, resolve
from fsdpcore.launch.scripts import run_script, script_command

app = typer.Typer(
    cls=CommandsLater,
    help="Start the ranks of a program that uses fsdpcore, and see what can run here.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fsdpcore {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Start the ranks of a program that uses fsdpcore, and see what can run here."""


@app.command("run", context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[str, typer.Argument(help="Python script, or a module with -m.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Everything after the script belongs to it.")
    ] = None,
    ranks: Annotated[int | None, typer.Option("-n", "--ranks", help="Number of ranks.")] = None,
    transport: Annotated[
        str | None, typer.Option("--transport", help="Scheme or URL, such as sim or zmq.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds that an operation may take.")
    ] = None,
    rendezvous_timeout: Annotated[
        float | None, typer.Option(help="Seconds until all ranks must have joined.")
    ] = None,
    blas_threads: Annotated[
        int | None, typer.Option(help="BLAS threads of each rank; 0 shares the cores evenly.")
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option("--deterministic", help="Only algorithms that reduce in canonical order."),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(help="Folder for the ranks' last operations; see 'fsdpcore trace'."),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module, as 'python -m' does.")] = False,
) -> None:
    """Run a script on every rank.

    What is not given comes from FSDPCORE_* variables, then from fsdpcore.toml. The first rank
    that fails ends the others, and its exit code is this command's.
    """
    settings = {
        "timeout": timeout,
        "rendezvous_timeout": rendezvous_timeout,
        "blas_threads": blas_threads,
        "deterministic": deterministic,
        "trace": str(Path(trace).absolute()) if trace else None,
    }
    with one_line():
        if ranks is not None and ranks < 1:
            raise ConfigError(f"the number of ranks (-n) must be at least 1, got {ranks}")
        command = script_command(script, arguments or [], module=module)
        given = {"transport": transport, "world_size": ranks, **settings}
        config = resolve(given, os.environ, Path.cwd(), default_transport="zmq")
        if not config.world_size:
            raise ConfigError("how many ranks? Say so with -n, as in 'fsdpcore run -n 4 train.py'")
        environ = dict(os.environ)
        for name, value in settings.items():
            if value is not None:
                environ[PREFIX + name.upper()] = str(value)
        ending = run_script(command, config.world_size, config, environ)
    if ending.message:
        typer.echo(f"fsdpcore: {ending.message}", err=True)
    raise typer.Exit(ending.code)


@app.command("doctor")
def show_doctor() -> None:
    """Show which transports can run here, and what the others need.

    The exit code is 1 if the configuration of this directory and environment is wrong, or names a
    transport that cannot run here.
    """
    from rich.console import Console

    from fsdpcore.commands import doctor

    diagnosis = doctor.examine(os.environ, Path.cwd())
    doctor.show(diagnosis, Console())
    raise typer.Exit(0 if diagnosis.well else 1)
