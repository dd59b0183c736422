"""Measure an optimizer's step on a flat shard, in one thread, beside PyTorch's.

    python bench/optimizer.py                                        # ours
    python bench/optimizer.py --against torch-foreach,torch-fused --json optimizer.json

PyTorch is in no extra of fsdpcore. The contestants take turns in one process; ``ratio`` is the
other's time over ours in the same round, so that 0.6 times the time is a ratio of 1.67.
``fsdpcore-numba`` takes part where numba is installed (``pip install 'fsdpcore[numba]'``).
``wrong`` counts the parameters on which a contestant disagrees with ours after three steps.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parent))  # the parts, where this is not run as a script

from optimizer_bench.contestants import PEERS, POLICIES
from optimizer_bench.run import Request, run

from fsdpcore.commands.usage import one_line

WRONG_RESULTS = 1


def main(
    optimizer: Annotated[str, typer.Option(help=f"One of {', '.join(POLICIES)}.")] = "adamw",
    elements: Annotated[int, typer.Option("-n", "--elements", help="Parameters.")] = 10_000_000,
    tensors: Annotated[int, typer.Option(help="Into which PyTorch's parameters are cut.")] = 20,
    against: Annotated[
        str, typer.Option(help=f"Peers to take turns with: {', '.join(PEERS)}.")
    ] = "",
    rounds: Annotated[int, typer.Option(help="How often the contestants take turns.")] = 15,
    iterations: Annotated[int, typer.Option("--iters", help="Steps per round.")] = 3,
    json: Annotated[Path | None, typer.Option(help="File for all samples.")] = None,
) -> None:
    """Measure an optimizer's step on a flat shard, in one thread, beside PyTorch's.

    The exit code is 1 if the contestants disagree, and 2 if there is no result.
    """
    with one_line():
        request = Request(
            optimizer=optimizer,
            elements=elements,
            tensors=tensors,
            against=tuple(dict.fromkeys(name for name in against.split(",") if name)),
            rounds=rounds,
            iterations=iterations,
            json=json,
            command=("python", *sys.argv),
        )
        request.check()
        wrong = run(request, typer.echo)
    raise typer.Exit(WRONG_RESULTS if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
