"""Pictures of all benches: a PNG, its axes and colours."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import numpy as np

from fsdpcore.core.errors import MissingDependencyError

# On white whatever the page's theme; the colours differ in brightness too, and so do the markers.
INK, MUTED, GRID = "#1f2430", "#69707d", "#e6e8ec"
BLUE, ORANGE, GREEN, GREY = "#2454c6", "#e07b00", "#11866f", "#9aa1ad"


def check_installed() -> None:
    """Check that pictures can be drawn.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(
            '--plot needs matplotlib; install it with: pip install "fsdpcore[bench]"'
        )


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


def style(axes: Any) -> None:
    """Draw axes as all pictures of the bench have them."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelcolor=INK, labelsize=8, length=3)
