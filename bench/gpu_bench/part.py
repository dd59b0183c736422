"""One part of the bench: the program of a process of its own, started by ``parts``.

Its argument is JSON: ``part``, ``ranks``, ``transport``, ``share_gpu``, ``seconds`` for all of it,
``quick``, and ``rows``, the file to which each row is appended, as a line, as soon as it is there.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import fsdpcore as fc

Options = Mapping[str, Any]
Tell = Callable[[dict[str, Any]], None]

# Of the time that a part has, what is left for starting and ending it.
_SHARE = 0.75


def tell(options: Options, row: dict[str, Any]) -> None:
    """Append a row to the file, whatever happens next."""
    line = {"part": options["part"], "ranks": options["ranks"], "row": row}
    with open(options["rows"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def collectives(options: Options) -> None:
    """NCCL through us and through CuPy alone."""
    fc.launch(
        collectives_rank,
        world_size=options["ranks"],
        transport=options["transport"],
        args=(dict(options),),
    )


def collectives_rank(backend: fc.Backend, options: Options) -> None:
    """The program of a rank of that."""
    from gpu_bench.collectives import NcclPlan, measure

    plan = NcclPlan(budget=_SHARE * options["seconds"])
    if options["quick"]:
        plan = NcclPlan(rounds=2, seconds=0.002, budget=plan.budget, largest=1 << 20)
    measure(backend, plan, partial(tell, options))


def training(options: Options) -> None:
    """Steps of the GPT, ours and PyTorch's."""
    from gpu_bench.cases import LARGE, PRECISIONS, SMALL, TINY, GpuTraining
    from gpu_bench.training import measure, round_plan

    sizes = [TINY] if options["quick"] else [LARGE, SMALL]
    cases = [
        GpuTraining(**size, precision=precision, share_gpu=options["share_gpu"])
        for size in sizes
        for precision in PRECISIONS
    ]
    plan = round_plan(2, 0.01) if options["quick"] else round_plan()
    budget, told = _SHARE * options["seconds"], partial(tell, options)
    measure(cases, options["ranks"], options["transport"], plan, budget, told)


def optimizer(options: Options) -> None:
    """AdamW's kernel beside a copy, on the first GPU."""
    from fsdpcore.bench.device_optimizer import ELEMENTS, measure

    elements = 20_000 if options["quick"] else ELEMENTS
    for row in measure(importlib.import_module("cupy"), elements=elements):
        tell(options, row)


PROGRAMS: dict[str, Callable[[Options], None]] = {
    "collectives": collectives,
    "optimizer": optimizer,
    "training": training,
}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    PROGRAMS[given["part"]](given)
