"""A training step gone through with sizes in place of arrays.

The rules of a step are those of ``step/passes.py``, which a plan has carried out by units that have
sizes only. What the plan adds is the way of the caller: in each microbatch a forward pass of all
units in order, then a backward pass in reverse order; or, where a function is given the whole
model, all units at once. With virtual ranks it does so for each of them. Then all ranks are told
the norm of each one's gradients, and whether they are finite.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fsdpcore.fsdp.plan.sized_unit import SizedUnit
from fsdpcore.fsdp.plan.sizes import UnitBytes
from fsdpcore.fsdp.plan.step_log import StepLog
from fsdpcore.fsdp.sharding.placement import StorageKind
from fsdpcore.fsdp.sharding.travel import Travel
from fsdpcore.fsdp.sharding.virtual_ranks import Leaves
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
        leaves: over which ranks, and what this one computes.
        ahead: what goes on in the background.
        microbatches: forward and backward passes before the update, or of each virtual rank.
        deferred: gradients are reduced in the last of them only, as with virtual ranks.
        storage: where the parameters are.
        tensor: ranks that have the other boxes of the same parameters, this one included.
        whole: each pass is that of a function that gets all units at once.
        travel: what is quantised on its way; None for nothing.
    """

    units: Sequence[UnitBytes]
    leaves: Leaves
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
    leaves, placement = step.leaves, step.leaves.placement
    passes = UnitPasses(units, placement, step.ahead)
    passes.begin_passes(Counter())
    rounds = leaves.rounds if leaves.virtual else 1
    # With virtual ranks, what is tied to is reduced at the update.
    tied = {owner for unit in units for owner in unit.owners.values()} if leaves.virtual else set()
    settled = [unit for unit in units if unit not in tied]
    for number in range(rounds * step.microbatches):
        leaf, microbatch = divmod(number, step.microbatches)
        if leaf and not microbatch:
            for unit in units:
                unit.gradients.end_leaf()
        log.microbatch = number
        log.computes = not leaves.virtual or leaf < len(leaves.mine)
        last = number == rounds * step.microbatches - 1
        make = _all_at_once if step.whole else _unit_by_unit
        make(units, passes, log, settled if last or not (step.deferred or leaves.virtual) else ())
    passes.finish_reductions(None)
    log.phase = "update"
    ranks = placement.world_size * step.tensor
    if ranks > 1:
        sent = AGREED_BYTES * (ranks - 1)
        nbytes = AGREED_BYTES * ranks
        log.wait(log.issue("all_gather", "", ranks, nbytes, 0, sent=sent, background=False))
    return log


def _units(step: PlannedStep, log: StepLog) -> list[SizedUnit]:
    units = [SizedUnit(sizes, step.leaves, step.storage, log, step.travel) for sizes in step.units]
    for unit in units:
        unit.tie(units)
    return units


def _unit_by_unit(
    units: Sequence[SizedUnit], passes: UnitPasses, log: StepLog, reduced: Collection[SizedUnit]
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
        passes.settle(unit, None, reduce=unit in reduced)


def _all_at_once(
    units: Sequence[SizedUnit], passes: UnitPasses, log: StepLog, reduced: Collection[SizedUnit]
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
        passes.settle(unit, None, reduce=unit in reduced)
