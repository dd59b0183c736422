"""The ``fsdpcore`` command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fsdpcore import __version__
from fsdpcore.commands.later import CommandsLater
from fsdpcore.commands.run import run

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


app.command("run", context_settings={"allow_interspersed_args": False})(run)


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
