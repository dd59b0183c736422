"""``fsdpcore simulate``: a training step on ranks that are not there, in virtual time.

The engine itself makes the step, on arrays without values, as the first of many ranks that all do
the same; what a collective takes between them is simulated over the model of a network.
"""

from __future__ import annotations

import dataclasses
import json as json_format
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import fsdpcore as fc
from fsdpcore.bench.harness.options import check_writable
from fsdpcore.bench.harness.picture import BLUE, INK, ORANGE, check_installed, picture, style
from fsdpcore.bench.harness.usage import one_line
from fsdpcore.collectives.lone import Use
from fsdpcore.comm.transport import transport_of
from fsdpcore.commands.plan import NOTHING_FITS, parse_memory, parse_reshard
from fsdpcore.core import text
from fsdpcore.fsdp.plan.choice import candidates, in_words
from fsdpcore.fsdp.plan.sizes import even_units
from fsdpcore.fsdp.sharding.strategy import STRATEGIES, Strategy
from fsdpcore.simulation.network_file import named

_PREFETCH = (0, 1, 2)  # of a sweep
_NEARLY = 1.002


@dataclass(frozen=True)
class Scenario:
    """A model of equal layers, and how it is trained.

    Attributes:
        params, layers: of the model.
        tokens: of each rank in a step.
        flops: operations per second of a rank.
    """

    params: float
    layers: int
    tokens: int
    flops: float

    @property
    def forward_seconds(self) -> float:
        """Of one layer: a product and a sum for each parameter and token."""
        return 2 * self.params / self.layers * self.tokens / self.flops


@dataclass(frozen=True)
class Simulated:
    """A step as it went.

    Attributes:
        strategy, prefetch: how it was trained.
        seconds: of the step.
        exposed: seconds of it in which the rank waited for communication.
        peak_bytes: that a rank held.
        bytes_sent: by a rank.
        collectives: of the step, by kind.
    """

    strategy: Strategy
    prefetch: int
    seconds: float
    exposed: float
    peak_bytes: int
    bytes_sent: int
    collectives: Sequence[Use]

    @property
    def words(self) -> str:
        """How it was trained, as options of the command."""
        return f"--strategy {in_words(self.strategy)} --prefetch {self.prefetch}"

    @property
    def carried(self) -> Mapping[str, int]:
        """Bytes that each link carried in the step."""
        found: Counter[str] = Counter()
        for use in self.collectives:
            found.update({link: nbytes * use.calls for link, nbytes in use.carried.items()})
        return found

    def slowest(self, rates: Mapping[str, float]) -> tuple[str, float] | None:
        """The link that needs the most time for what it carries, and how many seconds.

        Args:
            rates: bytes per second of each link.
        """
        busy = {link: nbytes / rates[link] for link, nbytes in self.carried.items()}
        return max(busy.items(), key=lambda each: each[1], default=None)


