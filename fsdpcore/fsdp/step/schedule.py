"""In which order a step goes through the units, and what is gathered ahead of its use.

Pure: numbers of units, no communication. The order is the declared one at first; what the first
step did in a pass is the order of that pass from then on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, ...] = ("forward", "backward")


class UnitOrder:
    """The order of one engine's units.

    Attributes:
        events: what the current step has gone through so far: phase and number of the unit.
    """

    def __init__(self, count: int) -> None:
        self.events: list[tuple[Phase, int]] = []
        self._orders: dict[Phase, Sequence[int]] = {
            "forward": range(count),
            "backward": range(count - 1, -1, -1),
        }
        self._recorded = False
        self._place = -1

    def begin(self) -> None:
        """Begin a step."""
        self.events = []
        self._place = -1

    def enter(self, phase: Phase, number: int, limit: int | None = None) -> Sequence[int]:
        """Take note that a unit is used now; return the units that come next in this pass.

        Args:
            phase, number: which pass, of which unit.
            limit: how many are returned at most; None for all.
        """
        limit = len(self._orders[phase]) if limit is None else limit
        if not self.events or self.events[-1][0] != phase:
            self._place = -1
        self.events.append((phase, number))
        order = self._orders[phase]
        place = self._place + 1
        if place < len(order) and order[place] == number:  # as nearly always
            self._place = place
            return order[place + 1 : place + 1 + limit]
        # From where the pass has come to, so that a unit may occur in it several times.
        following = range(self._place + 1, len(order))
        found = next((place for place in following if order[place] == number), None)
        if found is None:
            found = next((place for place, unit in enumerate(order) if unit == number), None)
        if found is None:
            return ()
        self._place = found
        return order[found + 1 : found + 1 + limit]

    def end(self) -> None:
        """End a step in which the units were updated; the first one is the example for all."""
        if self._recorded:
            return
        self._recorded = True
        for phase in self._orders:
            order = self._first_pass(phase)
            if order:
                self._orders[phase] = order

    def _first_pass(self, wanted: Phase) -> tuple[int, ...]:
        """What the first pass of a phase went through, until the other phase began.

        A forward pass of units that wait for their backward pass is a recomputation, and part of
        the backward pass that it is made for.
        """
        order: list[int] = []
        waiting: Counter[int] = Counter()
        backward = False
        for phase, number in self.events:
            again = backward and phase == "forward" and waiting[number] > 0
            if phase == wanted and not again:
                order.append(number)
            elif order and not again:
                break
            if not again:
                backward = phase == "backward"
                waiting[number] += -1 if backward else 1
        return tuple(order)
