"""The parts of the bench, each run in processes of its own, with a limit of time."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_bench import limited
from gpu_bench.part import PROGRAMS
from gpu_bench.training import FOLDERS

_TAIL = 4000
# Of the seconds that there are, what each part may use at most if all are run.
SHARES = {
    ("collectives", 1): 0.17,
    ("optimizer", 1): 0.1,
    ("training", 1): 0.38,
    ("collectives", 2): 0.2,
    ("training", 2): 0.15,
}


@dataclass(frozen=True)
class Part:
    """What is measured together.

    Attributes:
        name: a key of ``part.PROGRAMS``.
        ranks: of ours and of the peers.
        share_gpu: all on one GPU.
        seconds: when so many are over, it is ended.
    """

    name: str
    ranks: int
    share_gpu: bool
    seconds: float

    @property
    def transport(self) -> str:
        """The URL of ours."""
        return "nccl://?share_gpu=true" if self.share_gpu else "nccl"


def chosen(names: Iterable[str], most_ranks: int, gpus: int, seconds: float) -> list[Part]:
    """The parts with these names, for one rank and for two."""
    wanted = [
        key
        for key in SHARES
        if key[0] in set(names) and key[0] in PROGRAMS and key[1] <= most_ranks
    ]
    total = sum(SHARES[key] for key in wanted)
    return [
        Part(name, ranks, ranks > max(1, gpus), seconds * SHARES[name, ranks] / total)
        for name, ranks in wanted
    ]


def run(part: Part, rows: Path, *, quick: bool) -> dict[str, Any]:
    """Run one part; never raises for what goes wrong in it.

    Args:
        part: which one.
        rows: the file to which its rows are appended.
        quick: just see whether everything can be run.

    Returns:
        ``part``, ``ranks``, ``share_gpu``, ``limit_s``, ``took_s``, ``rows``; where it did not end
        well ``error``; and where anything failed in it the end of its ``output``.
    """
    before = rows.stat().st_size if rows.exists() else 0
    options = {
        "part": part.name,
        "ranks": part.ranks,
        "transport": part.transport,
        "share_gpu": part.share_gpu,
        "seconds": part.seconds,
        "quick": quick,
        "rows": str(rows),
    }
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        command = ["-m", "gpu_bench.part", json.dumps(options)]
        code = limited.python(command, part.seconds, output, environ=_environ())
        output.seek(0)
        text = output.read()[-_TAIL:]
    result: dict[str, Any] = {
        "part": part.name,
        "ranks": part.ranks,
        "share_gpu": part.share_gpu,
        "limit_s": round(part.seconds, 1),
        "took_s": round(time.monotonic() - started, 1),
        "rows": [json.loads(line)["row"] for line in _since(rows, before)],
    }
    if code is None:
        result["error"] = f"not done after {part.seconds:.0f} s"
    elif code:
        result["error"] = f"ended with code {code}"
    if code != 0 or any("error" in row for row in result["rows"]):
        result["output"] = text
    return result


def _environ() -> Mapping[str, str]:
    paths = [*map(str, FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _since(rows: Path, position: int) -> list[str]:
    if not rows.exists():
        return []
    with rows.open(encoding="utf-8") as file:
        file.seek(position)
        return [line for line in file.read().split("\n") if line.endswith("}")]