def simulate(
    ranks: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of ranks.")],
    params: Annotated[
        float, typer.Option(min=1, max=1e18, help="Number of parameters, such as 7e9.")
    ],
    layers: Annotated[int, typer.Option(min=1, help="Units that the parameters are spread over.")],
    network: Annotated[
        str, typer.Option(help="File that describes the network; by default, hosts of 8 H100.")
    ] = "default",
    tokens: Annotated[int, typer.Option(min=1, help="Of each rank in a step.")] = 4096,
    strategy: Annotated[str, typer.Option(help=f"One of {', '.join(STRATEGIES)}.")] = "full_shard",
    reshard_after_forward: Annotated[
        str, typer.Option(help="true, false, or how many ranks gather for the backward pass.")
    ] = "true",
    shard_group_size: Annotated[
        int | None, typer.Option(help="How many ranks share a copy; hybrid_shard needs it.")
    ] = None,
    prefetch: Annotated[int, typer.Option(help="Units that are gathered ahead.")] = 1,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Compare strategies, group sizes and prefetch.")
    ] = False,
    memory: Annotated[
        str | None, typer.Option(help="That a rank has, such as 80GB or 24GiB.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG with the times of all.")] = None,
    trace: Annotated[
        str, typer.Option(help="Folder for the rank's operations: see 'fsdpcore trace'.")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate a training step on any number of ranks: its time, and where that goes.

    The rank that is played stands for all others. Each kind of collective is simulated message by
    message between all ranks, once, or told by a formula. Arrays are float32, the optimizer is
    AdamW. What the model computes with (activations) is not counted. The exit code is 1 if nothing
    fits --memory.
    """
    with one_line():
        if plot is not None:
            check_installed()
            check_writable(plot)
        limit = None if memory is None else parse_memory(memory)
        described = named(network)
        scenario = Scenario(params, layers, tokens, described.flops)
        wanted = Strategy(strategy, parse_reshard(reshard_after_forward), shard_group_size)
        chosen = [(wanted, prefetch)]
        if sweep:
            depths = sorted({*_PREFETCH, prefetch})
            chosen = [(each, ahead) for each in candidates(ranks, wanted) for ahead in depths]
        began = time.perf_counter()
        (steps,) = fc.launch(
            _play,
            world_size=ranks,
            transport="sim",
            args=(scenario, chosen),
            clock="virtual",
            network=network,
            played="one",
            arrays="abstract",
            trace=trace,
            timeout=1e6,
        )
        took = time.perf_counter() - began
        if plot is not None:
            _draw(plot, steps, f"{text.count(params)} parameters, {ranks} ranks")
    rates = {described.link_name(link): described.rate(link) for link in described.links_of(ranks)}
    if json:
        typer.echo(json_format.dumps([_as_dict(step, limit, rates) for step in steps], indent=2))
    else:
        parts = [] if sweep else [_one(steps[0], scenario, ranks, rates)]
        parts.append(_table(steps, scenario, limit))
        parts.append(_verdict(steps, limit) if sweep else "")
        typer.echo("\n\n".join(part for part in parts if part))
        typer.echo(f"\nsimulated in {took:.1f} s", err=True)
    if limit is not None and all(step.peak_bytes > limit for step in steps):
        raise typer.Exit(NOTHING_FITS)


def _play(
    backend: fc.Backend, scenario: Scenario, chosen: Sequence[tuple[Strategy, int]]
) -> list[Simulated]:
    """The program of the rank that is played: a step of each way to train."""
    with np.errstate(all="ignore"):  # scratch memory is computed with, whatever is in it
        return [_step(backend, scenario, strategy, ahead) for strategy, ahead in chosen]


def _step(backend: fc.Backend, scenario: Scenario, strategy: Strategy, ahead: int) -> Simulated:
    sizes = even_units(scenario.params, scenario.layers)
    units = [fc.Unit(each.name, {"w": fc.Spec((each.size,), np.float32)}) for each in sizes]
    engine = fc.FSDP(
        units, backend, strategy=strategy, optimizer=fc.optim.AdamW(lr=1e-3), prefetch=ahead
    )
    seconds = scenario.forward_seconds
    alike = transport_of(backend).alike
    alike.drain()  # what making the engine has called
    with engine.step() as step:
        for unit in units:
            with step.forward(unit):
                backend.clock.sleep(seconds)
        for unit in reversed(units):
            with step.backward(unit) as backward:
                backward.grads.empty("w")  # without values, there is nothing to write
                backend.clock.sleep(2 * seconds)
        step.update()
    measured = engine.report().measured
    engine.close()
    return Simulated(
        strategy,
        ahead,
        measured.step_seconds or 0.0,
        measured.exposed_seconds or 0.0,
        measured.peak_bytes or 0,
        measured.bytes_sent or 0,
        alike.drain(),
    )


def _one(step: Simulated, scenario: Scenario, ranks: int, rates: Mapping[str, float]) -> str:
    """One step in detail: its collectives, and what the links carry."""
    rows = [
        (
            use.collective,
            use.algorithm,
            str(use.ranks),
            text.size(use.nbytes),
            str(use.calls),
            text.duration(use.seconds),
            text.duration(use.seconds * use.calls),
            "formula" if use.formula else "message by message",
        )
        for use in step.collectives
    ]
    header = ("collective", "algorithm", "ranks", "bytes", "number", "each", "together", "by")
    links, large = step.carried, [use for use in step.collectives if use.nbytes]
    unknown = sum(use.calls for use in large if not use.carried)
    lines = [
        f"{text.count(scenario.params)} parameters in {scenario.layers} units on {ranks} ranks, "
        f"{scenario.tokens} tokens each: {step.words}",
        text.columns(header, rows, left=2),
    ]
    slowest = step.slowest(rates)
    if slowest is not None:
        link, seconds = slowest
        lines.append(
            f"the slowest link, {link}, carries {text.size(links[link])}: at "
            f"{text.size(rates[link])}/s that takes {text.duration(seconds)} of the step"
            + (f"; {unknown} collectives told by a formula are not in it" if unknown else "")
        )
    return "\n\n".join(lines)


def _table(steps: Sequence[Simulated], scenario: Scenario, limit: int | None) -> str:
    rows = [
        (
            step.words,
            text.duration(step.seconds),
            text.duration(step.exposed),
            text.count(scenario.tokens / step.seconds),
            text.size(step.peak_bytes),
            text.size(step.bytes_sent),
            "" if limit is None else "yes" if step.peak_bytes <= limit else "no",
        )
        for step in steps
    ]
    header = ("strategy", "step", "exposed", "tokens/s of a rank", "peak", "sent", "fits")
    return text.columns(header, rows)


def _verdict(steps: Sequence[Simulated], limit: int | None) -> str:
    fitting = [step for step in steps if limit is None or step.peak_bytes <= limit]
    if not fitting:
        return f"nothing fits {text.size(limit or 0)}"
    # Of those that are as fast as the fastest, nearly, the one that needs the least memory.
    most = _NEARLY * min(step.seconds for step in fitting)
    best = min(
        (step for step in fitting if step.seconds <= most),
        key=lambda step: (step.peak_bytes, step.seconds),
    )
    where = "" if limit is None else f" of those that fit {text.size(limit)}"
    return f"fastest{where}: {best.words}"


def _as_dict(step: Simulated, limit: int | None, rates: Mapping[str, float]) -> dict[str, Any]:
    return {
        **dataclasses.asdict(step),
        "strategy": in_words(step.strategy),
        "slowest_link": step.slowest(rates),
        "fits": None if limit is None else step.peak_bytes <= limit,
    }


def _draw(path: Path, steps: Sequence[Simulated], title: str) -> None:
    """Draw the times of all steps: computing, and waiting for communication."""
    with picture(path, title, 9.0, 1.2 + 0.3 * len(steps)) as figure:
        axes = figure.add_subplot()
        style(axes)
        names = [step.words for step in steps][::-1]
        computing = [step.seconds - step.exposed for step in steps][::-1]
        exposed = [step.exposed for step in steps][::-1]
        axes.barh(names, computing, color=BLUE, label="computing")
        axes.barh(names, exposed, left=computing, color=ORANGE, label="waiting")
        axes.set_xlabel("seconds of a step", color=INK, fontsize=9)
        axes.legend(frameon=False, labelcolor=INK, fontsize=9)
