"""Measure what a loss and a commit cost where ranks come and go, on hosts of our own.

    sudo python bench/elastic.py                           # a small model, and one of 27 M
    sudo python bench/elastic.py --against torchrun        # beside PyTorch's launcher, or torchft
    unshare -Ur python bench/elastic.py --parts kill --models small --times 9

The hosts are network namespaces of this machine. bench/README.md says what is measured, and how.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

sys.path.append(str(Path(__file__).parent))  # the parts, where this is not run as a script
sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the hosts

from elastic_bench import pytorch
from elastic_bench.losses import PHASES, keep, lose
from elastic_bench.training import Training
from support.hosts.lab import Lab, why_no_hosts

from fsdpcore.bench.harness import options
from fsdpcore.core.errors import ConfigError
from fsdpcore.core.text import columns

MODELS = {
    "small": Training(),
    "gpt27": Training(width=528, layers=8, heads=2),
}
KINDS = {"kill": "kill", "vanish": "host"}
PARTS = (*KINDS, "commits")
PEERS = {"torchrun": pytorch.torchrun, "torchft": pytorch.torchft}


def main(
    parts: Annotated[str, typer.Option(help=f"Some of {', '.join(PARTS)}.")] = ",".join(PARTS),
    models: Annotated[str, typer.Option(help=f"Some of {', '.join(MODELS)}.")] = ",".join(MODELS),
    against: Annotated[str, options.against(tuple(PEERS))] = "",
    hosts: Annotated[int, typer.Option(min=3, help="Of one rank each.")] = 3,
    rate: Annotated[float, typer.Option(help="Of each link, in bits per second.")] = 1e9,
    times: Annotated[int, typer.Option(min=1, help="Losses of each kind.")] = 5,
    block: Annotated[int, typer.Option(min=3, help="Steps with commits, or without.")] = 6,
    turns: Annotated[int, typer.Option(min=1, help="Blocks of either kind.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all samples.")] = None,
) -> None:
    """Measure what a loss and a commit cost where ranks come and go."""

    def bench() -> int:
        chosen, sizes, peers = (options.names(text) for text in (parts, models, against))
        options.check_known("--parts", chosen, PARTS)
        options.check_known("--models", sizes, MODELS)
        options.check_known("--against", peers, PEERS)
        if why := why_no_hosts():
            raise ConfigError(why)
        found: dict[str, Any] = {
            "schema": "fsdpcore.bench.elastic/1",
            "hosts": hosts,
            "rate": rate,
            "load": os.getloadavg(),
        }
        with tempfile.TemporaryDirectory() as scratch, Lab(hosts, rate=rate) as lab:
            folder = Path(scratch)
            for size in sizes:
                training = MODELS[size]
                for part in (part for part in chosen if part in KINDS):
                    name = f"{size}, {part}"
                    found[name] = lose(lab, folder / name, training, KINDS[part], times)
                    _tell(name, found[name])
                if "commits" in chosen:
                    blocks = replace(training, block=block, steps=2 * block * (turns + 1))
                    found[f"{size}, commits"] = _commits(size, lab, folder / size, blocks)
            for peer in peers:
                found[peer] = PEERS[peer](lab, folder / peer, times)
                typer.echo(f"{peer}, kill to next step: {_shown(found[peer])}")
        if json_file is not None:
            json_file.write_text(json.dumps(found, indent=1) + "\n")
        return 0

    options.measure(bench)


def _tell(name: str, losses: Sequence[dict[str, float]]) -> None:
    rows = [[phase, *_figures([loss[phase] for loss in losses])] for phase in PHASES]
    typer.echo(columns([f"{name}, s", "median", "least", "most"], rows))


def _commits(size: str, lab: Lab, folder: Path, training: Training) -> dict[str, list[float]]:
    kept, plain = keep(lab, folder, training)
    rows = [["with", *_figures(kept)], ["without", *_figures(plain)]]
    typer.echo(columns([f"{size}, a step s", "median", "least", "most"], rows))
    typer.echo(f"a commit takes {median(kept) / median(plain) - 1:+.1%} of a step")
    return {"with": kept, "without": plain}


def _figures(seconds: Sequence[float]) -> list[str]:
    every: tuple[Callable[[Sequence[float]], float], ...] = (median, min, max)
    return [f"{each(seconds):.3f}" for each in every]


def _shown(seconds: Sequence[float]) -> str:
    middle, least, most = _figures(seconds)
    return f"{middle} s ({least} to {most})"


if __name__ == "__main__":
    typer.run(main)
