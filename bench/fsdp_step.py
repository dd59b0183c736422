"""Measure a step of the FSDP engine: its communication alone, and the training of a GPT.

    python bench/fsdp_step.py                                      # ours, 2 ranks over zmq
    python bench/fsdp_step.py --against fsdp2 --json step.json     # beside PyTorch FSDP2 on Gloo
    python bench/fsdp_step.py --prefetch 1 --against no-prefetch   # beside ours, with no background
    python bench/fsdp_step.py --against offload --dir /scratch     # beside ours, in files on a disk

bench/README.md says what is measured, and how.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # the model

from fsdp_bench.cases import PEERS, SETTINGS, Exchange, Training
from fsdp_bench.run import StepRun, measure

from fsdpcore.bench.harness import options
from fsdpcore.bench.harness.turns import RoundPlan

_MODES = ("both", "exchange", "training")


def main(
    ranks: options.Ranks = 2,
    transport: options.Transport = "zmq",
    mode: Annotated[str, typer.Option(help=f"What to measure: {', '.join(_MODES)}.")] = "both",
    units: Annotated[int, typer.Option(help="Of the exchange.")] = 26,
    rows: Annotated[int, typer.Option(help="Of each unit's parameter.")] = 1024,
    columns: Annotated[int, typer.Option(help="Of each unit's parameter.")] = 1024,
    layers: Annotated[int, typer.Option(help="Of the GPT.")] = 3,
    width: Annotated[int, typer.Option(help="Of the GPT.")] = 96,
    heads: Annotated[int, typer.Option(help="Of the GPT.")] = 2,
    context: Annotated[int, typer.Option(help="Bytes of a sequence.")] = 128,
    batch: Annotated[int, typer.Option(help="Sequences of all ranks together.")] = 32,
    prefetch: Annotated[
        int | None, typer.Option(help="Units that ours gathers ahead; by default it chooses.")
    ] = None,
    threads: options.Threads = 0,
    iterations: options.Iterations = 0,
    seconds: options.Seconds = 0.5,
    rounds: options.Rounds = 9,
    warmup: options.Warmup = 2,
    check: Annotated[bool, typer.Option(help="Compare values and losses.")] = True,
    against: Annotated[str, options.against(PEERS)] = "",
    peer_setting: Annotated[
        str, typer.Option(help=f"Of the peer: auto (try all); {'; '.join(SETTINGS)}.")
    ] = "auto",
    directory: Annotated[
        Path, typer.Option("--dir", help="On a disk; for files of what is offloaded.")
    ] = Path(),
    json: options.Json = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of times and memory.")] = None,
) -> None:
    """Measure a step of the FSDP engine, alone or beside PyTorch's FSDP2 on Gloo.

    The exit code is 1 if a result was wrong, and 2 if there is none.
    """

    def bench() -> int:
        chosen = options.one_of(mode, _MODES, "--mode")
        exchange = Exchange(units, rows, columns, prefetch)
        training = Training(layers, width, heads, context, batch, prefetch)
        cases = {"both": (exchange, training), "exchange": (exchange,), "training": (training,)}
        request = StepRun(
            cases=cases[chosen],
            ranks=ranks,
            transport=transport,
            plan=RoundPlan(rounds, iterations, seconds, warmup, check),
            against=options.names(against),
            setting=peer_setting,
            threads=threads,
            directory=directory,
            json=json,
            plot=plot,
        )
        request.check()
        return measure(request, typer.echo)

    options.measure(bench)


if __name__ == "__main__":
    typer.run(main)
