"""The files of the flight recorder, one of each rank: how they are written, and read with care."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fsdpcore.core.errors import ArgumentError
from fsdpcore.diagnostics.entries import ends
from fsdpcore.diagnostics.status import Group

FORMAT = "fsdpcore-trace"
VERSION = 1

_FILE = re.compile(r"rank_(\d+)\.json")
_STATES = ("started", "done", "failed", "timed out")


def file_name(rank: int) -> str:
    """Name of a rank's file in the directory of a job."""
    return f"rank_{rank}.json"


def write_json(path: Path, content: Any) -> None:
    """Write a file that is either not there, or complete. Raises ``OSError``."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(content, file, separators=(",", ":"))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class TracedOperation:
    """One operation of a rank.

    Attributes:
        op: collective, or ``send``, ``recv`` or ``probe``.
        sequence: number of the collective in its group, 0 for a message.
        group: whose operation it is.
        start_ns, end_ns: wall-clock time; ``end_ns`` is None where it has not ended.
        state: ``started``, ``done``, ``failed`` or ``timed out``.
        error: why it failed, or empty.
        peer, tag: of a message; -1 for any, and for a collective.
        details: dtype, shape, bytes, algorithm and label, for display.
    """

    op: str
    sequence: int
    group: Group
    start_ns: int
    end_ns: int | None
    state: str
    error: str
    peer: int
    tag: int
    details: Mapping[str, Any]

    @property
    def start(self) -> float:
        """Seconds of wall-clock time."""
        return self.start_ns * 1e-9

    @property
    def end(self) -> float | None:
        """Seconds of wall-clock time; None where it has not ended."""
        return None if self.end_ns is None else self.end_ns * 1e-9

    @property
    def collective(self) -> bool:
        """Whether it is no message."""
        return self.sequence > 0

    @property
    def key(self) -> tuple[int, int]:
        """What a collective has in common on all ranks: channel and number."""
        return self.group.channel, self.sequence

    def __str__(self) -> str:
        if self.collective:
            label = f" ({self.details['label']})" if self.details["label"] else ""
            return f"{self.op} #{self.sequence} of {self.group}{label}"
        return f"{self.op} {ends(self.op, self.peer, self.tag)}"


class TracedSpan(NamedTuple):
    """What a training step has done from one moment to another.

    Attributes:
        step: its number, among all that the rank has begun, evaluations too.
        start_ns, end_ns: wall-clock time.
        unit, phase, part: see ``Doing`` of the engine.
    """

    step: int
    start_ns: int
    end_ns: int
    unit: str
    phase: str
    part: str


@dataclass(frozen=True)
class TraceDump:
    """What a rank wrote.

    Attributes:
        rank, world_size: in the whole job.
        started, written: wall-clock seconds at which the rank had joined, and wrote the file.
        complete: nothing had been dropped from the ring.
        failure: what the backend is broken by, or empty.
        returned: the function that the rank ran, if it returned before anything failed; or empty.
        closed: the rank was to begin no operation any more.
        spans: what its last training steps have gone through.
        entered: the last collective begun, by channel.
        groups: by channel.
        operations: in the order of their start.
    """

    rank: int
    world_size: int
    started: float
    written: float
    complete: bool
    failure: str
    entered: Mapping[int, int]
    groups: Mapping[int, Group]
    operations: tuple[TracedOperation, ...]
    returned: str = ""
    closed: bool = False
    spans: tuple[TracedSpan, ...] = ()


def read_directory(directory: Path) -> list[TraceDump]:
    """Read the files of all ranks that have left one, in rank order.

    Raises:
        ArgumentError: there are none, one is not what it should be, or they do not belong together.
    """
    if not directory.is_dir():
        raise ArgumentError(f"{directory} is not a directory")
    dumps = []
    for path in sorted(directory.iterdir()):
        match = _FILE.fullmatch(path.name)
        if match:
            dump = read(path)
            if dump.rank != int(match[1]):
                raise ArgumentError(f"{path}: this is the file of rank {dump.rank}")
            dumps.append(dump)
    if not dumps:
        raise ArgumentError(
            f"{directory} has no rank_*.json; run the job with FSDPCORE_TRACE={directory}"
        )
    sizes = {dump.world_size for dump in dumps}
    if len(sizes) > 1:
        raise ArgumentError(
            f"{directory}: the files are of different jobs, of {_listed(sizes)} ranks; "
            "empty the directory between jobs"
        )
    return sorted(dumps, key=lambda dump: dump.rank)


def _listed(numbers: set[int]) -> str:
    return " and ".join(map(str, sorted(numbers)))


def read(path: Path) -> TraceDump:
    """Read one rank's file.

    Raises:
        ArgumentError: it cannot be read, or no flight recorder wrote it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ArgumentError(f"{path}: not a file of fsdpcore's flight recorder")
    if content.get("version") != VERSION:
        raise ArgumentError(
            f"{path}: written in version {content.get('version')!r} of the format; this "
            f"release reads version {VERSION}"
        )
    try:
        return _dump(content)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"{path}: damaged: {type(error).__name__}: {error}") from error


def _dump(content: Mapping[str, Any]) -> TraceDump:
    groups, entered = {}, {}
    for item in content["groups"]:
        channel = int(item["channel"], 16)
        ranks = tuple(_integer(rank) for rank in item["ranks"])
        groups[channel] = Group(channel, ranks, _integer(item["position"]), str(item["name"]))
        entered[channel] = _integer(item["entered"])
    clock = content["clock"]
    offset = _integer(clock["wall_ns"]) - _integer(clock["monotonic_ns"])
    rank, size = _integer(content["rank"]), _integer(content["world_size"])
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size}")
    if any(not 0 <= member < size for group in groups.values() for member in group.ranks):
        raise ValueError("a group has members that the job has not")
    return TraceDump(
        rank,
        size,
        float(content["started"]),
        float(content["written"]),
        bool(content["complete"]),
        str(content["failure"] or ""),
        entered,
        groups,
        tuple(_operation(item, groups, offset) for item in content["operations"]),
        str(content.get("returned") or ""),
        content.get("closed") is True,
        tuple(_span(item, offset) for item in content.get("spans", ())),
    )


def _span(item: Mapping[str, Any], offset: int) -> TracedSpan:
    start, end = _integer(item["start_ns"]) + offset, _integer(item["end_ns"]) + offset
    return TracedSpan(
        _integer(item["step"]), start, end, *(str(item[key]) for key in ("unit", "phase", "part"))
    )


def _operation(
    item: Mapping[str, Any], groups: Mapping[int, Group], offset: int
) -> TracedOperation:
    if item["state"] not in _STATES:
        raise ValueError(f"unknown state {item['state']!r}")
    end = item["end_ns"]
    return TracedOperation(
        str(item["op"]),
        _integer(item["sequence"]),
        groups[int(item["channel"], 16)],
        _integer(item["start_ns"]) + offset,
        None if end is None else _integer(end) + offset,
        item["state"],
        str(item["error"] or ""),
        _integer(item.get("peer", -1)),
        _integer(item.get("tag", -1)),
        {key: item[key] for key in ("dtype", "shape", "bytes", "algorithm", "label")},
    )


def _integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected an integer, got {value!r}")
    return value
