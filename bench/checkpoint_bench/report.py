"""What came of a case, and of a run: tables and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from checkpoint_bench.cases import LOAD, MEMCPY, RESHARD, SAVE, STALL, TMPFS, Case
from fsdpcore import __version__
from fsdpcore.bench.harness import record, table
from fsdpcore.bench.harness.measurements import (
    OURS,
    Comparison,
    Measurement,
    Spread,
    beside_ours,
    compare,
)
from fsdpcore.bench.harness.memory import MIB
from fsdpcore.bench.harness.table import Column

if TYPE_CHECKING:
    from checkpoint_bench.run import CheckpointRun


@dataclass
class StateRow(Measurement):
    """One contestant.

    Attributes:
        durable: as ``samples``, of saves in the background: until it was on disk.
        added: bytes that the first time added to the resident set of each rank, at its peak.
    """

    durable: list[list[float]] = field(default_factory=list)
    added: list[float] = field(default_factory=list)

    @property
    def rounds(self) -> list[float]:
        """Seconds of the slowest rank in each round."""
        return [max(ranks) for ranks in self.samples]

    @property
    def durable_seconds(self) -> float | None:
        """The median over the rounds of the slowest rank's seconds until all was on disk."""
        return median(map(max, self.durable)) if self.durable else None


@dataclass(frozen=True)
class Result:
    """One case, with all contestants.

    Attributes:
        case: what was measured.
        nbytes: of all arrays.
        rows: by contestant, ours first.
        filesystem: that it was measured on.
        setting: of the peer; empty where it has none, or there is no peer.
        trials: seconds of the peer's fastest save, by setting.
    """

    case: Case
    nbytes: int
    rows: Mapping[str, StateRow]
    filesystem: str
    setting: str
    trials: Mapping[str, float]

    @property
    def beside(self) -> dict[str, Comparison]:
        """Every other contestant beside ours."""
        return beside_ours(self.rows)

    @property
    def stall(self) -> Spread | None:
        """Our stall over a memcpy of the shard in the same round."""
        copy = self.rows.get(MEMCPY)
        return None if copy is None else compare(copy, self.rows[OURS]).ratio


def title(request: CheckpointRun, machine: Mapping[str, Any]) -> list[str]:
    """The first lines."""
    return table.heading(
        machine,
        f"fsdpcore {__version__}, transport {request.transport}",
        f"{request.rounds} rounds; time: of the slowest rank, median over the rounds",
        "ratio: the other's time over ours in the same round; median, min, max; of the fastest",
        "added: to the resident set of a rank, at its peak, the first time",
    )


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


def lines(result: Result, *, cold: bool) -> list[str]:
    """A case's table, and what follows from it."""
    rows = result.rows
    columns = [
        *table.times(),
        Column("worst", "(ms)", lambda row: f"{1e3 * max(row.rounds):.2f}", 10),
        Column("rate", "(GB/s)", lambda row: f"{_rate(result, row):.2f}"),
        *table.ratios(rows),
        Column("of best", "", lambda row: table.beside(rows, row, lambda f: f.best_ratio)),
        Column("added", "(MiB)", lambda row: f"{max(row.added) / MIB:.1f}" if row.added else ""),
        *table.wrong(),
    ]
    return [f"# {describe(result, cold=cold)}", *table.lines(rows, columns), *_notes(result), "#"]


def _rate(result: Result, row: StateRow) -> float:
    """In GB/s."""
    return result.nbytes / row.seconds / 1e9


def _notes(result: Result) -> list[str]:
    found = []
    if result.trials:
        tried = ", ".join(f"{name} {1e3 * took:.0f} ms" for name, took in result.trials.items())
        found.append(f"# dcp writes with {result.setting}; fastest trials: {tried}")
    if result.stall is not None:
        middle, lowest, highest = result.stall
        found.append(
            f"# our stall: {middle:.2f} times a {MEMCPY} of the shard "
            f"({lowest:.2f} to {highest:.2f})"
        )
        for name, row in result.rows.items():
            if row.durable_seconds is not None:
                found.append(f"# {name}: durable after {1e3 * row.durable_seconds:.0f} ms")
    return found


def content(request: CheckpointRun, results: Sequence[Result]) -> dict[str, Any]:
    """What the record of a run holds, beside the versions."""
    return {
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
    case = result.case.as_dict()
    del case["nbytes"]  # what was asked for
    return {
        **case,
        "bytes": result.nbytes,
        "filesystem": result.filesystem,
        "peer_setting": result.setting or None,
        "peer_trials_ms": {name: 1e3 * took for name, took in result.trials.items()},
        "rows": [_row(row, result) for row in result.rows.values()],
        "ratios": record.ratios(result.rows),
        "best_ratios": {name: found.best_ratio for name, found in result.beside.items()},
        "stall_over_memcpy": None if result.stall is None else result.stall._asdict(),
    }


def _row(row: StateRow, result: Result) -> dict[str, Any]:
    durable = row.durable_seconds
    return {
        "contestant": row.contestant,
        "wrong": row.wrong,
        "time_ms": {key: 1e3 * value for key, value in Spread.of(row.rounds)._asdict().items()},
        "gb_per_s": _rate(result, row),
        "durable_ms": None if durable is None else 1e3 * durable,
        "added_mib": [added / MIB for added in row.added] or None,
        "samples_ms": record.samples(row, "ms"),
    }
