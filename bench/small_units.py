"""Time steps of many small units, in which nothing is computed: what is left is the engine.

    fsdpcore run -n 2 bench/small_units.py
    fsdpcore run -n 2 --trace traces bench/small_units.py --units 24
    fsdpcore trace traces --plot step.png

bench/README.md says what the lines mean.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Annotated

import typer

import fsdpcore as fc
from fsdpcore.fsdp.step.step_times import StepTimes


def small_step(engine: fc.FSDP) -> float:
    """Go through all units without computing; return the seconds."""
    before = time.perf_counter()
    with engine.step() as step:
        for unit in engine.units:
            with step.forward(unit):
                pass
        for unit in reversed(engine.units):
            with step.backward(unit):
                pass
        step.update()
    return time.perf_counter() - before


def cost_of_marks(engine: fc.FSDP) -> float:
    """Return the seconds that it takes to note where the time of the last step went."""
    doings = [doing for _, _, doing in engine.stats.times]
    mark = StepTimes(time.monotonic_ns).mark
    before = time.perf_counter()
    for doing in doings:
        mark(doing)
    return time.perf_counter() - before


def measure(backend: fc.Backend, units: int, arrays: int, elements: int, steps: int) -> None:
    """Make an engine, and steps with prefetch and without it in turn; rank 0 prints."""
    params = {f"p{number}": fc.Spec((elements,)) for number in range(arrays)}
    names = [f"unit{number}" for number in range(units)]
    engines = {
        ahead: fc.FSDP(
            [fc.Unit(name, params) for name in names],
            backend,
            optimizer=fc.optim.AdamW(),
            prefetch=ahead,
        )
        for ahead in (0, 1)
    }
    for engine in engines.values():
        small_step(engine)
    taken: dict[int, list[float]] = {ahead: [] for ahead in engines}
    noted: list[float] = []
    shares: list[float] = []
    for _ in range(steps):
        for ahead, engine in engines.items():
            taken[ahead].append(small_step(engine))
            noted.append(cost_of_marks(engine) / taken[ahead][-1])
            times = engine.report().times
            assert times is not None, "a training step was made"
            shares.append(sum(row.seconds for row in times.rows) / taken[ahead][-1])
    if backend.rank == 0:
        each = [f"{ahead}: {1e3 * median(found):.1f} ms" for ahead, found in taken.items()]
        typer.echo(f"{units} units, a step by prefetch, {', '.join(each)}")
        ratios = [one / other for other, one in zip(*taken.values(), strict=True)]
        typer.echo(f"with prefetch over without, in the same round: {median(ratios):.2f}")
        typer.echo(f"parts of the report over the step: {100 * median(shares):.1f} %")
        typer.echo(f"to note them: {100 * median(noted):.1f} % of the step")


def main(
    units: Annotated[int, typer.Option(min=1)] = 200,
    arrays: Annotated[int, typer.Option(min=1, help="Of a unit.")] = 10,
    elements: Annotated[int, typer.Option(min=1, help="Of an array, in float32.")] = 1024,
    steps: Annotated[int, typer.Option(min=1, help="With prefetch, and as many without.")] = 25,
) -> None:
    """Time steps of many small units in which nothing is computed."""
    fc.launch(measure, args=(units, arrays, elements, steps))


if __name__ == "__main__":
    typer.run(main)
