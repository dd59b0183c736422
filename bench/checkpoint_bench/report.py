"""What came of a run: tables and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from checkpoint_bench.cases import COPY, LOAD, OURS, RESHARD, SAVE, STALL, TMPFS, Case
from checkpoint_bench.results import Result, Row
from fsdpcore import __version__
from fsdpcore.bench.memory import MIB

if TYPE_CHECKING:
    from checkpoint_bench.run import Request

SCHEMA = "fsdpcore.bench.checkpoint/1"

_COLUMNS = ("time", "best", "worst", "rate", "ratio", "min", "max", "of best", "added", "wrong")
_UNITS = ("ms", "ms", "ms", "GB/s", "", "", "", "", "MiB", "")


def title(request: Request, machine: Mapping[str, Any]) -> list[str]:
    """The first lines."""
    return [
        f"# fsdpcore {__version__}, transport {request.transport}",
        f"# {machine['cpu']}, {machine['cores']} cores",
        f"# {request.rounds} rounds; time: of the slowest rank, median over the rounds",
        "# ratio: the other's time over ours in the same round; median, min, max; of the fastest",
        "# added: to the resident set of a rank, at its peak, the first time",
    ]


def describe(result: Result, *, cold: bool) -> str:
    """A case in words."""
    case = result.case
    place = f"{result.filesystem or case.place}"
    cached = "" if case.place == TMPFS else (", not in" if cold else ", in") + " the page cache"
    words = {
        SAVE: f"save on {case.ranks} ranks to {place}, synced",
        LOAD: f"load on {case.ranks} ranks what {case.ranks} saved, from {place}{cached}",
        RESHARD: f"load on {case.readers} ranks what {case.ranks} saved, from {place}{cached}",
        STALL: f"save in the background on {case.ranks} ranks to {place}: until training goes on",
    }
    return f"{words[case.operation]}; {result.nbytes / MIB:.4g} MiB"


def show(result: Result, request: Request, console: Console) -> None:
    """Print a case's table, and what follows from it."""
    table = Table(title=describe(result, cold=request.cold), title_justify="left")
    table.add_column("contestant", no_wrap=True)
    for name, unit in zip(_COLUMNS, _UNITS, strict=True):
        table.add_column(f"{name}\n{unit}", justify="right", no_wrap=True)
    for name, row in result.rows.items():
        table.add_row(name, *_cells(result, name, row))
    console.print(table)
    for line in _notes(result):
        console.print(line, markup=False, highlight=False)


def _cells(result: Result, name: str, row: Row) -> list[str]:
    seconds = row.seconds
    ratios = [""] * 4
    if name != OURS:
        values = (*result.ratio(name), result.best_ratio(name))
        ratios = [f"{value:.2f}" for value in values]
    return [
        *(f"{1e3 * value:.1f}" for value in seconds),
        f"{result.nbytes / seconds.median / 1e9:.2f}",
        *ratios,
        f"{max(row.added) / MIB:.1f}" if row.added else "",
        "" if row.wrong is None else str(row.wrong),
    ]


def _notes(result: Result) -> list[str]:
    lines = []
    if result.trials:
        tried = ", ".join(f"{name} {1e3 * took:.0f} ms" for name, took in result.trials.items())
        lines.append(f"# dcp writes with {result.setting}; fastest trials: {tried}")
    if result.stall is not None:
        median, lowest, highest = result.stall
        lines.append(
            f"# our stall: {median:.2f} times a {COPY} of the shard ({lowest:.2f} to {highest:.2f})"
        )
        for name, row in result.rows.items():
            if row.durable_seconds is not None:
                lines.append(f"# {name}: durable after {1e3 * row.durable_seconds:.0f} ms")
    return lines


def document(
    request: Request,
    results: Sequence[Result],
    versions: Mapping[str, Mapping[str, str]],
    started: str,
    machine: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything about a run, ready for ``json.dump``."""
    return {
        "schema": SCHEMA,
        "started": started,
        "command": list(request.command),
        "machine": dict(machine),
        "versions": {name: dict(found) for name, found in versions.items()},
        "settings": {
            "cases": [case.name for case in request.cases],
            "transport": request.transport,
            "against": list(request.against),
            "peer_setting": request.setting,
            "rounds": request.rounds,
            "cold": request.cold,
        },
        "results": [_result(result) for result in results],
    }


def _result(result: Result) -> dict[str, Any]:
    others = [name for name in result.rows if name != OURS]
    return {
        **_case(result.case),
        "bytes": result.nbytes,
        "filesystem": result.filesystem,
        "peer_setting": result.setting or None,
        "peer_trials_ms": {name: 1e3 * took for name, took in result.trials.items()},
        "rows": [_row(name, row, result) for name, row in result.rows.items()],
        "ratios": {name: result.ratio(name)._asdict() for name in others},
        "best_ratios": {name: result.best_ratio(name) for name in others},
        "stall_over_memcpy": None if result.stall is None else result.stall._asdict(),
    }


def _case(case: Case) -> dict[str, Any]:
    told = case.as_dict()
    del told["nbytes"]  # what was asked for
    return told


def _row(name: str, row: Row, result: Result) -> dict[str, Any]:
    seconds = row.seconds
    durable = row.durable_seconds
    return {
        "contestant": name,
        "wrong": row.wrong,
        "time_ms": {key: 1e3 * value for key, value in seconds._asdict().items()},
        "gb_per_s": result.nbytes / seconds.median / 1e9,
        "durable_ms": None if durable is None else 1e3 * durable,
        "added_mib": [added / MIB for added in row.added] or None,
        "samples_ms": [[1e3 * value for value in ranks] for ranks in row.samples],
    }
