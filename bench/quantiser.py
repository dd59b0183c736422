"""Measure how fast values are quantised and come back, in one thread.

    python bench/quantiser.py --json bench/results/quantiser.json

Rates are bytes of float32 per second, the best of many passes. Numba takes part where it is
installed (``pip install 'fsdpcore[numba]'``).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import numpy as np
import typer

from fsdpcore import __version__
from fsdpcore.bench.harness import options, record, table
from fsdpcore.compress.quantiser import Format, Quantiser
from fsdpcore.core import compiling


def main(
    elements: Annotated[int, typer.Option("-n", "--elements", min=1)] = 1_000_000,
    block: Annotated[int, typer.Option(help="Values that share a scale.")] = 64,
    rounds: options.Rounds = 50,
    json: options.Json = None,
) -> None:
    """Measure how fast values are quantised and come back, in one thread."""
    run = record.RunRecord("quantiser")
    best = f"best of {rounds} rounds, {elements:,} float32"
    for line in table.heading(run.machine, f"fsdpcore {__version__}", best):
        typer.echo(line)
    results = list(_measured(elements, block, rounds))
    settings = {"elements": elements, "block": block, "rounds": rounds}
    run.save(json, versions={"numpy": np.__version__}, settings=settings, results=results)


def _measured(elements: int, block: int, rounds: int) -> Iterator[dict[str, Any]]:
    values = np.random.default_rng(0).standard_normal(elements).astype(np.float32)
    back = np.empty_like(values)
    kinds = (False, True) if compiling.available() else (False,)
    for bits, rotation, compiled in itertools.product((8, 4), (False, True), kinds):
        form = Format(bits, block, rotation)
        quantiser = Quantiser(form, compiled=compiled)
        packed = np.empty(form.nbytes(elements), np.uint8)
        calls: dict[str, Any] = {"quantise": (quantiser.encode, values, packed)}
        calls["dequantise"] = (quantiser.decode, packed, back)
        rates = {
            name: values.nbytes / _best(*call, rounds=rounds) / 1e9 for name, call in calls.items()
        }
        made = "numba" if compiled else "numpy"
        typer.echo(
            f"  int{bits}{', rotated' if rotation else '':9} {made}"
            + "".join(f"  {name} {rate:5.2f} GB/s" for name, rate in rates.items())
        )
        yield {"bits": bits, "rotation": rotation, "by": made, "gb_per_s": rates}


def _best(call: Callable[[Any, Any], None], given: Any, out: Any, *, rounds: int) -> float:
    """Seconds of the fastest call."""
    call(given, out)
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call(given, out)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    typer.run(main)
