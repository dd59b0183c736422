"""Measure on a GPU: NCCL through us and bare, fused optimizers, training steps beside PyTorch's.

    python bench/gpu.py --out results                 # everything, in five minutes at most
    python bench/gpu.py --out results --parts collectives --ranks 1 --seconds 60

``gpu.rows.jsonl`` in the folder has each row as soon as it is there, ``gpu.json`` and ``gpu.txt``
have all of it after each part. bench/README.md says what is measured, and how. What fails is
recorded and the rest goes on: the exit code is 0 even then. Without a GPU it is 1, and nothing is
begun.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.append(str(Path(__file__).parent))  # the parts, where this is not run as a script
sys.path.append(str(Path(__file__).parents[1] / "examples"))  # the model

from gpu_bench import parts, report
from gpu_bench.facts import facts
from gpu_bench.usable import in_words, why_not

from fsdpcore.bench.harness import options, record
from fsdpcore.bench.harness.measurements import OURS
from fsdpcore.bench.harness.usage import one_line

_ALL = tuple(dict.fromkeys(name for name, _ in parts.SHARES))


def main(
    out: Annotated[Path, typer.Option(help="Folder for results.")],
    names: Annotated[str, typer.Option("--parts", help=f"Of {', '.join(_ALL)}.")] = ",".join(_ALL),
    ranks: Annotated[int, typer.Option(min=1, max=2, help="At most.")] = 2,
    seconds: Annotated[float, typer.Option(min=1, help="For everything.")] = 300.0,
    quick: Annotated[bool, typer.Option("--quick", help="Just see whether it can be run.")] = False,
    without_gpu: Annotated[
        bool,
        typer.Option("--without-gpu", help="Try all parts where there is no GPU, too."),
    ] = False,
) -> None:
    """Measure on a GPU; what fails is recorded, and the rest goes on."""
    with one_line():
        wanted = options.names(names)
        options.check_known("--parts", wanted, _ALL)
        if not without_gpu and (reason := why_not()):
            typer.echo(in_words(reason), err=True)
            raise typer.Exit(1)
        out.mkdir(parents=True, exist_ok=True)
        run = record.RunRecord("gpu", place=facts())
        gpus = len(run.machine.get("gpus", []))
        rows = out / "gpu.rows.jsonl"
        rows.unlink(missing_ok=True)
        found: list[dict[str, Any]] = []
        for part in parts.chosen(wanted, ranks, gpus, seconds):
            found.append(parts.run(part, rows, quick=quick))
            targets = report.targets(found)
            run.save(
                out / "gpu.json",
                versions={OURS: run.machine["packages"]},
                settings={"parts": wanted, "ranks": ranks, "seconds": seconds, "quick": quick},
                parts=found,
                targets=targets,
            )
            tables = report.text(run.machine, found, targets)
            (out / "gpu.txt").write_text(tables, encoding="utf-8")
        if found:
            typer.echo((out / "gpu.txt").read_text(encoding="utf-8"))


if __name__ == "__main__":
    typer.run(main)
