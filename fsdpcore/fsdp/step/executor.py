"""What a step has done with units in its passes: gathered, freed, reduced, some of it ahead."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fsdpcore.fsdp.offload.offload import GATHERED
from fsdpcore.fsdp.sharding.placement import Placement
from fsdpcore.fsdp.step.schedule import Phase, Prefetch, UnitOrder
from fsdpcore.fsdp.step.stats import StepStats
from fsdpcore.fsdp.units.unit import ParamState, Unit

if TYPE_CHECKING:
    from fsdpcore.fsdp.step.step import Step


class StepExecutor:
    """The units of an engine in the order in which steps go through them.

    Args:
        units: in the order of the forward pass.
        placement: of the units.
        ahead: what goes on in the background.
        overlaps: gradients are reduced there.

    Attributes:
        step: the one that is open.
        stats: of that step, or the last one.
    """

    def __init__(
        self, units: Sequence[Unit], placement: Placement, ahead: Prefetch, *, overlaps: bool
    ) -> None:
        self.step: Step | None = None
        self.stats = StepStats()
        self._units = units
        self._number = {unit.name: number for number, unit in enumerate(units)}
        self._placement = placement
        self._prefetch = ahead
        self._overlaps = overlaps
        self._order = UnitOrder(len(units))
        self._ahead: list[Unit] = []
        self._reducing: Unit | None = None

    @property
    def events(self) -> list[tuple[Phase, int]]:
        """What the step has gone through: phases, and numbers of units."""
        return self._order.events

    def begin(self, step: Step) -> None:
        """Begin a step."""
        self.step = step
        self._order.begin()
        self.stats = StepStats(began=time.perf_counter())

    def updated(self) -> None:
        """Take note that the step has come to its update."""
        self._order.end()

    def end(self) -> None:
        """End a step: reshard all units and drop the gradients."""
        self.step = self._reducing = None
        self._ahead.clear()
        for unit in self._units:
            unit.in_use = False
            unit.reshard()
            unit.drop_gradients()
        self.stats.seconds = time.perf_counter() - self.stats.began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in this block as exposed communication."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.stats.waited += time.perf_counter() - began

    # Parameters.

    def gather(self, unit: Unit, phase: Phase) -> None:
        """Have ``unit`` and the owners of its ties gathered, and begin with what comes next."""
        upcoming = self._order.enter(phase, self._number[unit.name])
        following = [self._units[number] for number in upcoming[: self._prefetch.units]]
        members = _members(unit)
        for ahead in self._ahead:
            if ahead not in members and ahead not in following:
                self.free(ahead)  # the guess was wrong
        with self.waiting():
            for member in members:
                self._count(member)
                member.unshard()
        self._ahead = [each for each in following if each.has_pending_prefetch]
        self._fetch(following)
        last = len(following) + unit.store.depth
        for number in upcoming[len(following) : last] if unit.store.depth else ():
            if self._units[number].state is ParamState.SHARDED:
                self._units[number].store.ahead(GATHERED)

    def record(self, unit: Unit, phase: Phase) -> None:
        """Take note of a pass of a unit for which nothing has to be gathered."""
        self._order.enter(phase, self._number[unit.name])

    def _fetch(self, following: list[Unit]) -> None:
        limit = self._prefetch.max_bytes
        nbytes = sum(unit.gathered_bytes for unit in self._ahead)
        for unit in following:
            if unit.state is not ParamState.SHARDED or not unit.fetched:
                continue
            nbytes += unit.gathered_bytes
            if self._ahead and limit is not None and nbytes > limit:
                return
            self._count(unit)
            unit.unshard(async_op=True)
            self._ahead.append(unit)

    def _count(self, unit: Unit) -> None:
        """Take note that a unit is about to be gathered, if it is not already."""
        if unit.state is ParamState.SHARDED:
            self.stats.gathers += unit.stale
            self.stats.bytes_sent += unit.sends

    def release(self, unit: Unit) -> None:
        """End the use of ``unit`` in a pass; what happens to its parameters, the strategy says."""
        for member in _members(unit):
            self.free(member)

    def free(self, unit: Unit) -> None:
        """Free one unit, unless the strategy keeps it for a backward pass to come."""
        again = self.step is not None and self.step.awaits_backward(unit)
        if not (again and self._placement.keeps_for_backward):
            unit.reshard(again=again)

    # Gradients.

    def reduce(self, unit: Unit, divisor: float | None) -> None:
        """Reduce the gradients that a backward pass has written, in the background if so chosen."""
        self.finish_reduction()
        if unit.trainable:
            self.stats.reductions += 1
            self.stats.bytes_sent += unit.gradients.sends
        with self.waiting():
            unit.reduce_gradients(divisor=divisor, async_op=self._overlaps)
        self._reducing = unit

    def finish_reductions(self, divisor: float | None) -> None:
        """Have all gradients reduced, those too that ties have left with their owners."""
        for unit in self._units:
            if unit.gradients.unclaimed:  # and the unit had no backward pass of its own
                unit.begin_gradients()
                self.reduce(unit, divisor)
        self.finish_reduction()

    def finish_reduction(self) -> None:
        """Wait for the reduction that goes on in the background."""
        reducing, self._reducing = self._reducing, None
        if reducing is not None:
            with self.waiting():
                reducing.gradients.wait()


def _members(unit: Unit) -> list[Unit]:
    """The unit, and the owners of its ties."""
    return list(dict.fromkeys([unit, *unit.owners.values()]))
