"""Measure the control plane of checkpoints: what planning takes where there are thousands of ranks.

    python bench/checkpoint_planning.py                                # the whole table
    python bench/checkpoint_planning.py --cases flat:1000x4096         # layout:arraysxranks
    python bench/checkpoint_planning.py --against dcp --json found.json

One process has the parts of all ranks, one after the other; nothing is written, no byte of an array
is there. ``save`` is what rank 0 does with what it has gathered: read it, plan, answer, describe
the files. ``again`` is the next save of the same state, of which it keeps the plan. ``load`` is
what every rank does with the metadata that it gets. Memory is the highest that Python and NumPy
have had meanwhile beside what came in. Layouts: ``flat`` is a model under ``full_shard`` in units
of nine arrays, ``tensor`` its matrices in columns and rows on 8 ranks and flat on the others,
``rows`` are matrices of which each rank has two rows. ``dcp`` is PyTorch's
``DefaultSavePlanner.create_global_plan``, with the metadata pickled and read again.
"""

from __future__ import annotations

import json as json_module
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.append(str(Path(__file__).parent))  # the parts, where this is not run as a script

from planning_bench.layouts import Layout, layout
from planning_bench.ours import Cost, Measured, measure
from planning_bench.peer import PeerMeasured, measure_dcp

_FLAT = [f"flat:1000x{ranks}" for ranks in (64, 256, 1024, 4096)]
_DEFAULT = ",".join([*_FLAT, "tensor:1000x4096", "rows:1000x1024"])


def main(
    cases: Annotated[
        str, typer.Option(help="layout:arraysxranks, separated by commas.")
    ] = _DEFAULT,
    rounds: Annotated[int, typer.Option(help="The fastest of so many counts.")] = 3,
    against: Annotated[str, typer.Option(help="dcp, or none.")] = "none",
    json: Annotated[Path | None, typer.Option(help="Write the results to this file.")] = None,
) -> None:
    """Measure planning, alone or beside PyTorch's distributed checkpoint."""
    rows = []
    print(_HEAD)
    for case in cases.split(","):
        made = _layout(case)
        found = measure(made, rounds)
        peer = measure_dcp(made) if against == "dcp" else None
        print(_line(case, found, peer), flush=True)
        rows.append({"case": case, **asdict(found), "dcp": peer and asdict(peer)})
    _print_exponents(rows)
    if json is not None:
        json.write_text(json_module.dumps(rows, indent=1) + "\n")


def _layout(case: str) -> Layout:
    name, _, sizes = case.partition(":")
    arrays, ranks = map(int, sizes.split("x"))
    return layout(name, arrays, ranks)


_HEAD = (
    f"{'case':18} {'pieces':>8} {'gathered':>9} {'metadata':>9} {'rank ms':>8} {'save s/MiB':>13} "
    f"{'again s/MiB':>13} {'load s/MiB':>13}   dcp: save, load s (times ours)"
)


def _line(case: str, found: Measured, peer: PeerMeasured | None) -> str:
    text = (
        f"{case:18} {found.pieces:8} {found.gathered / 1e6:6.2f} MB {found.metadata / 1e6:6.2f} MB "
        f"{found.rank.seconds * 1e3:8.2f} {_shown(found.save)} {_shown(found.again)} "
        f"{_shown(found.load)}"
    )
    if peer is None:
        return text
    saves, loads = peer.save / found.save.seconds, peer.load / found.load.seconds
    return f"{text}   {peer.save:.2f} ({saves:.1f}x), {peer.load:.2f} ({loads:.1f}x)"


def _shown(cost: Cost) -> str:
    return f"{cost.seconds:6.3f} / {cost.mib:4.0f}"


def _print_exponents(rows: list[dict[str, Any]]) -> None:
    """Print the power of the ranks with which the times of a layout grow."""
    layouts: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for row in rows:
        name, _, sizes = row["case"].partition("x")
        layouts.setdefault(name, []).append((int(sizes), row))
    for name, found in layouts.items():
        (few, least), *_, (many, most) = [*found, found[-1]]
        if few == many:
            continue
        powers = {
            what: math.log(most[what]["seconds"] / least[what]["seconds"]) / math.log(many / few)
            for what in ("save", "again", "load")
        }
        shown = ", ".join(f"{what} {power:.2f}" for what, power in powers.items())
        print(f"{name}: exponents from {few} to {many} ranks: {shown}")


if __name__ == "__main__":
    typer.run(main)
