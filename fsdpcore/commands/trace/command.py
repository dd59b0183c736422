"""``fsdpcore trace``: what the flight recorders of a job's ranks say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fsdpcore.bench.harness import options
from fsdpcore.bench.harness.usage import one_line
from fsdpcore.commands.trace.findings import findings
from fsdpcore.commands.trace.step_picture import save_step
from fsdpcore.commands.trace.timeline import timeline
from fsdpcore.core.errors import ArgumentError
from fsdpcore.diagnostics.trace_file import read_directory, write_json


def trace(
    directory: Annotated[Path, typer.Argument(help="Where FSDPCORE_TRACE let the ranks write.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The timeline; by default DIRECTORY/trace.json."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="PNG of the last training step, by rank and unit.")
    ] = None,
) -> None:
    """Merge the ranks' flight recorders into one timeline, and say which rank stopped where.

    Open the timeline at https://ui.perfetto.dev or chrome://tracing. The exit code is 1 if
    something went wrong in the job.
    """
    with one_line():
        options.check_writable(plot)
        dumps = read_directory(directory)
        path = output or directory / "trace.json"
        try:
            write_json(path, timeline(dumps))
        except OSError as error:
            raise ArgumentError(f"{path}: cannot be written: {error.strerror}") from error
    count = sum(len(dump.operations) for dump in dumps)
    typer.echo(
        f"{len(dumps)} of {dumps[0].world_size} ranks, {count} operations; the timeline is {path}"
    )
    found = findings(dumps)
    for finding in found:
        typer.echo(str(finding) if finding.wrong else f"note: {finding}")
    if not found:
        typer.echo("every operation has ended well")
    if plot is not None:
        with one_line():
            save_step(plot, dumps)
    raise typer.Exit(1 if any(finding.wrong for finding in found) else 0)
