"""A training step gone through with sizes in place of arrays: what is moved, what is alive.

Pure arithmetic. For each unit in order, on every rank:

forward     Its parameters are gathered if they are not there, the rank waits for them, and
            gatherings of the units that come next are started. At the end they are freed, unless
            they stay. Where the backward pass gathers among fewer ranks, a larger part of them
            stays from here to the end of it.
backward    The same in reverse order; nothing is fetched ahead of the first unit. A buffer for the
            full gradients is taken, and the parameters are freed before the reduction begins.
            In the background, it ends when the next one begins, or before the update; until then
            its buffer stays. Gradients of all microbatches but the last may be added up instead.
update      All ranks are told the norm of each one's gradients, and whether they are finite.

Where a function is given the whole model, all units are gathered before it, and none is freed until
it has returned; then each is freed and its gradients are reduced, in the reverse order.

Parameters that are tied to another unit's are gathered with that unit. Their gradients lie apart,
and wait for those of that unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.fsdp.plan.sizes import UnitBytes
from fsdpcore.fsdp.plan.times import Compute, Event, Issue, WaitFor
from fsdpcore.fsdp.sharding.placement import Placement, Reduction
from fsdpcore.fsdp.step.agreement import AGREED_BYTES
from fsdpcore.fsdp.step.schedule import Prefetch

Phase = Literal["forward", "backward", "update"]
Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]

_BACKWARD = 2  # a backward pass computes twice as long as a forward pass


@dataclass(frozen=True)
class PlannedCollective:
    """One collective of a step, as one rank sees it.

    Attributes:
        phase: of the step.
        kind: the collective.
        unit: name of the unit; empty for what concerns all of them.
        microbatch: number, from 0.
        group_size: ranks that take part.
        nbytes: of the full buffer, padding included.
        padding: how many of these are padding.
        bytes_sent: by this rank, with an algorithm that sends as little as possible.
        live_bytes: gathered parameters and full gradients once it is issued.
        background: the rank goes on computing in the meantime.
        seconds: that it takes; None where the costs of the transport are not known.
    """

    phase: Phase
    kind: Kind
    unit: str
    microbatch: int
    group_size: int
    nbytes: int
    padding: int
    bytes_sent: int
    live_bytes: int
    background: bool
    seconds: float | None = None

    @property
    def padding_sent(self) -> Fraction:
        """How much of ``bytes_sent`` is padding, as the mean over the ranks of the group."""
        return Fraction(self.bytes_sent * self.padding, self.nbytes) if self.nbytes else Fraction(0)


@dataclass(frozen=True)
class Live:
    """Bytes that are alive during a step only.

    Attributes:
        parameters: gathered, and larger parts than the own shard.
        gradients: full ones, which are written or reduced or wait for that.
    """

    parameters: int
    gradients: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients


@dataclass(frozen=True)
class PlannedStep:
    """What a walk goes through.

    Attributes:
        units: in the order of the forward pass.
        placement: over how many ranks.
        rank: which of them.
        ahead: what goes on in the background.
        microbatches: forward and backward passes before the update.
        deferred: gradients are reduced in the last of them only.
        windowed: the ranks of a host have the parameters in a window.
        brought: each rank has all parameters in the memory of the host, from where they are copied
            to a GPU to be used.
        tensor: ranks that have the other boxes of the same parameters, this one included.
        whole: each pass is that of a function that gets all units at once.
    """

    units: Sequence[UnitBytes]
    placement: Placement
    rank: int
    ahead: Prefetch
    microbatches: int
    deferred: bool
    windowed: bool
    brought: bool = False
    tensor: int = 1
    whole: bool = False


class Walk:
    """Goes through one step; ``run`` it once.

    Attributes:
        operations: in the order in which they are issued.
        events: what the rank does, for ``plan_time.simulate``.
        peak: what is alive at the moment when most is.
    """

    def __init__(self, job: PlannedStep) -> None:
        self.operations: list[PlannedCollective] = []
        self.events: list[Event] = []
        self.peak = Live(0, 0)
        self._job = job
        self._phase: Phase = "forward"
        self._microbatch = 0
        self._parameters = 0  # alive now, as in Live
        self._gradients = 0
        place = job.placement
        self._kept = job.windowed or place.whole_parameters
        self._takes = job.brought or not self._kept
        here = job.windowed or not place.gathers
        self._present = [here and not job.brought] * len(job.units)
        self._fresh: set[int] = set()  # units that need not be gathered again before the update
        self._gathering: dict[int, list[int]] = {}  # operations that were not waited for
        self._fetched: dict[int, int] = {}  # bytes of units ahead of their use
        self._awaiting: set[int] = set()  # units whose backward pass is still to come
        self._parts: set[int] = set()  # units of which a larger part than the shard is there
        self._added: set[int] = set()  # units whose gradients were not reduced yet
        self._tied: dict[tuple[int, str], int] = {}  # bytes of gradients that wait for their owner
        # Unit, operation, and what comes after it.
        self._reducing: tuple[int, int, list[Reduction]] | None = None

    def run(self) -> None:
        """Go through all passes, and the update."""
        for microbatch in range(self._job.microbatches):
            self._microbatch = microbatch
            if self._job.whole:
                self._all_at_once()
            else:
                self._unit_by_unit()
        self._end_reduction()
        self._phase = "update"
        ranks = self._job.placement.world_size * self._job.tensor
        if ranks > 1:
            nbytes = ranks * AGREED_BYTES
            self._wait(self._issue("all_gather", "", ranks, nbytes, 0, background=False))

    def _unit_by_unit(self) -> None:
        order = range(len(self._job.units))
        self._phase = "forward"
        for unit in order:
            self._awaiting.add(unit)
            self._enter(unit, order[unit + 1 :])
            self.events.append(Compute(unit, 1))
            self._release(self._members(unit))
        self._phase = "backward"
        for unit in reversed(order):
            self._awaiting.remove(unit)
            self._enter(unit, order[:unit][::-1])
            self._backward(unit, Compute(unit, _BACKWARD))

    def _all_at_once(self) -> None:
        order = range(len(self._job.units))
        self._phase = "forward"
        for unit in order:
            self._enter(unit, order[unit + 1 :])
        self.events.extend(Compute(unit, 1) for unit in order)
        self._phase = "backward"
        self.events.extend(Compute(unit, _BACKWARD) for unit in reversed(order))
        for unit in reversed(order):
            self._backward(unit)

    # Parameters.

    def _members(self, unit: int) -> list[int]:
        """A unit, and those that it is tied to, which are gathered with it."""
        owners = (owner for owner, *_ in self._job.units[unit].ties)
        return list(dict.fromkeys((unit, *owners)))

    def _enter(self, unit: int, following: Sequence[int]) -> None:
        """Have a unit gathered, and start on those that follow it in this pass."""
        for member in self._members(unit):
            self._gather(member, background=False)
            self._fetched.pop(member, None)
            for operation in self._gathering.pop(member, ()):
                self._wait(operation)
        limit = self._job.ahead.max_bytes if self._takes else None
        for other in following[: self._job.ahead.units]:
            if self._present[other]:
                continue
            nbytes = self._job.units[other].gathered
            if limit is not None and self._fetched and sum(self._fetched.values()) + nbytes > limit:
                break
            self._gather(other, background=True)
            self._fetched[other] = nbytes

    def _gather(self, unit: int, *, background: bool) -> None:
        if self._present[unit]:
            return
        self._present[unit] = True
        this, place = self._job.units[unit], self._job.placement
        if self._takes:
            self._live(parameters=this.gathered)
        ranks = place.regather if unit in self._parts else place.shards
        if unit in self._fresh:
            ranks = 1
        if self._job.brought:
            self._fresh.add(unit)
        # What is frozen and stays was gathered once and for all.
        layouts = (this.trained,) if self._kept else this.parts
        found = [(layout, layout.dtype.itemsize) for layout in layouts if layout.size and ranks > 1]
        self._gathering[unit] = [
            self._issue("all_gather", this.name, ranks, *_bytes(*each), background=background)
            for each in found
        ]

    def _release(self, units: Sequence[int]) -> None:
        """End the use of units in a pass."""
        for member in units:
            again = member in self._awaiting
            if self._takes and not (again and self._job.placement.keeps_for_backward):
                self._free(member, again=again)

    def _free(self, unit: int, *, again: bool) -> None:
        """Free the parameters of a unit, ``again`` if its backward pass is still to come."""
        this, place = self._job.units[unit], self._job.placement
        part = this.gathered // place.regather
        if again and unit not in self._parts and place.keeps_part:
            self._parts.add(unit)
            self._live(parameters=part)  # it is copied from what is freed then
        elif unit in self._parts and not again:
            self._parts.remove(unit)
            self._live(parameters=-part)
        self._live(parameters=-this.gathered)
        self._present[unit] = False

    # Gradients.

    def _backward(self, unit: int, compute: Compute | None = None) -> None:
        """End the backward pass of a unit, which computes now if it has not before."""
        this = self._job.units[unit]
        tied = {
            (owner, param): size * self._job.units[owner].dtypes.grad.itemsize
            for owner, param, size in this.ties
        }
        self._live(gradients=this.gradients + sum(tied.values()))
        if compute is not None:
            self.events.append(compute)
        self._release(self._members(unit) if compute is not None else [unit])
        last = self._job.microbatches - 1
        if not self._job.deferred or self._microbatch == last:
            self._end_reduction()
        for key, nbytes in tied.items():
            if key in self._tied:  # it is added to what waits for the owner already
                self._live(gradients=-nbytes)
            self._tied[key] = nbytes
        if unit in self._added:  # what is new was added to it, and is not needed any more
            self._live(gradients=-this.gradients)
        if self._job.deferred and self._microbatch < last:
            self._added.add(unit)
        else:
            self._added.discard(unit)
            for key in [key for key in self._tied if key[0] == unit]:
                self._live(gradients=-self._tied.pop(key))
            if this.trained.size:
                self._reduce(unit)

    def _reduce(self, unit: int) -> None:
        this, job = self._job.units[unit], self._job
        background = bool(job.ahead.reductions) and job.placement.world_size > 1
        first, *more = job.placement.reductions(this.trained, job.rank) or (None,)
        operation = -1
        if first is not None:
            operation = self._sum(this, first, background=background)
        self._reducing = unit, operation, more
        if not background:
            self._end_reduction()

    def _end_reduction(self) -> None:
        """Wait for the reduction that is on its way, if there is one, and free its buffer."""
        if self._reducing is None:
            return
        (unit, operation, more), self._reducing = self._reducing, None
        this = self._job.units[unit]
        if operation >= 0:
            self._wait(operation)
        for each in more:
            self._wait(self._sum(this, each, background=False))
        self._live(gradients=-this.gradients)

    def _sum(self, this: UnitBytes, reduction: Reduction, *, background: bool) -> int:
        item = this.dtypes.grad.itemsize
        return self._issue(
            reduction.kind,
            this.name,
            reduction.ranks,
            reduction.size * item,
            reduction.padding * item,
            sent=reduction.sent * item,
            background=background,
        )

    # What all of these do.

    def _issue(
        self,
        kind: Kind,
        unit: str,
        ranks: int,
        nbytes: int,
        padding: int,
        *,
        background: bool,
        sent: int | None = None,
    ) -> int:
        operation = PlannedCollective(
            phase=self._phase,
            kind=kind,
            unit=unit,
            microbatch=self._microbatch,
            group_size=ranks,
            nbytes=nbytes,
            padding=padding,
            bytes_sent=nbytes // ranks * (ranks - 1) if sent is None else sent,
            live_bytes=self._parameters + self._gradients,
            background=background,
        )
        self.operations.append(operation)
        self.events.append(Issue(len(self.operations) - 1))
        return len(self.operations) - 1

    def _wait(self, operation: int) -> None:
        self.events.append(WaitFor(operation))

    def _live(self, *, parameters: int = 0, gradients: int = 0) -> None:
        """Take memory, or give it back."""
        self._parameters += parameters
        self._gradients += gradients
        if self._parameters + self._gradients > self.peak.total:
            self.peak = Live(self._parameters, self._gradients)


def _bytes(layout: FlatLayout, item: int) -> tuple[int, int]:
    """Bytes of a flat buffer of such items, and how many of them are padding."""
    return layout.padded_size * item, layout.padding * item
