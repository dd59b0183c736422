"""Measure the forward and backward pass of a tensor-parallel transformer block.

    python bench/tensor_parallel.py                     # ours, 2 ranks over zmq
    python bench/tensor_parallel.py --against dtensor   # beside PyTorch's DTensor on Gloo

bench/README.md says what is measured, and how.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # the unsharded block

from tensor_bench.cases import PEERS, Case
from tensor_bench.run import Request, run

from fsdpcore.bench.session import Plan
from fsdpcore.commands.bench import ending_well_on_sigterm, one_of
from fsdpcore.commands.usage import one_line

WRONG_RESULTS = 1
_MODES = ("both", "whole", "sequence")


def main(
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Number of ranks.")] = 2,
    transport: Annotated[str, typer.Option(help="Scheme or URL, such as sim or zmq.")] = "zmq",
    mode: Annotated[
        str, typer.Option(help=f"What is between the matrices: {', '.join(_MODES)}.")
    ] = "both",
    width: Annotated[int, typer.Option(help="Features.")] = 512,
    heads: Annotated[int, typer.Option(help="Of the attention.")] = 8,
    hidden: Annotated[int, typer.Option(help="Features of the MLP.")] = 2048,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 4,
    length: Annotated[int, typer.Option(help="Positions of a sequence.")] = 128,
    threads: Annotated[
        int, typer.Option(help="Of each rank's arithmetic; 0 shares the cores evenly.")
    ] = 0,
    iterations: Annotated[
        int, typer.Option("--iters", help="Steps per round; 0: as many as fit --seconds.")
    ] = 0,
    seconds: Annotated[float, typer.Option(help="Time per round and contestant, roughly.")] = 0.5,
    rounds: Annotated[int, typer.Option(help="How often the contestants take turns.")] = 9,
    warmup: Annotated[int, typer.Option(help="Steps before the clock runs.")] = 2,
    check: Annotated[bool, typer.Option(help="Compare with the unsharded block.")] = True,
    against: Annotated[
        str, typer.Option(help=f"Peers to take turns with: {', '.join(PEERS)}.")
    ] = "",
    json: Annotated[Path | None, typer.Option(help="File for all samples.")] = None,
) -> None:
    """Measure a tensor-parallel transformer block, alone or beside PyTorch's DTensor on Gloo.

    The exit code is 1 if a result was wrong, and 2 if there is none.
    """
    with one_line():
        chosen = one_of(mode, _MODES, "--mode")
        cases = tuple(
            Case(width, heads, hidden, batch, length, sequence)
            for name, sequence in (("whole", False), ("sequence", True))
            if chosen in ("both", name)
        )
        request = Request(
            cases=cases,
            ranks=ranks,
            transport=transport,
            plan=Plan(rounds, iterations, seconds, warmup, check),
            against=tuple(dict.fromkeys(name for name in against.split(",") if name)),
            threads=threads,
            json=json,
            command=("python", *sys.argv),
        )
        request.check()
        with ending_well_on_sigterm():
            wrong = run(request, typer.echo)
    raise typer.Exit(WRONG_RESULTS if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
