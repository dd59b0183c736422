"""What passes do with units, and when: gathered, some ahead of their use, freed, reduced.

These rules are told once. A step has them carried out by units that have arrays, a plan by units
that have sizes only and write down what they would do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from fsdpcore.core.clock import WALL, Clock
from fsdpcore.fsdp.offload.arrays import GATHERED, ArrayKind
from fsdpcore.fsdp.sharding.placement import Placement
from fsdpcore.fsdp.step.schedule import PHASES, Phase, UnitOrder
from fsdpcore.fsdp.step.stats import StepStats
from fsdpcore.fsdp.step.step_times import OUTSIDE, Doing, StepTimes
from fsdpcore.fsdp.units.options import Prefetch
from fsdpcore.fsdp.units.sharded_unit import ParamState


class PassStore(Protocol):
    """Where a unit's arrays are while nobody uses them."""

    @property
    def depth(self) -> int:
        """How many units are to be announced ahead of their use."""

    def ahead(self, kinds: Sequence[ArrayKind]) -> None:
        """Begin to load arrays."""


class PassGradients(Protocol):
    """The gradients of a unit."""

    @property
    def sends(self) -> int:
        """Bytes that this rank sends in a reduction."""

    @property
    def unclaimed(self) -> bool:
        """Whether there are gradients of tied parameters that no reduction has taken along."""

    def wait(self) -> None:
        """End a reduction that was begun."""


class PassUnit(Protocol):
    """What passes ask of a unit; see the unit of an engine for all of it."""

    @property
    def name(self) -> str:
        """Of the unit."""

    @property
    def owners(self) -> Mapping[str, PassUnit]:
        """The units that its tied parameters belong to."""

    @property
    def state(self) -> ParamState:
        """Where the parameters are."""

    @property
    def store(self) -> PassStore:
        """Where its arrays are."""

    @property
    def gradients(self) -> PassGradients:
        """Its gradients."""

    @property
    def trainable(self) -> bool:
        """Whether it has gradients of its own."""

    @property
    def has_pending_prefetch(self) -> bool:
        """Whether a gathering was begun that nobody has waited for."""

    @property
    def fetched(self) -> int:
        """How many flat buffers move in a gathering."""

    @property
    def stale(self) -> int:
        """How many of these come from other ranks."""

    @property
    def sends(self) -> int:
        """Bytes that this rank sends when the unit is gathered."""

    @property
    def gathered_bytes(self) -> int:
        """Memory that a gathering takes."""

    def unshard(self, *, async_op: bool = False, what: str = "unshard") -> object:
        """Gather the parameters; ``what`` is the user's word for it."""

    def reshard(self, *, again: bool = False) -> None:
        """End the use of the gathered parameters."""

    def begin_gradients(self) -> object:
        """Have gradients to be written."""

    def keep_gradients(self) -> None:
        """Add what was written to what is reduced with the next ones."""

    def reduce_gradients(self, *, divisor: float | None = None, async_op: bool = False) -> None:
        """Sum the gradients of all ranks."""


class UnitPasses:
    """The units of a model in the order in which steps go through them.

    Args:
        units: in the order of the forward pass.
        placement: of the units.
        ahead: what goes on in the background, with nothing left open.
        clock: by which the step is timed.

    Attributes:
        stats: of the step that is open, or the last one.
        times: of that step.
        awaiting: by name of the unit, how many forward passes wait for their backward pass.
    """

    def __init__(
        self,
        units: Sequence[PassUnit],
        placement: Placement,
        ahead: Prefetch,
        *,
        clock: Clock = WALL,
    ) -> None:
        self._clock = clock
        self.times = StepTimes(clock.nanoseconds)
        self.stats = StepStats(times=self.times)
        self.awaiting: Counter[str] = Counter()
        self._units = units
        self._number = {unit.name: number for number, unit in enumerate(units)}
        self._placement = placement
        self._prefetch, self._overlaps = ahead, ahead.reductions == 1
        self._depth = ahead.units or 0
        self._doing: dict[Phase, list[_Doings]] = {
            phase: [_Doings.of(unit.name, phase) for unit in units] for phase in PHASES
        }
        self._current = _Doings(OUTSIDE, OUTSIDE, OUTSIDE)
        self._order = UnitOrder(len(units))
        self._ahead: list[PassUnit] = []
        self._reducing: PassUnit | None = None

    @property
    def events(self) -> list[tuple[Phase, int]]:
        """What the step has gone through: phases, and numbers of units."""
        return self._order.events

    def begin_passes(self, awaiting: Counter[str]) -> None:
        """Begin a step; ``awaiting`` is counted by whoever makes its passes."""
        self.awaiting = awaiting
        self._order.begin()
        self.times = StepTimes(self._clock.nanoseconds)
        self.stats = StepStats(times=self.times)

    def updated(self) -> None:
        """Take note that the step has come to its update."""
        self._order.end()

    def end_passes(self) -> None:
        """End a step."""
        self.awaiting = Counter()
        self._reducing = None
        self._ahead.clear()

    # What the time of the caller goes to; see ``StepTimes``.

    def computes(self) -> None:
        """Take note that the caller computes with the unit that was gathered last."""
        self.times.mark(self._current.computing)

    def computed(self) -> None:
        """Take note that it has ended that."""
        self.times.mark(self._current.moving)

    def leave(self) -> None:
        """Take note that a pass is over."""
        self.times.mark(OUTSIDE)

    # Parameters.

    def gather(self, unit: PassUnit, phase: Phase) -> None:
        """Have ``unit`` and the owners of its ties gathered, and begin with what comes next."""
        number, times = self._number[unit.name], self.times
        self._current = doing = self._doing[phase][number]
        times.shorten()
        times.mark(doing.moving)
        depth = unit.store.depth
        upcoming = self._order.enter(phase, number, self._depth + depth)
        following = [self._units[number] for number in upcoming[: self._depth]]
        members = _members(unit)
        for ahead in self._ahead:
            if ahead not in members and ahead not in following:
                self.free(ahead)  # the guess was wrong
        times.mark(doing.waiting)
        for member in members:
            self._count(member)
            member.unshard(what=phase)
        times.mark(doing.moving)
        if following or self._ahead:
            self._ahead = [each for each in following if each.has_pending_prefetch]
            self._fetch(following, phase)
        for number in upcoming[len(following) :]:
            if self._units[number].state is ParamState.SHARDED:
                self._units[number].store.ahead(GATHERED)

    def record(self, unit: PassUnit, phase: Phase) -> None:
        """Take note of a pass of a unit for which nothing has to be gathered."""
        number = self._number[unit.name]
        self._current = self._doing[phase][number]
        self.times.mark(self._current.moving)
        self._order.enter(phase, number)

    def _fetch(self, following: Sequence[PassUnit], phase: Phase) -> None:
        limit = self._prefetch.max_bytes
        nbytes = sum([unit.gathered_bytes for unit in self._ahead])
        for unit in following:
            if unit.state is not ParamState.SHARDED or not unit.fetched:
                continue
            nbytes += unit.gathered_bytes
            if self._ahead and limit is not None and nbytes > limit:
                return
            self._count(unit)
            unit.unshard(async_op=True, what=phase)
            self._ahead.append(unit)

    def _count(self, unit: PassUnit) -> None:
        """Take note that a unit is about to be gathered, if it is not already."""
        if unit.state is ParamState.SHARDED:
            stale = unit.stale
            if stale:
                self.stats.gathers += stale
                self.stats.bytes_sent += unit.sends

    def release(self, unit: PassUnit) -> None:
        """End the use of ``unit`` in a pass; what happens to its parameters, the strategy says."""
        for member in _members(unit):
            self.free(member)

    def free(self, unit: PassUnit) -> None:
        """Free one unit, unless the strategy keeps it for a backward pass to come."""
        again = self.awaiting[unit.name] > 0
        if not (again and self._placement.keeps_for_backward):
            unit.reshard(again=again)

    # Gradients.

    def settle(self, unit: PassUnit, divisor: float | None, *, reduce: bool) -> None:
        """Reduce the gradients that a backward pass has written, or keep them for later.

        Before it the parameters are freed: the reduction needs the room, and ends all reading.
        """
        if reduce:
            self._reduce(unit, divisor)
        else:
            unit.keep_gradients()

    def _reduce(self, unit: PassUnit, divisor: float | None) -> None:
        """Reduce in the background if so chosen, one unit after the other."""
        self._finish_reduction()
        if unit.trainable:
            self.stats.reductions += 1
            self.stats.bytes_sent += unit.gradients.sends
        doing = self._doing["backward"][self._number[unit.name]]
        self.times.mark(doing.moving if self._overlaps else doing.waiting)
        unit.reduce_gradients(divisor=divisor, async_op=self._overlaps)
        self.times.mark(doing.moving)
        self._reducing = unit

    def finish_reductions(self, divisor: float | None) -> None:
        """Have all gradients reduced, those too that ties have left with their owners."""
        for unit in self._units:
            if unit.gradients.unclaimed:  # and the unit had no backward pass after these
                unit.begin_gradients()
                self._reduce(unit, divisor)
        self._finish_reduction()

    def _finish_reduction(self) -> None:
        """Wait for the reduction that goes on in the background."""
        reducing, self._reducing = self._reducing, None
        if reducing is not None:
            if not self._overlaps:  # it has ended
                reducing.gradients.wait()
                return
            doing = self._doing["backward"][self._number[reducing.name]]
            self.times.mark(doing.waiting)
            reducing.gradients.wait()
            self.times.mark(doing.moving)


class _Doings(NamedTuple):
    """What a rank does in a pass of a unit."""

    computing: Doing
    waiting: Doing
    moving: Doing

    @classmethod
    def of(cls, unit: str, phase: Phase) -> _Doings:
        return cls(*(Doing(unit, phase, part) for part in ("computing", "waiting", "moving")))


def _members(unit: PassUnit) -> list[PassUnit]:
    """The unit, and the owners of its ties."""
    return list(dict.fromkeys([unit, *unit.owners.values()])) if unit.owners else [unit]
