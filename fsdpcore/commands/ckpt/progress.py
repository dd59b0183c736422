"""What the commands of ``fsdpcore ckpt`` share: a bar while they work, and how they end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fsdpcore.bench.harness.usage import USAGE_ERROR
from fsdpcore.checkpoint.interchange.array_sources import ProgressCallback
from fsdpcore.core.errors import CorruptCheckpointError, FsdpcoreError, in_words

DIFFERENT = 1
"""Exit code where a difference or damage was found."""


@contextmanager
def ending() -> Iterator[None]:
    """Turn errors into a line and an exit code: 1 for a damaged checkpoint, 2 for all else."""
    try:
        yield
    except FsdpcoreError as error:
        typer.echo(f"fsdpcore: {error}", err=True)
        damaged = isinstance(error, CorruptCheckpointError)
        raise typer.Exit(DIFFERENT if damaged else USAGE_ERROR) from None
    except OSError as error:
        typer.echo(f"fsdpcore: {in_words(error)}", err=True)
        raise typer.Exit(USAGE_ERROR) from None


@contextmanager
def bar(what: str) -> Iterator[ProgressCallback]:
    """Show on stderr how far something is, with its speed and the time left; not in a pipe."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    shown = sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def print_json(content: Any) -> None:
    """Print JSON for a script."""
    typer.echo(json.dumps(content, indent=2, allow_nan=True))


def size(nbytes: float) -> str:
    """Return a number of bytes in words, such as 1.5 GiB."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if nbytes < 1024:
            break
        nbytes, unit = nbytes / 1024, larger
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
