"""``StepTimes``: where the time of a step went, by unit and pass.

A rank does one thing after the other. At every change it notes the moment and what it does from
then on, so all parts together are the step, whatever takes long in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from fsdpcore.core import text

Part = Literal["computing", "waiting", "moving", "optimizer"]
PARTS: tuple[Part, ...] = ("computing", "waiting", "moving", "optimizer")

# So that an evaluation that goes through a whole dataset does not keep all of it.
_MOST_MARKS = 20_000
_SHOWN = 12


class Doing(NamedTuple):
    """What a rank does.

    Attributes:
        unit: whose pass or update it is; empty for what concerns no unit or all of them.
        phase: "forward", "backward", "whole" or "update"; empty outside of them.
        part: "computing" is the caller's own code, "waiting" is for communication, "moving" is what
            the engine does around it, "optimizer" also finds norms and clips.
    """

    unit: str
    phase: str
    part: Part


class TimeRow(NamedTuple):
    """Seconds of a unit in a phase, by part."""

    unit: str
    phase: str
    computing: float
    waiting: float
    moving: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.computing + self.waiting + self.moving + self.optimizer


OUTSIDE = Doing("", "", "computing")
AROUND = Doing("", "", "moving")
WHOLE = Doing("", "whole", "computing")
NORM = Doing("", "update", "optimizer")
AGREEING = Doing("", "update", "waiting")


class StepTimes:
    """Seconds of one step on one rank; what a GPU does meanwhile is not in them.

    Args:
        nanoseconds: the clock.

    Attributes:
        marks: as ``Marks`` of the flight recorder, which gets them; the last one ends the step.
        mark: takes note of what the rank does from now on.
    """

    def __init__(self, nanoseconds: Callable[[], int]) -> None:
        self.marks: list[Any] = []
        self.mark = _marker(self.marks, nanoseconds)
        self._before: dict[Doing, int] = {}  # of marks that are not kept
        self._dropped = 0  # nanoseconds of these

    def __getstate__(self) -> tuple[list[Any], dict[Doing, int], int]:
        return self.marks, self._before, self._dropped

    def __setstate__(self, state: tuple[list[Any], dict[Doing, int], int]) -> None:
        self.marks, self._before, self._dropped = state
        self.mark = _marker(self.marks, time.monotonic_ns)

    def shorten(self) -> None:
        """Keep sums only, if there are very many marks."""
        if len(self.marks) > 2 * _MOST_MARKS:
            self._before = self._sums()
            self._dropped += self.marks[-2] - self.marks[0]
            del self.marks[:-2]

    def _sums(self) -> dict[Doing, int]:
        sums = dict(self._before)
        for start, end, doing in self:
            sums[doing] = sums.get(doing, 0) + end - start
        return sums

    def by_part(self) -> dict[Part, float]:
        """Return the seconds of each part, over all units and phases."""
        sums: dict[Part, int] = dict.fromkeys(PARTS, 0)
        for doing, taken in self._sums().items():
            sums[doing.part] += taken
        return {part: taken * 1e-9 for part, taken in sums.items()}

    @property
    def seconds(self) -> float:
        """From the first mark to the last."""
        kept = self.marks[-2] - self.marks[0] if self.marks else 0
        return (self._dropped + kept) * 1e-9

    @property
    def rows(self) -> tuple[TimeRow, ...]:
        """By unit and phase, in the order in which they were first come to."""
        found: dict[tuple[str, str], dict[str, float]] = {}
        for doing, taken in self._sums().items():
            parts = found.setdefault((doing.unit, doing.phase), dict.fromkeys(PARTS, 0.0))
            parts[doing.part] += taken * 1e-9
        return tuple(TimeRow(*key, *parts.values()) for key, parts in found.items())

    def __iter__(self) -> Iterator[tuple[int, int, Doing]]:
        """What was done one after the other: begin and end by the clock, and what."""
        kept = list(self.marks)
        for (start, end), doing in zip(pairwise(kept[::2]), kept[1::2], strict=False):
            yield start, end, doing

    def __str__(self) -> str:
        rows = sorted(self.rows, key=lambda row: -row.seconds)
        shown = [_words(row.unit or "all units", row.phase or "outside", row) for row in rows]
        if more := rows[_SHOWN:]:
            rest = _sum(more)
            shown[_SHOWN:] = [_words(f"{len(more)} more", "", rest)]
        shown.append(_words("the step", "", _sum(rows)))
        return text.columns(("unit", "pass", *PARTS, "together"), shown)


def _marker(marks: list[Any], now: Callable[[], int]) -> Callable[[Doing], None]:
    extend = marks.extend  # looked up once: this is called a dozen times for each unit

    def mark(doing: Doing) -> None:
        extend((now(), doing))

    return mark


def _sum(rows: Sequence[TimeRow]) -> TimeRow:
    return TimeRow("", "", *(sum(getattr(row, part) for row in rows) for part in PARTS))


def _words(unit: str, phase: str, row: TimeRow) -> tuple[str, ...]:
    seconds = [getattr(row, part) for part in PARTS]
    told = [text.duration(each) if each else "-" for each in seconds]
    return unit, phase, *told, text.duration(row.seconds)
