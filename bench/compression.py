"""Losses of quantised training beside those of the same training in float32.

    nice python bench/compression.py --seeds 5       # table, plot and JSON in bench/results
    python bench/compression.py --seeds 1 --only int8

Each setting trains the model of examples/train_gpt.py once with each seed, on the same samples, and
is compared with the float32 run of that seed. Ranks are threads of this process: what is compared
are losses and bytes, not time.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import fsdpcore as fc

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # the model

from gpt_model import GPTConfig
from train_gpt import Options, Trainer

RESULTS = Path(__file__).parent / "results"
RANKS = 4
NONE = "float32"
EVERY = 12
# Steps in float32 from which outer steps go on; groups meet in the last step.
START, STEPS = 144, 600


@dataclass(frozen=True)
class Setting:
    """One way to train.

    Attributes:
        strategy: of the engine.
        compression: of the engine, or of the outer steps.
        every: steps between outer steps of two groups; None for none.
        start: it goes on from the float32 run after so many steps.
    """

    strategy: str = "full_shard"
    compression: fc.Compression | None = None
    every: int | None = None
    start: int = 0


def _both(width: Any, **options: Any) -> fc.Compression:
    return fc.Compression(width, width, **options)


_FEEDBACK = _both("int4", error_feedback=True)
SETTINGS: dict[str, Setting] = {
    NONE: Setting(),
    "int8": Setting(compression=_both("int8")),
    "int8 gathers, int4 gradients": Setting(compression=fc.Compression("int8", "int4")),
    "int8 gathers that are kept, int4 gradients": Setting(
        compression=fc.Compression("int8", "int4", keep=True)
    ),
    "int4": Setting(compression=_both("int4")),
    "int4, shard_grad_op": Setting("shard_grad_op", _both("int4")),
    "int4, no rotation": Setting(compression=_both("int4", rotation=False)),
    "plain 4 bit: no rotation, blocks of 4096": Setting(
        compression=_both("int4", rotation=False, block=4096)
    ),
    "outer steps": Setting(every=EVERY, start=START),
    "outer steps, int4": Setting(compression=_FEEDBACK, every=EVERY, start=START),
    "outer steps, int4, from the first step on": Setting(compression=_FEEDBACK, every=EVERY),
}


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        validation: pairs of a step and a loss in bits per byte.
        sent: bytes that a host sends to others per step, the most of all. A host has one rank, or
            with outer steps one group.
        plain: those of full_shard in float32 with as many hosts.
    """

    validation: list[list[float]]
    sent: float
    plain: float


def train(backend: fc.Backend, options: Options, start: int, folder: str) -> Outcome:
    """Train; each rank's program.

    The float32 run leaves a checkpoint of step ``START`` in the folder, from which others begin.
    """
    trainer = Trainer(backend, options)
    if start:
        fc.checkpoint.load(folder, trainer.engine, trainer.engine.backend)
        trainer.outer = trainer.outer_step()
    validation = [[start, trainer.evaluate()]]
    for number in range(start, options.steps):
        trainer.step(number)
        if (number + 1) % options.evaluate_every == 0 or number + 1 == options.steps:
            validation.append([number + 1, trainer.evaluate()])
        if number + 1 == START and options.compression is None and trainer.outer is None:
            fc.checkpoint.save(folder, trainer.engine, backend)
    hosts = backend.world_size if trainer.outer is None else trainer.groups
    units = trainer.engine.units
    if trainer.outer is not None:
        sent = trainer.outer.sends * (backend.world_size // hosts) / trainer.outer.every
    else:
        sent = fc.make_plan(
            *(units, hosts),
            strategy=options.strategy,
            compression=options.compression,
            rank=backend.rank,
        ).bytes_sent
    most = fc.all_reduce(np.array([float(sent)]), backend, op="max")[0]
    return Outcome(validation, float(most), fc.make_plan(units, hosts).bytes_sent)


def run(setting: Setting, base: Options, seed: int, folder: str) -> Outcome:
    """Train with a setting and a seed; the folder keeps the start of the float32 run."""
    options = replace(
        base,
        seed=seed,
        strategy=fc.Strategy(setting.strategy),
        compression=setting.compression,
        outer_every=setting.every,
        groups=None if setting.every is None else 2,
    )
    arguments = (options, setting.start, folder)
    found: Outcome = fc.launch(train, world_size=RANKS, transport="sim", args=arguments)[0]
    return found


def table(found: Mapping[str, Mapping[int, Outcome]]) -> str:
    """Return a table: bytes, and how much worse the loss is, on average and at worst."""
    lines = [
        "| setting | a host sends per step | of float32 | validation | worse, mean | worst seed |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    plain = found[NONE]
    for name, runs in found.items():
        sent = max(each.sent for each in runs.values())
        less = max(each.plain for each in runs.values()) / sent
        last = {seed: each.validation[-1][1] for seed, each in runs.items()}
        worse = [loss / plain[seed].validation[-1][1] - 1 for seed, loss in last.items()]
        lines.append(
            f"| {name} | {sent:,.0f} | 1/{less:.1f} | {np.mean(list(last.values())):.4f} | "
            f"{np.mean(worse):+.2%} | {max(worse):+.2%} |"
        )
    return "\n".join(lines)


def draw(found: Mapping[str, Mapping[int, Outcome]], path: Path) -> None:
    """Draw all curves of validation losses, the mean of the seeds thick."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 5.6), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (name, runs) in enumerate(found.items()):
        curves = np.array([each.validation for each in runs.values()])[:, 1:]
        steps, losses = curves[0, :, 0], curves[:, :, 1]
        colour = f"C{number}"
        axes.plot(steps, losses.T, color=colour, alpha=0.25, linewidth=0.7)
        axes.plot(steps, losses.mean(0), color=colour, linewidth=1.8, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("validation loss (bits per byte)")
    axes.legend(frameon=False)
    figure.savefig(path)


def main(
    seeds: Annotated[int, typer.Option(min=1)] = 5,
    only: Annotated[str | None, typer.Option(help="A part of the settings' names.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Train with all settings, and write down what came of it."""
    model = GPTConfig(context=32, width=32, heads=2, layers=1, hidden=None)
    base = Options(
        *(model, STEPS, 32, 1e-2, 0, fc.Strategy("full_shard"), 1, "auto", out), evaluate_every=48
    )
    chosen = [name for name in SETTINGS if name == NONE or only is None or only in name]
    found: dict[str, dict[int, Outcome]] = {name: {} for name in chosen}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            for name in chosen:
                found[name][seed] = outcome = run(SETTINGS[name], base, seed, folder)
                typer.echo(f"seed {seed}  {name}: {outcome.validation[-1][1]:.4f}")
        text = write(found, out)
    typer.echo(text)


def write(found: Mapping[str, Mapping[int, Outcome]], out: Path) -> str:
    """Write results as JSON, table and plot; return the table."""
    out.mkdir(parents=True, exist_ok=True)
    text = table(found)
    data = {name: {seed: vars(each) for seed, each in runs.items()} for name, runs in found.items()}
    record = json.dumps({"steps": STEPS, "start": START, "ranks": RANKS, "runs": data}, indent=1)
    (out / "compression.json").write_text(record + "\n")
    (out / "compression.md").write_text(text + "\n")
    draw(found, out / "compression.png")
    return text


if __name__ == "__main__":
    typer.run(main)
