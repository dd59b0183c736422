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
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parent))  # the parts, where this is not run as a script

import numpy as np
from optimizer_bench import contestants
from optimizer_bench.contestants import PEERS, POLICIES, Updated

from fsdpcore import __version__
from fsdpcore.bench.harness import options, record, table
from fsdpcore.bench.harness.measurements import OURS, Measurement, wrong_in
from fsdpcore.bench.harness.member import timed
from fsdpcore.bench.harness.turns import alternate
from fsdpcore.core.errors import ArgumentError

_CHECKED_STEPS = 3
_TOLERANCE = 1e-5


def main(
    optimizer: Annotated[str, typer.Option(help=f"One of {', '.join(POLICIES)}.")] = "adamw",
    elements: Annotated[int, typer.Option("-n", "--elements", help="Parameters.")] = 10_000_000,
    tensors: Annotated[int, typer.Option(help="Into which PyTorch's parameters are cut.")] = 20,
    against: Annotated[str, options.against(PEERS)] = "",
    rounds: options.Rounds = 15,
    iterations: Annotated[int, typer.Option("--iters", help="Steps per round.")] = 3,
    json: options.Json = None,
) -> None:
    """Measure an optimizer's step on a flat shard, in one thread, beside PyTorch's.

    The exit code is 1 if the contestants disagree, and 2 if there is no result.
    """
    settings = {
        "optimizer": optimizer,
        "elements": elements,
        "tensors": tensors,
        "against": list(options.names(against)),
        "rounds": rounds,
        "iterations": iterations,
    }

    def bench() -> int:
        for option in ("elements", "tensors", "rounds", "iterations"):
            if settings[option] < 1:  # type: ignore[operator]
                raise ArgumentError(f"{option} must be at least 1, got {settings[option]}")
        peers = options.names(against)
        contestants.check(optimizer, peers)
        options.check_writable(json)
        run = record.RunRecord("optimizer")
        for line in table.heading(
            run.machine,
            f"fsdpcore {__version__}, {optimizer}, {elements} float32 parameters, "
            f"one thread; PyTorch's are {tensors} tensors",
            f"{rounds} rounds of {iterations} steps each; median over the rounds",
            "ratio: the other's time over fsdpcore's in the same round; median, min and max",
        ):
            typer.echo(line)
        found = contestants.contestants(optimizer, elements, tensors, peers)
        rows = _measured(found, rounds, iterations)
        each = table.Column("each", "(ns)", lambda row: f"{1e9 * row.seconds / elements:.2f}")
        columns = [*table.times(), each, *table.ratios(rows), *table.wrong()]
        for line in table.lines(rows, columns):
            typer.echo(line)
        run.save(
            json,
            versions={name: one.versions for name, one in found.items()},
            settings=settings,
            rows=[_row(row) for row in rows.values()],
            ratios=record.ratios(rows),
        )
        return wrong_in(rows)

    options.measure(bench)


def _measured(found: Mapping[str, Updated], rounds: int, iterations: int) -> dict[str, Measurement]:
    wrong = _wrong(found)

    def turn(name: str, _: int) -> list[float]:
        return [timed(found[name], 0, iterations) / iterations]

    samples = alternate(found, rounds, turn)
    return {name: Measurement(name, iterations, wrong[name], samples[name]) for name in found}


def _wrong(found: Mapping[str, Updated]) -> dict[str, int | None]:
    """After a few steps, count the elements on which the others do not agree with ours."""
    for contestant in found.values():
        for _ in range(_CHECKED_STEPS):
            contestant.step()
    ours = found[OURS].param
    wrong: dict[str, int | None] = dict.fromkeys(found)
    for name, contestant in found.items():
        if name != OURS:
            close = np.isclose(contestant.param, ours, rtol=_TOLERANCE, atol=_TOLERANCE)
            wrong[name] = int(close.size - np.count_nonzero(close))
    return wrong


def _row(row: Measurement) -> dict[str, object]:
    return {
        "contestant": row.contestant,
        "wrong": row.wrong,
        "time_ms": {"median": 1e3 * row.seconds, "best": 1e3 * row.best},
        "samples_ms": [1e3 * seconds for seconds in row.rounds],
    }


if __name__ == "__main__":
    typer.run(main)
