"""A picture of the bus bandwidth over the size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from fsdpcore.bench.harness.measurements import OURS
from fsdpcore.bench.harness.picture import BLUE, GREEN, INK, ORANGE, picture, style
from fsdpcore.bench.rows import Row

_LINES = {OURS: (BLUE, "o"), "gloo": (ORANGE, "s"), "mpi": (GREEN, "^")}
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def save_png(
    path: str | PathLike[str],
    results: Sequence[Mapping[str, Row]],
    labels: Mapping[str, str],
    title: str,
) -> None:
    """Draw one panel per operation, with a line per contestant.

    Args:
        path: of a PNG.
        results: for each case, the rows by contestant; out of place, or in place where an
            operation was measured in no other way.
        labels: what to call each contestant.
        title: of the picture.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    operations = list(dict.fromkeys(_any(rows).case.operation for rows in results))
    columns = min(2, len(operations))
    lines = math.ceil(len(operations) / columns)
    with picture(path, title, 7.5 if columns == 1 else 11.0, 0.9 + 3.6 * lines) as figure:
        for index, operation in enumerate(operations):
            axes = figure.add_subplot(lines, columns, index + 1)
            _draw(axes, operation, _shown(results, operation), labels)


def _any(rows: Mapping[str, Row]) -> Row:
    return next(iter(rows.values()))


def _shown(results: Sequence[Mapping[str, Row]], operation: str) -> list[Mapping[str, Row]]:
    mine = [rows for rows in results if _any(rows).case.operation == operation]
    out = [rows for rows in mine if not _any(rows).case.in_place]
    return out or mine


def _draw(
    axes: Any, operation: str, results: Sequence[Mapping[str, Row]], labels: Mapping[str, str]
) -> None:
    style(axes)
    for name, label in labels.items():
        rows = [rows[name] for rows in results if name in rows]
        # A single rank moves nothing: its bus bandwidth is 0, which has no logarithm.
        points = [(row.case.size, row.busbw) for row in rows if row.busbw > 0]
        if points:
            colour, marker = _LINES[name]
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, color=colour, marker=marker, markersize=4, linewidth=1.8, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({_any(rows).case.size for rows in results})
    ticks = sizes[:: max(1, math.ceil(len(sizes) / 7))]
    axes.set_xticks(ticks, [_size_name(size) for size in ticks])
    axes.minorticks_off()
    place = "in place" if _any(results[0]).case.in_place else "out of place"
    axes.set_title(f"{operation}, {place}", loc="left", fontsize=10, color=INK)
    axes.set_xlabel("size", color=INK, fontsize=9)
    axes.set_ylabel("bus bandwidth (GB/s)", color=INK, fontsize=9)
    if axes.lines:
        axes.legend(frameon=False, labelcolor=INK, fontsize=9)


def _size_name(size: int) -> str:
    scale, unit = next((scale, unit) for scale, unit in _UNITS if size >= scale)
    return f"{size / scale:.3g} {unit}"
