"""Draw the loss of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.core.errors import ArgumentError, MissingDependencyError

_UNIFORM_GUESS = 8.0  # bits per byte of a model that gives every byte the same probability

_INK = "#1f2430"
_MUTED = "#8b92a1"
_TRAIN = "#3b6fd4"
_VALIDATION = "#e4572e"


def save_png(
    path: str | PathLike[str],
    train_losses: Sequence[float],
    validation_points: Sequence[tuple[int, float]],
    title: str,
) -> None:
    """Write the loss curve of a run to ``path`` as a PNG of 1600 x 900 pixels.

    All losses are in bits per byte. ``train_losses[i]`` is that of step i + 1;
    ``validation_points`` are pairs of a step and a loss and may be empty.

    Raises:
        ArgumentError: there is no training loss.
        MissingDependencyError: matplotlib is not installed.
    """
    if len(train_losses) == 0:
        raise ArgumentError("there is no training loss to draw; run at least one step")
    try:
        # The figure is made without pyplot, which would choose a display and keep global state.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            'the loss curve needs matplotlib: pip install "fsdpcore[examples]"'
        ) from error

    figure = Figure(figsize=(10.0, 5.625), dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _style(axes)
    _draw_uniform_guess(axes, len(train_losses))
    _draw_training(axes, np.asarray(train_losses, np.float64))
    if validation_points:
        _draw_validation(axes, validation_points)

    lowest = min([*train_losses, *(loss for _, loss in validation_points)])
    # A first step that is far off runs out of the picture rather than flattening the rest.
    highest = min(max(_UNIFORM_GUESS, *train_losses), _UNIFORM_GUESS + 1.2)
    axes.set_ylim(max(0.0, lowest - 0.4), highest + 0.4)
    axes.set_xlim(-0.01 * len(train_losses), 1.07 * len(train_losses))
    axes.set_title(title, loc="left", pad=14, fontsize=14, fontweight="bold", color=_INK)
    axes.set_xlabel("training step", color=_INK)
    axes.set_ylabel("loss (bits per byte)", color=_INK)
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, 0.72), frameon=False, labelcolor=_INK)
    figure.savefig(path, format="png")


def _style(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_MUTED)
    axes.grid(axis="y", color="#e9ebf0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, labelcolor=_INK, length=3)


def _draw_uniform_guess(axes: Any, steps: int) -> None:
    axes.axhline(_UNIFORM_GUESS, color=_MUTED, linewidth=1.0, linestyle=(0, (5, 4)))
    axes.annotate(
        "a uniform guess: 8 bits",
        (steps * 1.065, _UNIFORM_GUESS),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        color=_MUTED,
    )


def _draw_training(axes: Any, losses: NDArray[np.float64]) -> None:
    steps = np.arange(1, len(losses) + 1)
    axes.plot(steps, losses, color=_TRAIN, alpha=0.22, linewidth=0.8)
    axes.plot(steps, _smoothed(losses), color=_TRAIN, linewidth=2.0, label="training")


def _draw_validation(axes: Any, points: Sequence[tuple[int, float]]) -> None:
    steps, losses = zip(*points, strict=True)
    axes.plot(
        steps,
        losses,
        "o",
        color=_VALIDATION,
        markersize=6,
        markeredgecolor="white",
        markeredgewidth=1.0,
        label="validation",
        zorder=3,
    )
    axes.annotate(
        f"{losses[-1]:.2f}",
        (steps[-1], losses[-1]),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        fontsize=11,
        fontweight="bold",
        color=_VALIDATION,
    )


def _smoothed(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over a centred window of a twentieth of the run, cut off at both ends alike.

    Unlike a running average it does not lag behind the steep start. The window shrinks towards the
    ends and stays centred, so the line meets the first and the last loss.
    """
    count = len(losses)
    index = np.arange(count)
    half = np.minimum(max(1, count // 40), np.minimum(index, count - 1 - index))
    sums = np.concatenate(([0.0], np.cumsum(losses)))
    means: NDArray[np.float64] = (sums[index + half + 1] - sums[index - half]) / (2 * half + 1)
    return means
