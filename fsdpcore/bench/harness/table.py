"""Tables of a case: a line for each contestant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from fsdpcore.bench.harness.measurements import OURS, Measurement, compare

M = TypeVar("M", bound=Measurement)
_NAME = "{:<16}"


class Column(NamedTuple):
    """Numbers below a name and a unit.

    Attributes:
        name, unit: above.
        cell: what it says of a contestant, "" for nothing.
        width: at least that of the cells.
    """

    name: str
    unit: str
    cell: Callable[[Any], str]
    width: int = 9


def times() -> list[Column]:
    """The median and the fastest round."""
    return [
        Column("time", "(ms)", lambda row: f"{1e3 * row.seconds:.2f}", 10),
        Column("best", "(ms)", lambda row: f"{1e3 * row.best:.2f}", 10),
    ]


def ratios(rows: Mapping[str, Measurement]) -> list[Column]:
    """The other's time over ours in the same round: median, min and max."""

    def part(index: int) -> Callable[[Measurement], str]:
        return lambda row: beside(rows, row, lambda found: found.ratio[index])

    return [Column(name, "", part(index)) for index, name in enumerate(("ratio", "min", "max"))]


def beside(rows: Mapping[str, Measurement], row: Measurement, value: Callable[[Any], float]) -> str:
    """A number that compares a contestant with ours; empty for ours."""
    return "" if row is rows[OURS] else f"{value(compare(rows[OURS], row)):.3g}"


def wrong() -> list[Column]:
    """How much was wrong."""
    return [Column("wrong", "", lambda row: "N/A" if row.wrong is None else str(row.wrong))]


def lines(rows: Mapping[str, Measurement], columns: Sequence[Column]) -> list[str]:
    """The table of a case, with its header."""

    def line(first: str, cells: Sequence[str]) -> str:
        numbers = (f"{cell:>{column.width}}" for cell, column in zip(cells, columns, strict=True))
        return (_NAME.format(first) + "".join(numbers)).rstrip()

    return [
        "# " + line("contestant", [column.name for column in columns]),
        "# " + line("", [column.unit for column in columns]),
        *(f"  {line(name, [c.cell(row) for c in columns])}" for name, row in rows.items()),
    ]


def heading(machine: Mapping[str, Any], first: str, *more: str) -> list[str]:
    """The lines above all tables."""
    found = [f"# {first}", f"# {machine['cpu']}, {machine['cores']} cores"]
    load, cores = machine["load_average_at_start"], machine["cores"]
    if load > cores / 4:
        found.append(
            f"# NOTE: something else is computing here (load {load}); the numbers will be noisy"
        )
    return [*found, *(f"# {line}" for line in more)]


def microseconds(seconds: float) -> str:
    """A time in µs with at least three digits, and no more than two behind the point."""
    value = seconds * 1e6
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def bandwidth(value: float) -> str:
    """A bandwidth in GB/s: more digits behind the point the smaller it is."""
    digits = 2 if value >= 0.1 or value == 0 else 4 if value >= 0.001 else 5
    return f"{value:.{digits}f}"
