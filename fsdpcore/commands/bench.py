"""``fsdpcore bench``: measure collectives, alone or beside Gloo and MPI."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fsdpcore.bench import main as bench
from fsdpcore.bench.cases import DTYPE_NAMES, MEASURED, PLACES, parse_size
from fsdpcore.bench.harness import options
from fsdpcore.bench.harness.options import names, one_of
from fsdpcore.bench.harness.turns import RoundPlan
from fsdpcore.bench.harness.usage import one_line
from fsdpcore.comm.backend import Backend
from fsdpcore.core.errors import ConfigError
from fsdpcore.launch.config import resolve
from fsdpcore.launch.environment import detect, launched_threads
from fsdpcore.launch.launch import launch

_PLACES = {"both": PLACES, "out": ("out",), "in": ("in",)}
_MEMORY = ("backend", "numpy")


def show_bench(
    operations: Annotated[
        list[str] | None,
        typer.Argument(help=f"{', '.join(MEASURED)}; or all (default: all_reduce)."),
    ] = None,
    ranks: Annotated[int | None, typer.Option("-n", "--ranks", help="Number of ranks.")] = None,
    transport: Annotated[
        str | None, typer.Option("--transport", help="Scheme or URL, such as sim or zmq.")
    ] = None,
    first: Annotated[str, typer.Option("-b", "--begin", help="Smallest size.")] = "8",
    last: Annotated[str, typer.Option("-e", "--end", help="Largest size.")] = "64MiB",
    factor: Annotated[int, typer.Option("-f", "--factor", help="From one size to the next.")] = 2,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPE_NAMES)}.")] = "float32",
    op: Annotated[str, typer.Option(help="Reduction: sum, mean, min, max or prod.")] = "sum",
    root: Annotated[int, typer.Option(help="Of operations that have one.")] = 0,
    algorithm: Annotated[str, typer.Option(help="Of ours, as the collectives take it.")] = "auto",
    iterations: Annotated[
        int, typer.Option("--iters", help="Iterations per round; 0: as many as fit --seconds.")
    ] = 0,
    seconds: Annotated[
        float, typer.Option(help="Time per round, size and competitor, roughly.")
    ] = 0.1,
    rounds: options.Rounds = 5,
    warmup: Annotated[int, typer.Option(help="Iterations before the clock runs.")] = 5,
    check: Annotated[bool, typer.Option(help="Compare the results with an oracle.")] = True,
    place: Annotated[
        str, typer.Option(help="Where results go: out (of place), in (place) or both.")
    ] = "both",
    memory: Annotated[
        str, typer.Option(help="Our arrays: backend (backend.empty) or numpy (numpy.empty).")
    ] = "backend",
    against: Annotated[
        str, typer.Option(help="Peers to measure in turn with ours: gloo, mpi or gloo,mpi.")
    ] = "",
    json: options.Json = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of bandwidth over size.")] = None,
) -> None:
    """Measure collectives the way nccl-tests does.

    Started by a launcher (mpirun, srun, fsdpcore run), it measures among the ranks of that job;
    otherwise it starts -n ranks itself. The exit code is 1 if a result was wrong, and 2 if there
    is none.
    """
    with one_line():
        config = resolve(
            {"transport": transport, "world_size": ranks},
            os.environ,
            Path.cwd(),
            default_transport="zmq",
        )
        inside = _launched(ranks)
        size = inside or config.world_size
        if not size:
            raise ConfigError("how many ranks? Say so with -n, as in 'fsdpcore bench -n 2'")
        request = bench.CollectivesRun(
            operations=operations or ["all_reduce"],
            world_size=size,
            transport=config.transport,
            first=parse_size(first),
            last=parse_size(last),
            factor=factor,
            dtype=dtype,
            op=op,
            root=root,
            algorithm=algorithm,
            plain=one_of(memory, _MEMORY, "--memory") == "numpy",
            places=_PLACES[one_of(place, tuple(_PLACES), "--place")],
            plan=RoundPlan(rounds, iterations, seconds, warmup, check),
            against=names(against),
            json=json,
            plot=plot,
            command=("fsdpcore", *sys.argv[1:]),
        )
        wrong = _inside(request) if inside else _beside(request)
    raise typer.Exit(options.WRONG_RESULTS if wrong else 0)


def _launched(wanted: int | None) -> int:
    """Return how many ranks a launcher has started; 0 without one."""
    launched = detect(os.environ)
    size = launched.world_size if launched else launched_threads(os.environ)
    if wanted is not None and size and wanted != size:
        raise ConfigError(f"-n {wanted} contradicts the launcher, which started {size} ranks")
    return size


def _beside(request: bench.CollectivesRun) -> int:
    """Measure with ranks of our own; return how many results were wrong."""
    request.check()
    with options.ending_well_on_sigterm():
        return bench.run(request, typer.echo)


def _inside(request: bench.CollectivesRun) -> int:
    """Measure as one rank of a job that a launcher has started."""
    request.check()
    request.check_inside()
    (wrong, *_) = launch(_rank, transport=request.transport, args=(request,))
    return int(wrong)


def _rank(backend: Backend, request: bench.CollectivesRun) -> int:
    return bench.run_inside(backend, request, typer.echo)
