"""Results as JSON; bench/README.md describes the schemas."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fsdpcore.bench.harness.measurements import Measurement, beside_ours
from fsdpcore.bench.harness.memory import MIB, highest_rss, pss_per_rank
from fsdpcore.launch.blas import available_cores

UNITS = {"us": 1e6, "ms": 1e3}


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "cpu": _cpu_model(),
        "cores": available_cores(),
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


class RunRecord:
    """The record of a run; made when it begins.

    Args:
        bench: its name in the schema.
        command: the command line; by default that of a script.
        place: what it is measured on; by default ``machine``.
    """

    def __init__(
        self, bench: str, command: Sequence[str] = (), place: Mapping[str, Any] | None = None
    ) -> None:
        self.machine = dict(machine() if place is None else place)
        self._begin = {
            "schema": f"fsdpcore.bench.{bench}/1",
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": list(command or ("python", *sys.argv)),
            "machine": self.machine,
        }

    def save(
        self,
        path: Path | None,
        *,
        versions: Mapping[str, Any],
        settings: Mapping[str, Any],
        **results: Any,
    ) -> None:
        """Write it, unless there is no path.

        Args:
            path: of the document.
            versions: of libraries.
            settings: how it was measured.
            results: what was measured; nothing that every record has.
        """
        how = {**self._begin, "versions": versions, "settings": settings}
        if taken := how.keys() & results.keys():
            raise ValueError(f"every record has its own {', '.join(sorted(taken))}")
        if path is not None:
            save(path, {**how, **results})


def row(measured: Measurement, unit: str, **more: Any) -> dict[str, Any]:
    """A contestant's record, with ``more`` in its middle."""
    scale = UNITS[unit]
    return {
        "contestant": measured.contestant,
        "iterations": measured.iterations,
        "wrong": measured.wrong,
        f"time_{unit}": {
            "avg": measured.seconds * scale,
            "min": measured.fastest_rank * scale,
            "max": measured.slowest_rank * scale,
            "best": measured.best * scale,
        },
        **more,
        "memory_mib": memory(measured),
        f"samples_{unit}": samples(measured, unit),
    }


def samples(measured: Measurement, unit: str) -> list[list[float]]:
    """For each round the time on each rank."""
    scale = UNITS[unit]
    return [[seconds * scale for seconds in ranks] for ranks in measured.samples]


def memory(measured: Measurement) -> dict[str, float | None]:
    """Memory per rank in MiB; None where the system does not say, or nobody looked."""
    if not measured.memory:
        return {"peak_rss": None, "pss": None}
    proportional = pss_per_rank(measured.memory) / MIB
    return {"peak_rss": highest_rss(measured.memory) / MIB, "pss": proportional or None}


def ratios(rows: Mapping[str, Measurement]) -> dict[str, dict[str, float]]:
    """Of every other contestant, its time over ours."""
    return {name: compared.ratio._asdict() for name, compared in beside_ours(rows).items()}


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


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())
