"""One timeline of all ranks, from what their flight recorders wrote.

The format is the JSON of Chrome's trace viewer, which Perfetto reads too: a process for each rank,
in it a row for the passes of units, what each pass consists of below it, a row for each group's
collectives, and as many for messages as there are at the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fsdpcore.diagnostics.status import WORLD_CHANNEL
from fsdpcore.diagnostics.trace_file import TracedOperation, TracedSpan, TraceDump

# Rows for messages come after those of any number of groups.
_MESSAGE_ROWS = 1_000_000
_UNIT_ROW = 2_000_000  # shown above all others


def timeline(dumps: Sequence[TraceDump]) -> dict[str, Any]:
    """Merge the files of the ranks into one timeline, in microseconds from the first operation."""
    starts = [operation.start_ns for dump in dumps for operation in dump.operations]
    starts += [span.start_ns for dump in dumps for span in dump.spans]
    origin = min(starts, default=0)
    rows = _rows_of_groups(dumps)
    events: list[dict[str, Any]] = []
    for dump in dumps:
        events += _names(dump, rows)
        events += _passes(dump, origin)
        collectives = [op for op in dump.operations if op.collective]
        for op in collectives:
            events.append(_event(dump, op, rows[op.group.channel], origin))
        for op, lane in _lanes(dump, [op for op in dump.operations if not op.collective]):
            events.append(_event(dump, op, _MESSAGE_ROWS + lane, origin))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"origin_ns": origin, "world_size": dumps[0].world_size},
    }


def _rows_of_groups(dumps: Iterable[TraceDump]) -> dict[int, int]:
    """Number the groups, equally on all ranks: the world first, then by their members."""
    groups = {channel: group for dump in dumps for channel, group in dump.groups.items()}
    order = sorted(groups.values(), key=lambda g: (g.channel != WORLD_CHANNEL, g.ranks, g))
    return {group.channel: row for row, group in enumerate(order)}


def _names(dump: TraceDump, rows: dict[int, int]) -> list[dict[str, Any]]:
    def name(kind: str, row: int, **args: object) -> dict[str, Any]:
        return {"ph": "M", "pid": dump.rank, "tid": row, "name": kind, "args": args}

    events = [
        name("process_name", 0, name=f"rank {dump.rank}"),
        name("process_sort_index", 0, sort_index=dump.rank),
    ]
    for channel, group in dump.groups.items():
        row = rows[channel]
        events.append(name("thread_name", row, name=str(group)))
        events.append(name("thread_sort_index", row, sort_index=row))
    if dump.spans:
        events.append(name("thread_name", _UNIT_ROW, name="units"))
        events.append(name("thread_sort_index", _UNIT_ROW, sort_index=-1))
    lanes = {lane for _, lane in _lanes(dump, [o for o in dump.operations if not o.collective])}
    for lane in sorted(lanes):
        row = _MESSAGE_ROWS + lane
        events.append(name("thread_name", row, name="messages" + (f" ({lane + 1})" * (lane > 0))))
        events.append(name("thread_sort_index", row, sort_index=row))
    return events


def _lanes(
    dump: TraceDump, operations: Sequence[TracedOperation]
) -> list[tuple[TracedOperation, int]]:
    """Spread operations over rows on which none overlaps another."""
    ends: list[int] = []
    placed = []
    for op in operations:
        lane = next((i for i, end in enumerate(ends) if end <= op.start_ns), len(ends))
        if lane == len(ends):
            ends.append(0)
        ends[lane] = _end(dump, op)
        placed.append((op, lane))
    return placed


def _end(dump: TraceDump, op: TracedOperation) -> int:
    """When an operation ended or, if it has not, the time up to which that is known."""
    return op.end_ns if op.end_ns is not None else max(op.start_ns, int(dump.written * 1e9))


def _event(dump: TraceDump, op: TracedOperation, row: int, origin: int) -> dict[str, Any]:
    args: dict[str, Any] = {"group": str(op.group), "state": op.state, **op.details}
    if op.collective:
        args["sequence"] = op.sequence
    else:
        args |= {"peer": op.peer, "tag": op.tag}
    if op.error:
        args["error"] = op.error
    other = "any rank" if op.peer < 0 else f"rank {op.peer}"
    name = f"{op.op} #{op.sequence}" if op.collective else f"{op.op} {other}"
    if op.state != "done":
        name += f" ({op.state if op.end_ns is not None else 'not ended'})"
    return {
        "ph": "X",
        "name": name,
        "cat": "collective" if op.collective else "message",
        "pid": dump.rank,
        "tid": row,
        "ts": (op.start_ns - origin) / 1000,
        "dur": (_end(dump, op) - op.start_ns) / 1000,
        "args": args,
    }


def _passes(dump: TraceDump, origin: int) -> Iterator[dict[str, Any]]:
    """The passes of units, and in each of them its parts."""

    def event(name: str, cat: str, start: int, end: int, **args: object) -> dict[str, Any]:
        times = {"ts": (start - origin) / 1000, "dur": (end - start) / 1000}
        row = {"pid": dump.rank, "tid": _UNIT_ROW}
        return {"ph": "X", "name": name, "cat": cat, **row, **times, "args": args}

    for (unit, phase), group in itertools.groupby(dump.spans, lambda s: (s.unit, s.phase)):
        spans = list(group)
        for run in _unbroken(spans):
            name = f"{phase or 'step'} {unit}".strip()
            yield event(name, "pass", run[0].start_ns, run[-1].end_ns, unit=unit, phase=phase)
            for span in run:
                yield event(span.part, "part", span.start_ns, span.end_ns)


def _unbroken(spans: Sequence[TracedSpan]) -> list[list[TracedSpan]]:
    """Split where the rank did something else in between."""
    runs: list[list[TracedSpan]] = []
    for span in spans:
        if runs and runs[-1][-1].end_ns == span.start_ns:
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs
