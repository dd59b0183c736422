"""What a step has done with units in its passes: gathered, freed, reduced, some of it ahead."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from fsdpcore.core.errors import StateError
from fsdpcore.fsdp.model import ShardedModel
from fsdpcore.fsdp.offload.offload import GATHERED
from fsdpcore.fsdp.offload.offload_store import OffloadFile
from fsdpcore.fsdp.step.schedule import Phase, UnitOrder
from fsdpcore.fsdp.step.stats import StepStats
from fsdpcore.fsdp.units.buffer_pool import BufferPool
from fsdpcore.fsdp.units.sharded_unit import ParamState, ShardedUnit


class StepExecutor:
    """The units of an engine in the order in which steps go through them.

    Args:
        model: has the units.
        pool: of their buffers.
        file: where they are offloaded to; None in memory.
        keeps_params: see ``Step.keeps_params``.

    Attributes:
        stats: of the step that is open, or the last one.
    """

    def __init__(
        self,
        model: ShardedModel,
        pool: BufferPool,
        file: OffloadFile | None,
        *,
        keeps_params: bool,
    ) -> None:
        backend, ahead = model.groups.whole, model.options.prefetch
        self.model = model
        self.keeps_params = keeps_params
        self.stats = StepStats()
        self._units = model.units
        self._number = {unit.name: number for number, unit in enumerate(model.units)}
        self._placement = model.groups.placement
        self._pool = pool
        self._file = file
        self._prefetch = ahead
        self._overlaps = ahead.overlaps(backend.hosts, on_host=model.device.on_host)
        self._order = UnitOrder(len(model.units))
        self._awaiting: Counter[str] = Counter()
        self._ahead: list[ShardedUnit] = []
        self._reducing: ShardedUnit | None = None

    @property
    def events(self) -> list[tuple[Phase, int]]:
        """What the step has gone through: phases, and numbers of units."""
        return self._order.events

    def begin(self, step: object, awaiting: Counter[str]) -> None:
        """Begin a step.

        Args:
            step: the step.
            awaiting: how many of its forward passes of a unit wait for their backward pass.
        """
        status = self.model.status
        if status.step is not None:
            raise StateError("a step is open already; leave it before you begin another one")
        status.check_whole()
        status.check_idle("a step")
        if self._file is not None:
            self._file.restart()
            self._units[0].store.ahead(GATHERED)
        self._pool.reset_peak()
        status.step, self._awaiting = step, awaiting
        self._order.begin()
        self.stats = StepStats(began=time.perf_counter())

    def updated(self) -> None:
        """Take note that the step has come to its update."""
        self._order.end()

    def end(self) -> None:
        """End a step: reshard all units and drop the gradients."""
        self.model.status.step = self._reducing = None
        self._awaiting = Counter()
        self._ahead.clear()
        for unit in self._units:
            unit.in_use = False
            unit.reshard()
            unit.drop_gradients()
        self.stats.seconds = time.perf_counter() - self.stats.began
        if self._file is not None:
            self._file.settle()
            for unit in self._units:
                unit.store.forget()
        self.stats.peak_buffers = self._pool.peak_bytes

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in this block as exposed communication."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.stats.waited += time.perf_counter() - began

    # Parameters.

    def gather(self, unit: ShardedUnit, phase: Phase) -> None:
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

    def record(self, unit: ShardedUnit, phase: Phase) -> None:
        """Take note of a pass of a unit for which nothing has to be gathered."""
        self._order.enter(phase, self._number[unit.name])

    def _fetch(self, following: list[ShardedUnit]) -> None:
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

    def _count(self, unit: ShardedUnit) -> None:
        """Take note that a unit is about to be gathered, if it is not already."""
        if unit.state is ParamState.SHARDED:
            self.stats.gathers += unit.stale
            self.stats.bytes_sent += unit.sends

    def release(self, unit: ShardedUnit) -> None:
        """End the use of ``unit`` in a pass; what happens to its parameters, the strategy says."""
        for member in _members(unit):
            self.free(member)

    def free(self, unit: ShardedUnit) -> None:
        """Free one unit, unless the strategy keeps it for a backward pass to come."""
        again = self._awaiting[unit.name] > 0
        if not (again and self._placement.keeps_for_backward):
            unit.reshard(again=again)

    # Gradients.

    def reduce(self, unit: ShardedUnit, divisor: float | None) -> None:
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


def _members(unit: ShardedUnit) -> list[ShardedUnit]:
    """The unit, and the owners of its ties."""
    return list(dict.fromkeys([unit, *unit.owners.values()]))
