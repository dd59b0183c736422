"""Draw the loss of an elastic training beside that of a quiet one, and see that they are equal.

    fsdpcore run -n 2 examples/train_gpt.py --virtual-ranks 8 --checkpoint quiet
    fsdpcore run --elastic -n 1:4 examples/train_gpt.py --virtual-ranks 8 --checkpoint rough
    python bench/elastic_curve.py quiet rough --changes changes.txt --out curve.png

Ranks of the second run are killed and added meanwhile. The file of changes has a line for each: the
number of the step after which the job had other ranks, and a word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import fsdpcore as fc


def losses(folder: Path) -> list[float]:
    """The losses of all steps, from the newest checkpoint of a run."""
    found: list[float] = fc.launch(_losses, world_size=1, transport="sim", args=(folder,))[0]
    return found


def _losses(backend: fc.Backend, folder: Path) -> Any:
    arrays = fc.checkpoint.read(folder)
    target = {name: np.empty_like(array) for name, array in arrays.items()}
    return fc.checkpoint.load(folder, target, backend).extra["losses"]


def draw(
    quiet: list[float], rough: list[float], changes: list[tuple[int, str]], path: Path
) -> None:
    """Write both curves, the quiet one broad below the other, with a mark at each change."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.2), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(range(1, len(quiet) + 1), quiet, color="#f0a58f", lw=7, label="ranks that stay")
    axes.plot(range(1, len(rough) + 1), rough, color="#1f5fa8", lw=1.6, label="ranks come and go")
    for step, word in changes:
        axes.axvline(step, color="#8b92a1", lw=0.9, ls=":")
        axes.annotate(
            word, (step, 0.97), xycoords=("data", "axes fraction"), rotation=90, va="top",
            xytext=(-11, 0), textcoords="offset points", fontsize=8.5, color="#59606e",
        )  # fmt: skip
    axes.set_xlabel("training step")
    axes.set_ylabel("loss (bits per byte)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", frameon=False)
    axes.set_title("One line: losses equal bit for bit", loc="left", fontweight="bold")
    figure.savefig(path)


def main(
    quiet: Annotated[Path, typer.Argument(help="Checkpoints of the run whose ranks stayed.")],
    rough: Annotated[Path, typer.Argument(help="Checkpoints of the other.")],
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("elastic_curve.png"),
    changes: Annotated[Path | None, typer.Option(help="Lines of 'STEP WORDS'.")] = None,
) -> None:
    """Draw two runs as one line, if they are one; exit code 1 if not."""
    one, two = losses(quiet), losses(rough)
    if one != two:
        differ = [n + 1 for n, pair in enumerate(zip(one, two, strict=False)) if len({*pair}) > 1]
        typer.echo(f"{len(one)} and {len(two)} losses, which differ in steps {differ[:10]}")
        raise typer.Exit(1)
    marks = []
    for line in changes.read_text().splitlines() if changes else []:
        step, _, word = line.partition(" ")
        marks.append((int(step), word))
    draw(one, two, marks, out)
    typer.echo(f"{len(one)} losses, all equal bit for bit: {out}")


if __name__ == "__main__":
    typer.run(main)
