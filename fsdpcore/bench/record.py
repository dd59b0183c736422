"""Results as JSON; bench/README.md describes the schema."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fsdpcore.bench.contestants import OURS
from fsdpcore.bench.memory import MIB, highest_rss, pss_per_rank
from fsdpcore.bench.results import Row, Spread, Timing, compare
from fsdpcore.launch.blas import available_cores

SCHEMA = "fsdpcore.bench.collectives/1"


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "cpu": _cpu_model(),
        "cores": available_cores(),
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


def started_now() -> str:
    """The time, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def document(
    rows: Sequence[Mapping[str, Row]],
    *,
    command: Sequence[str],
    started: str,
    place: Mapping[str, Any],
    versions: Mapping[str, Mapping[str, str]],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything about a run, ready for ``json.dump``.

    Args:
        rows: for each case, the rows by contestant.
        command: the command line.
        started: when.
        place: what ``machine`` returned at the start.
        versions: of libraries, by contestant.
        settings: all options, those with default values too.
    """
    return {
        "schema": SCHEMA,
        "started": started,
        "command": list(command),
        "machine": dict(place),
        "versions": {name: dict(found) for name, found in versions.items()},
        "settings": dict(settings),
        "rows": [_row(row) for case in rows for row in case.values()],
        "comparisons": [item for case in rows for item in _comparisons(case)],
    }


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write a document."""
    path.write_text(dumps(content) + "\n", encoding="utf-8")


def dumps(value: Any, indent: str = "") -> str:
    """JSON with a line for each record, so that the diff of a rerun can be read.

    A record is what holds no list of objects. Whatever does has its parts on lines of their own.
    """
    if not _holds_records(value):
        return json.dumps(value)
    inner = indent + " "
    if isinstance(value, Mapping):
        parts = [f"{json.dumps(key)}: {dumps(each, inner)}" for key, each in value.items()]
        opening, closing = "{}"
    else:
        parts = [dumps(each, inner) for each in value]
        opening, closing = "[]"
    return opening + ",".join(f"\n{inner}{part}" for part in parts) + f"\n{indent}{closing}"


def _holds_records(value: Any) -> bool:
    """Whether there is a list of objects in it."""
    if isinstance(value, Mapping):
        return any(map(_holds_records, value.values()))
    if isinstance(value, (list, tuple)):
        return any(isinstance(each, Mapping) or _holds_records(each) for each in value)
    return False


def _row(row: Row) -> dict[str, Any]:
    return {
        "contestant": row.contestant,
        **_case(row),
        "iterations": row.iterations,
        "wrong": row.wrong,
        "time_us": {
            "avg": row.seconds * 1e6,
            "min": row.fastest_rank * 1e6,
            "max": row.slowest_rank * 1e6,
            "best": min(row.rounds) * 1e6,
        },
        "algbw_gbs": row.algbw,
        "busbw_gbs": row.busbw,
        "memory_mib": memory(row),
        "samples_us": [[seconds * 1e6 for seconds in ranks] for ranks in row.samples],
    }


def memory(timing: Timing) -> dict[str, float | None]:
    """Memory per rank in MiB; None where the system does not say, or nobody looked."""
    if not timing.memory:
        return {"peak_rss": None, "pss": None}
    proportional = pss_per_rank(timing.memory) / MIB
    return {"peak_rss": highest_rss(timing.memory) / MIB, "pss": proportional or None}


def _case(row: Row) -> dict[str, Any]:
    case = row.case
    return {
        "operation": case.operation,
        "size": case.size,
        "count": case.count,
        "type": case.dtype,
        "redop": case.op,
        "root": case.root,
        "ranks": case.world_size,
        "place": "in" if case.in_place else "out",
    }


def _comparisons(rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    ours = rows[OURS]
    found = []
    for name, row in rows.items():
        if name == OURS:
            continue
        compared = compare(ours, row)
        difference = Spread(*(1e6 * value for value in compared.difference))
        found.append(
            {
                "peer": name,
                **_case(row),
                "ratio": compared.ratio._asdict(),
                "difference_us": difference._asdict(),
                "best_difference_us": 1e6 * compared.best_difference,
                "overhead_percent": compared.overhead._asdict(),
            }
        )
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())
