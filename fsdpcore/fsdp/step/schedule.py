"""In which order a step goes through the units, and what is gathered ahead of its use.

Pure: numbers of units, no communication. The order is the declared one at first; what the first
step did in a pass is the order of that pass from then on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import ArgumentError

Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class Prefetch:
    """What goes on in the background while a unit is in use; the same on all ranks.

    Args:
        units: so many of those that come next are gathered ahead of their use; 0 for none.
        max_bytes: no more than so many bytes are gathered ahead, but for a unit that is larger
            alone; None for no limit.
        reductions: 1 lets the gradients of a unit be reduced while the backward pass goes on with
            the next; with 0 it waits for them. By default 1 where ranks are on several hosts, or on
            GPUs: ranks of one host do the copying themselves, and it takes no less time in the
            background.

    Raises:
        ArgumentError: a number that makes no sense.
    """

    units: int = 1
    max_bytes: int | None = None
    reductions: int | None = None

    def __post_init__(self) -> None:
        as_int(self.units, "prefetch (in units)", minimum=0)
        if self.max_bytes is not None:
            as_int(self.max_bytes, "max_bytes of Prefetch", minimum=1)
        if self.reductions not in (None, 0, 1):
            raise ArgumentError(
                f"reductions of Prefetch must be 0, 1 or None, got {self.reductions!r}"
            )

    @classmethod
    def of(cls, given: Prefetch | int) -> Prefetch:
        """Return a policy for a number of units; with 0, nothing goes on in the background."""
        if isinstance(given, Prefetch):
            return given
        units = as_int(given, "prefetch (in units)", minimum=0)
        return cls(units, reductions=None if units else 0)

    def overlaps(self, hosts: Sequence[int], *, on_host: bool) -> bool:
        """Whether gradients are reduced in the background.

        Args:
            hosts: of the ranks.
            on_host: they compute there, not on GPUs.
        """
        if self.reductions is None:
            return len(hosts if not on_host else set(hosts)) > 1
        return self.reductions == 1 and len(hosts) > 1


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

    def enter(self, phase: Phase, number: int) -> Sequence[int]:
        """Take note that a unit is used now; return the units that come next in this pass."""
        if not self.events or self.events[-1][0] != phase:
            self._place = -1
        self.events.append((phase, number))
        order = self._orders[phase]
        # From where the pass has come to, so that a unit may occur in it several times.
        following = range(self._place + 1, len(order))
        found = next((place for place in following if order[place] == number), None)
        if found is None:
            found = next((place for place, unit in enumerate(order) if unit == number), None)
        if found is None:
            return ()
        self._place = found
        return order[found + 1 :]

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
