"""A picture of a training step: what each rank did, unit by unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any

from fsdpcore.bench.harness.picture import BLUE, GREEN, GREY, INK, ORANGE, picture, style
from fsdpcore.core import text
from fsdpcore.core.errors import ArgumentError
from fsdpcore.diagnostics.trace_file import TracedSpan, TraceDump

_COLOURS = {"computing": GREEN, "waiting": ORANGE, "moving": BLUE, "optimizer": GREY}
_ALL_UNITS = "all units"
_MOST_NAMES, _MOST_RANKS = 40, 8  # beside the rows of a panel; panels


def save_step(path: str | PathLike[str], dumps: Sequence[TraceDump]) -> None:
    """Draw the last training step that all ranks have finished, of those that finished any.

    There is a panel for each rank, eight at most, with a row for each unit. Time begins where the
    first rank does.

    Args:
        path: of a PNG.
        dumps: of the ranks.

    Raises:
        ArgumentError: there is no such step in what they have written.
        MissingDependencyError: matplotlib is not installed.
    """
    whole = {dump.rank: found for dump in dumps if (found := whole_steps(dump.spans))}
    common = set[int].intersection(*map(set, whole.values())) if whole else set()
    if not common:
        raise ArgumentError(
            "there is no training step of an engine that all ranks have written as a whole, so "
            "there is nothing to draw"
        )
    number = max(common)
    steps = {rank: whole[rank][number] for rank in sorted(whole)[:_MOST_RANKS]}
    begin = min(step[0].start_ns for step in steps.values())
    end = max(step[-1].end_ns for step in steps.values())
    units = _units(steps.values())
    title = f"One step, {text.duration((end - begin) * 1e-9)}"
    if len(whole) > len(steps):
        title += f"; {len(steps)} of {len(whole)} ranks"
    rows = min(max(4, len(units)), _MOST_NAMES)
    with picture(path, title, 11.0, 0.9 + len(steps) * (0.7 + 0.16 * rows)) as figure:
        panels = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (rank, step) in zip(panels, steps.items(), strict=True):
            _draw(axes, step, units, begin)
            axes.set_title(f"rank {rank}", loc="left", fontsize=10, color=INK)
        panels[-1].set_xlabel("ms", color=INK, fontsize=9)
        panels[0].legend(
            frameon=False, labelcolor=INK, fontsize=9, ncols=4, loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
        )  # fmt: skip


def whole_steps(spans: Sequence[TracedSpan]) -> dict[int, list[TracedSpan]]:
    """Return the spans of all steps that came to their update, by their numbers."""
    steps: dict[int, list[TracedSpan]] = {}
    for span in spans:
        if span.phase:  # not before the first pass, nor after the update
            steps.setdefault(span.step, []).append(span)
    return {number: step for number, step in steps.items() if step[-1].phase == "update"}


def _units(steps: Iterable[Sequence[TracedSpan]]) -> list[str]:
    """All units in the order of their first pass, then what concerns all of them."""
    names = dict.fromkeys(span.unit for step in steps for span in step)
    return [*(name for name in names if name), *([""] if "" in names else [])]


def _draw(axes: Any, step: Sequence[TracedSpan], units: Sequence[str], begin: int) -> None:
    style(axes)
    rows = {unit: row for row, unit in enumerate(units)}
    for part, colour in _COLOURS.items():
        spans = [span for span in step if span.part == part]
        axes.barh(
            [rows[span.unit] for span in spans],
            [(span.end_ns - span.start_ns) * 1e-6 for span in spans],
            left=[(span.start_ns - begin) * 1e-6 for span in spans],
            height=0.9,
            color=colour,
            label=part,
        )
    shown = range(0, len(units), 1 + len(units) // _MOST_NAMES)
    axes.set_yticks(list(shown), [units[row] or _ALL_UNITS for row in shown], fontsize=7)
    axes.set_ylim(len(units) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
