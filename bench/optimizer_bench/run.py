"""A whole run: let the contestants take turns, print, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdpcore import __version__
from fsdpcore.bench import record
from fsdpcore.bench.main import check_writable, noise_warning
from fsdpcore.bench.results import Timing, compare
from fsdpcore.core.errors import ArgumentError
from optimizer_bench.contestants import OURS, Contestant, check, contestants

SCHEMA = "fsdpcore.bench.optimizer/1"

_LINE = "{:<16}{:>10}{:>10}{:>10}{:>9}{:>8}{:>8}{:>8}"
_CHECKED_STEPS = 3
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Request:
    """What to measure, and where the results go.

    Attributes:
        optimizer: its name.
        elements: float32 parameters.
        tensors: into which the peer's are cut.
        against: implementations of the peer.
        rounds: how often the contestants take turns.
        iterations: steps of one contestant in a round.
        json: file to write.
        command: the command line, for the record.
    """

    optimizer: str = "adamw"
    elements: int = 10_000_000
    tensors: int = 20
    against: tuple[str, ...] = ()
    rounds: int = 15
    iterations: int = 3
    json: Path | None = None
    command: tuple[str, ...] = ()

    def check(self) -> None:
        """Check everything that can be wrong before anything is measured.

        Raises:
            ArgumentError: an option's value is wrong.
            MissingDependencyError: a package is needed that is not installed.
        """
        for option in ("elements", "tensors", "rounds", "iterations"):
            if getattr(self, option) < 1:
                raise ArgumentError(f"{option} must be at least 1, got {getattr(self, option)}")
        check(self.optimizer, self.against)
        if self.json is not None:
            check_writable(self.json)


def run(request: Request, echo: Callable[[str], None]) -> int:
    """Measure; return how many elements were wrong, over all contestants."""
    started, machine = record.started_now(), record.machine()
    for line in (*_title(request, machine), *noise_warning(machine), "#"):
        echo(line)
    found = contestants(request.optimizer, request.elements, request.tensors, request.against)
    wrong = _wrong(found)
    rows = {name: Timing(name, request.iterations, wrong[name]) for name in found}
    for _ in range(request.rounds):
        for name, contestant in found.items():
            rows[name].samples.append([_seconds(contestant, request.iterations)])
    for line in _table(rows, request.elements):
        echo(line)
    if request.json is not None:
        versions = {name: contestant.versions for name, contestant in found.items()}
        record.save(request.json, _document(request, rows, versions, started, machine))
    return sum(row.wrong or 0 for row in rows.values())


def _wrong(found: Mapping[str, Contestant]) -> dict[str, int | None]:
    """After a few steps, count the elements on which the others do not agree with ours."""
    for contestant in found.values():
        for _ in range(_CHECKED_STEPS):
            contestant.update()
    ours = found[OURS].param
    wrong: dict[str, int | None] = dict.fromkeys(found)
    for name, contestant in found.items():
        if name != OURS:
            close = np.isclose(contestant.param, ours, rtol=_TOLERANCE, atol=_TOLERANCE)
            wrong[name] = int(close.size - np.count_nonzero(close))
    return wrong


def _seconds(contestant: Contestant, iterations: int) -> float:
    """Seconds of one step."""
    begin = time.perf_counter()
    for _ in range(iterations):
        contestant.update()
    return (time.perf_counter() - begin) / iterations


def _title(request: Request, machine: Mapping[str, Any]) -> list[str]:
    return [
        f"# fsdpcore {__version__}, {request.optimizer}, {request.elements} float32 parameters, "
        f"one thread; PyTorch's are {request.tensors} tensors",
        f"# {machine['cpu']}, {machine['cores']} cores",
        f"# {request.rounds} rounds of {request.iterations} steps each; median over the rounds",
        "# ratio: the other's time over fsdpcore's in the same round; median, min and max",
    ]


def _table(rows: Mapping[str, Timing], elements: int) -> list[str]:
    names = ("contestant", "time", "best", "each", "ratio", "min", "max", "wrong")
    lines = [
        "# " + _LINE.format(*names).rstrip(),
        "# " + _LINE.format("", "(ms)", "(ms)", "(ns)", *[""] * 4).rstrip(),
    ]
    for name, row in rows.items():
        ratios = ["", "", ""]
        if name != OURS:
            ratios = [f"{value:.3g}" for value in compare(rows[OURS], row).ratio]
        cells = [
            f"{1e3 * row.seconds:.2f}",
            f"{1e3 * min(row.rounds):.2f}",
            f"{1e9 * row.seconds / elements:.2f}",
            *ratios,
            "" if row.wrong is None else str(row.wrong),
        ]
        lines.append("  " + _LINE.format(name, *cells).rstrip())
    return lines


def _document(
    request: Request,
    rows: Mapping[str, Timing],
    versions: Mapping[str, Mapping[str, str]],
    started: str,
    machine: Mapping[str, Any],
) -> dict[str, Any]:
    ours = rows[OURS]
    return {
        "schema": SCHEMA,
        "started": started,
        "command": list(request.command),
        "machine": dict(machine),
        "versions": {name: dict(found) for name, found in versions.items()},
        "settings": {
            "optimizer": request.optimizer,
            "elements": request.elements,
            "tensors": request.tensors,
            "against": list(request.against),
            "rounds": request.rounds,
            "iterations": request.iterations,
        },
        "rows": [
            {
                "contestant": name,
                "wrong": row.wrong,
                "time_ms": {"median": 1e3 * row.seconds, "best": 1e3 * min(row.rounds)},
                "samples_ms": [1e3 * seconds for (seconds,) in row.samples],
            }
            for name, row in rows.items()
        ],
        "ratios": {
            name: compare(ours, row).ratio._asdict() for name, row in rows.items() if name != OURS
        },
    }
