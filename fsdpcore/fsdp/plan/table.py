"""Plans, estimates and reports as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdpcore.fsdp.plan.plan import Plan

_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_COUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def size(nbytes: float) -> str:
    """Return a number of bytes in words, in powers of 1000."""
    return _scaled(nbytes, _SIZES) or f"{nbytes:g} B"


def count(number: float) -> str:
    """Return a large number in words."""
    return (_scaled(number, _COUNTS) or f"{number:g}").replace(" ", "")


def _scaled(number: float, units: Sequence[tuple[float, str]]) -> str:
    for factor, name in units:
        if abs(number) >= factor:
            digits = 4 if abs(number) >= 999.5 * factor else 3
            return f"{number / factor:#.{digits}g}".rstrip(".") + f" {name}"
    return ""


def duration(seconds: float | None) -> str:
    """Return seconds in words; nothing for None."""
    if seconds is None:
        return ""
    for factor, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Return a table; the first ``left`` columns are aligned to the left, others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    used = [n for n in range(len(header)) if any(line[n] for line in lines[1:])]
    widths = {n: max(len(line[n]) for line in lines) for n in used}
    return "\n".join(
        "  ".join(
            line[n].ljust(widths[n]) if n < left else line[n].rjust(widths[n]) for n in used
        ).rstrip()
        for line in lines
    )


def placed(plan: Plan) -> str:
    """Say in one line what a plan is for."""
    place, elements = plan.placement, sum(unit.elements for unit in plan.units)
    shape = f"{place.shards} shards" if place.shards > 1 else "nothing sharded"
    if place.replicas > 1:
        shape += f", {place.replicas} replicas"
    if place.regather != place.shards:
        shape += f", {place.regather} gather again"
    if plan.tensor > 1:
        shape += f", parameters cut over {plan.tensor}"
    return (
        f"{plan.strategy.name}, rank {plan.rank} of {plan.world_size} ({shape}): "
        f"{len(plan.units)} units, {count(elements)} parameters"
    )


def memory(plan: Plan) -> str:
    """Return the memory of one rank as a table."""
    rows = [
        ("parameters", plan.persistent.parameters),
        ("gradients", plan.persistent.gradients),
        ("optimizer", plan.persistent.optimizer),
        ("gathered, at the peak", plan.peak_live.parameters),
        ("full gradients, at the peak", plan.peak_live.gradients),
        ("peak", plan.peak_bytes),
    ]
    if plan.pinned:
        rows.append(("of which on the host", plan.pinned))
    return columns(("memory", "bytes"), [(name, size(nbytes)) for name, nbytes in rows])


def communication(plan: Plan) -> str:
    """Return what a rank sends in a step as a table, one line for equal operations."""
    found: dict[tuple[str, ...], tuple[int, int, float]] = {}
    for operation in plan.operations:
        key = operation.phase, operation.kind, str(operation.group_size)
        number, sent, taken = found.get(key, (0, 0, 0.0))
        found[key] = number + 1, sent + operation.bytes_sent, taken + (operation.seconds or 0.0)
    timed = plan.seconds is not None
    rows = [
        (*key, str(number), size(sent), duration(taken) if timed else "")
        for key, (number, sent, taken) in found.items()
    ]
    total = str(len(plan.operations)), size(plan.bytes_sent), duration(plan.seconds)
    header = ("communication", "operation", "ranks", "number", "sent", "time")
    return columns(header, [*rows, ("total", "", "", *total)], left=2)


def summary(plan: Plan) -> str:
    """Return a plan in short."""
    parts = [placed(plan), memory(plan), communication(plan)]
    words = [f"{size(plan.padding_bytes)} of what is sent is padding"] if plan.padding_bytes else []
    if plan.step_seconds is not None:
        words.append(
            f"a step takes {duration(plan.step_seconds)}, of which "
            f"{duration(plan.exposed_seconds)} is waiting for communication"
        )
    return "\n\n".join([*parts, *words])


def operations(plan: Plan) -> str:
    """Return all operations of a plan, one a line."""
    several = plan.microbatches > 1
    rows = [
        (
            str(operation.microbatch) if several else "",
            operation.phase,
            operation.unit,
            operation.kind,
            "background" if operation.background else "",
            str(operation.group_size),
            size(operation.nbytes),
            size(operation.padding) if operation.padding else "",
            size(operation.bytes_sent),
            size(operation.live_bytes),
            duration(operation.seconds),
        )
        for operation in plan.operations
    ]
    header = ("pass", "phase", "unit", "operation", "", "ranks", "bytes", "padding", "sent", "live")
    return columns((*header, "time"), rows, left=5)
