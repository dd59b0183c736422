"""How a command, or a bench, tells its user that the call was wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from fsdpcore.core.errors import FsdpcoreError

USAGE_ERROR = 2


@contextmanager
def one_line() -> Iterator[None]:
    """Turn what is wrong with a call into one line and an exit code."""
    try:
        yield
    except FsdpcoreError as error:
        typer.echo(f"fsdpcore: {error}", err=True)
        raise typer.Exit(USAGE_ERROR) from None
