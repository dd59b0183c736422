"""Losses of quantised training beside those of the same training in float32.

    python bench/compression.py --seeds 5            # table, plot and JSON in bench/results
    python bench/compression.py --steps 50 --only int8

Each setting trains the model of examples/train_gpt.py once with each seed, and is compared with the
float32 run of that seed. Ranks are threads of this process: what is compared are losses and bytes,
not time.
"""

from __future__ import annotations

import json
import sys
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


@dataclass(frozen=True)
class Setting:
    """One way to train.

    Attributes:
        strategy: of the engine.
        compression: of the engine, or of the outer steps.
        every: steps between outer steps; None for none.
    """

    strategy: str = "full_shard"
    compression: fc.Compression | None = None
    every: int | None = None


def _both(width: Any, **options: Any) -> fc.Compression:
    return fc.Compression(width, width, **options)


SETTINGS: dict[str, Setting] = {
    NONE: Setting(),
    "int8": Setting(compression=_both("int8")),
    "int4": Setting(compression=_both("int4")),
    "int4, shard_grad_op": Setting("shard_grad_op", _both("int4")),
    "int4, shard_grad_op, feedback": Setting("shard_grad_op", _both("int4", error_feedback=True)),
    "int4, full_shard, no rotation": Setting(compression=_both("int4", rotation=False)),
    "outer steps": Setting(every=50),
    "outer steps, int4": Setting(compression=_both("int4", error_feedback=True), every=50),
}


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        validation: pairs of a step and a loss in bits per byte.
        sent: bytes that a rank sends per step, the most of all ranks.
    """

    validation: list[list[float]]
    sent: float


def train(backend: fc.Backend, options: Options) -> Outcome:
    """Train; each rank's program."""
    trainer = Trainer(backend, options)
    validation = [[0, trainer.evaluate()]]
    for number in range(options.steps):
        trainer.step(number)
        if (number + 1) % options.evaluate_every == 0 or number + 1 == options.steps:
            validation.append([number + 1, trainer.evaluate()])
    if trainer.outer is not None:
        sent = trainer.outer.sends / trainer.outer.every
    else:  # as if the ranks were on different hosts, where nobody has a window
        sent = fc.make_plan(
            trainer.engine.units,
            backend.world_size,
            strategy=options.strategy,
            compression=options.compression,
            rank=backend.rank,
        ).bytes_sent
    return Outcome(validation, float(fc.all_reduce(np.array([float(sent)]), backend, op="max")[0]))


def run(setting: Setting, base: Options, seed: int) -> Outcome:
    """Train with a setting and a seed."""
    options = replace(
        base,
        seed=seed,
        strategy=fc.Strategy(setting.strategy),
        compression=setting.compression,
        outer_every=setting.every,
    )
    found: Outcome = fc.launch(train, world_size=RANKS, transport="sim", args=(options,))[0]
    return found


def table(found: Mapping[str, Mapping[int, Outcome]]) -> str:
    """Return a table: bytes, and how much worse the loss is, on average and at worst."""
    lines = [
        "| setting | bytes per step | of float32 | validation | worse, mean | worst seed |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    plain = found[NONE]
    for name, runs in found.items():
        sent = max(each.sent for each in runs.values())
        less = max(each.sent for each in plain.values()) / sent
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
        curves = np.array([each.validation for each in runs.values()])
        steps, losses = curves[0, 1:, 0], curves[:, 1:, 1]
        colour = f"C{number}"
        axes.plot(steps, losses.T, color=colour, alpha=0.25, linewidth=0.7)
        axes.plot(steps, losses.mean(0), color=colour, linewidth=1.8, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("validation loss (bits per byte)")
    axes.legend(frameon=False)
    figure.savefig(path)


def main(
    seeds: Annotated[int, typer.Option(min=1)] = 5,
    steps: Annotated[int, typer.Option(min=1)] = 300,
    only: Annotated[str | None, typer.Option(help="A part of the settings' names.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Train with all settings, and write down what came of it."""
    model = GPTConfig(context=64, width=64, heads=2, layers=2, hidden=None)
    base = Options(
        *(model, steps, 16, 6e-3, 0, fc.Strategy("full_shard"), 1, "auto", out),
        evaluate_every=max(1, steps // 12),
    )
    chosen = [name for name in SETTINGS if name == NONE or only is None or only in name]
    found: dict[str, dict[int, Outcome]] = {name: {} for name in chosen}
    for seed in range(seeds):
        for name in chosen:
            found[name][seed] = outcome = run(SETTINGS[name], base, seed)
            typer.echo(f"seed {seed}  {name}: {outcome.validation[-1][1]:.4f}")
        text = write(found, steps, out)
    typer.echo(text)


def write(found: Mapping[str, Mapping[int, Outcome]], steps: int, out: Path) -> str:
    """Write results as JSON, table and plot; return the table."""
    out.mkdir(parents=True, exist_ok=True)
    text = table(found)
    data = {name: {seed: vars(each) for seed, each in runs.items()} for name, runs in found.items()}
    record = json.dumps({"steps": steps, "ranks": RANKS, "runs": data}, indent=1)
    (out / "compression.json").write_text(record + "\n")
    (out / "compression.md").write_text(text + "\n")
    draw(found, out / "compression.png")
    return text


if __name__ == "__main__":
    typer.run(main)
