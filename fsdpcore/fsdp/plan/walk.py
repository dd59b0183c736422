"""A training step gone through with sizes in place of arrays.

The rules of a step are those of ``step/passes.py``, which a plan has carried out by units that have
sizes only. What the plan adds is the way of the caller: in each microbatch a forward pass of all
units in order, then a backward pass in reverse order; or, where a function is given the whole
model, all units at once. Then all ranks are told the norm of each one's gradients, and whether they
are finite.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fsdpcore.fsdp.plan.sized_unit import SizedUnit
from fsdpcore.fsdp.plan.sizes import UnitBytes
from fsdpcore.fsdp.plan.step_log import StepLog
from fsdpcore.fsdp.sharding.placement import Placement, StorageKind
from fsdpcore.fsdp.sharding.travel import Travel
from fsdpcore.fsdp.step.agreement import AGREED_BYTES
from fsdpcore.fsdp.step.passes import UnitPasses
from fsdpcore.fsdp.units.options import Prefetch

_FORWARD = 1
_BACKWARD = 2  # a backward pass computes twice as long as a forward pass


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
        storage: where the parameters are.
        tensor: ranks that have the other boxes of the same parameters, this one included.
        whole: each pass is that of a function that gets all units at once.
        travel: what is quantised on its way; None for nothing.
    """

    units: Sequence[UnitBytes]
    placement: Placement
    rank: int
    ahead: Prefetch
    microbatches: int
    deferred: bool
    storage: StorageKind
    tensor: int = 1
    whole: bool = False
    travel: Travel | None = None


def walk(step: PlannedStep) -> StepLog:
    """Go through a step; return what it does."""
    log = StepLog()
    units = _units(step, log)
    overlaps = bool(step.ahead.reductions) and step.placement.world_size > 1
    passes = UnitPasses(units, step.placement, step.ahead, overlaps=overlaps)
    passes.begin_passes(Counter())
    for microbatch in range(step.microbatches):
        log.microbatch = microbatch
        reduce = not step.deferred or microbatch == step.microbatches - 1
        if step.whole:
            _all_at_once(units, passes, log, reduce=reduce)
        else:
            _unit_by_unit(units, passes, log, reduce=reduce)
    passes.finish_reductions(None)
    log.phase = "update"
    ranks = step.placement.world_size * step.tensor
    if ranks > 1:
        sent = AGREED_BYTES * (ranks - 1)
        nbytes = AGREED_BYTES * ranks
        log.wait(log.issue("all_gather", "", ranks, nbytes, 0, sent=sent, background=False))
    return log


def _units(step: PlannedStep, log: StepLog) -> list[SizedUnit]:
    units = [
        SizedUnit(sizes, step.placement, step.rank, step.storage, log, step.travel)
        for sizes in step.units
    ]
    for unit in units:
        unit.tie(units)
    return units


def _unit_by_unit(
    units: Sequence[SizedUnit], passes: UnitPasses, log: StepLog, *, reduce: bool
) -> None:
    log.phase = "forward"
    for number, unit in enumerate(units):
        passes.awaiting[unit.name] += 1
        passes.gather(unit, "forward")
        log.compute(number, _FORWARD)
        passes.release(unit)
    log.phase = "backward"
    for number, unit in reversed(list(enumerate(units))):
        passes.awaiting[unit.name] -= 1
        passes.gather(unit, "backward")
        unit.begin_gradients()
        log.compute(number, _BACKWARD)
        passes.release(unit)
        passes.settle(unit, None, reduce=reduce)


def _all_at_once(
    units: Sequence[SizedUnit], passes: UnitPasses, log: StepLog, *, reduce: bool
) -> None:
    order = range(len(units))
    log.phase = "forward"
    for unit in units:
        passes.gather(unit, "forward")
    for number in order:
        log.compute(number, _FORWARD)
    log.phase = "backward"
    for number in reversed(order):
        log.compute(number, _BACKWARD)
    for unit in reversed(units):
        passes.record(unit, "backward")
        unit.begin_gradients()
        passes.free(unit)
        passes.settle(unit, None, reduce=reduce)
