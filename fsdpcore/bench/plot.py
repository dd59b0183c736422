"""A picture of the bus bandwidth over the size."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

import numpy as np

from fsdpcore.bench.contestants import OURS
from fsdpcore.bench.results import Row
from fsdpcore.core.errors import MissingDependencyError

# On white whatever the page's theme; the colours differ in brightness too, and so do the markers.
INK, MUTED, GRID = "#1f2430", "#69707d", "#e6e8ec"
_LINES = {OURS: ("#2454c6", "o"), "gloo": ("#e07b00", "s"), "mpi": ("#11866f", "^")}
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def check_installed() -> None:
    """Check that pictures can be drawn.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(
            '--plot needs matplotlib; install it with: pip install "fsdpcore[bench]"'
        )


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


@contextmanager
def picture(path: str | PathLike[str], title: str, width: float, height: float) -> Iterator[Any]:
    """Give a figure to draw in, and write it to a PNG at the end.

    Args:
        path: of the PNG.
        title: of the picture.
        width, height: in inches, of 110 pixels.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    check_installed()
    # Without pyplot, which would choose a display and keep global state.
    figures: Any = importlib.import_module("matplotlib.figure")
    agg: Any = importlib.import_module("matplotlib.backends.backend_agg")
    figure = figures.Figure((width, height), dpi=110, facecolor="white", layout="constrained")
    canvas = agg.FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    yield figure
    canvas.draw()
    # A few flat colours: a palette makes the file several times smaller.
    image: Any = importlib.import_module("PIL.Image")  # comes with matplotlib
    pixels = image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    pixels.quantize(64, dither=0).save(path, format="png", optimize=True)


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


def style(axes: Any) -> None:
    """Draw axes as all pictures of the bench have them."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelcolor=INK, labelsize=8, length=3)


def _size_name(size: int) -> str:
    scale, unit = next((scale, unit) for scale, unit in _UNITS if size >= scale)
    return f"{size / scale:.3g} {unit}"
