"""Measure a step of the FSDP engine: its communication alone, and the training of a GPT.

    python bench/fsdp_step.py                                      # ours, 2 ranks over zmq
    python bench/fsdp_step.py --against fsdp2 --json step.json     # beside PyTorch FSDP2 on Gloo
    python bench/fsdp_step.py --against no-prefetch                # beside ours, with no background

bench/README.md says what is measured, and how.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # the model

from fsdp_bench.cases import PEERS, SETTINGS, Exchange, Training
from fsdp_bench.run import Request, run

from fsdpcore.bench.session import Plan
from fsdpcore.commands.bench import ending_well_on_sigterm, one_of
from fsdpcore.commands.usage import one_line

WRONG_RESULTS = 1
_MODES = ("both", "exchange", "training")


def main(
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Number of ranks.")] = 2,
    transport: Annotated[str, typer.Option(help="Scheme or URL, such as sim or zmq.")] = "zmq",
    mode: Annotated[str, typer.Option(help=f"What to measure: {', '.join(_MODES)}.")] = "both",
    units: Annotated[int, typer.Option(help="Of the exchange.")] = 26,
    rows: Annotated[int, typer.Option(help="Of each unit's parameter.")] = 1024,
    columns: Annotated[int, typer.Option(help="Of each unit's parameter.")] = 1024,
    layers: Annotated[int, typer.Option(help="Of the GPT.")] = 3,
    width: Annotated[int, typer.Option(help="Of the GPT.")] = 96,
    heads: Annotated[int, typer.Option(help="Of the GPT.")] = 2,
    context: Annotated[int, typer.Option(help="Bytes of a sequence.")] = 128,
    batch: Annotated[int, typer.Option(help="Sequences of all ranks together.")] = 32,
    prefetch: Annotated[int, typer.Option(help="Units that ours gathers ahead.")] = 1,
    threads: Annotated[
        int, typer.Option(help="Of each rank's arithmetic; 0 shares the cores evenly.")
    ] = 0,
    iterations: Annotated[
        int, typer.Option("--iters", help="Steps per round; 0: as many as fit --seconds.")
    ] = 0,
    seconds: Annotated[float, typer.Option(help="Time per round and contestant, roughly.")] = 0.5,
    rounds: Annotated[int, typer.Option(help="How often the contestants take turns.")] = 9,
    warmup: Annotated[int, typer.Option(help="Steps before the clock runs.")] = 2,
    check: Annotated[bool, typer.Option(help="Compare values and losses.")] = True,
    against: Annotated[
        str, typer.Option(help=f"Peers to take turns with: {', '.join(PEERS)}.")
    ] = "",
    peer_setting: Annotated[
        str, typer.Option(help=f"Of the peer: auto (try all); {'; '.join(SETTINGS)}.")
    ] = "auto",
    json: Annotated[Path | None, typer.Option(help="File for all samples.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of times and memory.")] = None,
) -> None:
    """Measure a step of the FSDP engine, alone or beside PyTorch's FSDP2 on Gloo.

    The exit code is 1 if a result was wrong, and 2 if there is none.
    """
    with one_line():
        chosen = one_of(mode, _MODES, "--mode")
        exchange = Exchange(units, rows, columns, prefetch)
        training = Training(layers, width, heads, context, batch, prefetch)
        cases = {"both": (exchange, training), "exchange": (exchange,), "training": (training,)}
        request = Request(
            cases=cases[chosen],
            ranks=ranks,
            transport=transport,
            plan=Plan(rounds, iterations, seconds, warmup, check),
            against=tuple(dict.fromkeys(name for name in against.split(",") if name)),
            setting=peer_setting,
            threads=threads,
            json=json,
            plot=plot,
            command=("python", *sys.argv),
        )
        request.check()
        with ending_well_on_sigterm():
            wrong = run(request, typer.echo)
    raise typer.Exit(WRONG_RESULTS if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
