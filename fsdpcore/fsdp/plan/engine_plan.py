"""The plan of a step of an engine, and the comparison with the last one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from fsdpcore.core.errors import StateError
from fsdpcore.fsdp.offload.offload import Offload
from fsdpcore.fsdp.plan.estimate import moved
from fsdpcore.fsdp.plan.make_plan import Sync, make_plan
from fsdpcore.fsdp.plan.memory import HeldMemory
from fsdpcore.fsdp.plan.plan import Plan
from fsdpcore.fsdp.plan.report import MeasuredStep, Report
from fsdpcore.fsdp.sharding.process_groups import ProcessGroups
from fsdpcore.fsdp.sharding.strategy import Strategy
from fsdpcore.fsdp.step.agreement import Events
from fsdpcore.fsdp.step.schedule import Prefetch
from fsdpcore.fsdp.step.stats import StepStats
from fsdpcore.fsdp.units.precision import Precision
from fsdpcore.fsdp.units.unit import Unit


def plan_of(
    units: Sequence[Unit],
    groups: ProcessGroups,
    strategy: Strategy,
    precision: Precision,
    ahead: Prefetch,
    offload: Offload | None,
    *,
    windowed: bool,
    microbatches: int,
    sync: Sync,
    whole: bool,
) -> Plan:
    """Plan a step of an engine as it is; with the transport's own costs, no tuned ones."""
    updates = [unit.updater for unit in units if unit.updater is not None]
    backend, on_host = groups.whole, groups.device.on_host
    pinned = None if on_host else offload
    plan = make_plan(
        units,
        backend.world_size,
        strategy=strategy,
        precision=precision,
        optimizer_states=max((len(update.state) for update in updates), default=0),
        prefetch=ahead.units,
        prefetch_bytes=ahead.max_bytes,
        overlap=ahead.overlaps(backend.hosts, on_host=on_host),
        microbatches=microbatches,
        sync=sync,
        windowed=windowed,
        brought=pinned is not None and groups.placement.whole_parameters,
        rank=backend.rank,
        tensor=groups.everyone.world_size // backend.world_size,
        whole=whole,
        costs=backend.capabilities,
    )
    # By the optimizers themselves: not all have as many arrays for each parameter.
    state = sum(update.nbytes for update in updates)
    held = replace(plan.persistent, optimizer=state)
    away = 0 if pinned is None else moved(held, pinned.what).total
    return replace(plan, persistent=held, pinned=away)


class Planner(Protocol):
    """``plan`` of an engine."""

    def __call__(self, *, microbatches: int, sync: Sync, whole: bool) -> Plan:
        """Plan a step."""


def report_of(
    plan: Planner, units: Sequence[Unit], stats: StepStats, events: Events, held: HeldMemory
) -> Report:
    """Compare the last step with the plan for as many microbatches as it had.

    Args:
        plan: of the engine.
        units: of the engine.
        stats: of the step.
        events: what it went through: phases, and numbers of units.
        held: what the engine holds.
    """
    if not stats.reductions:
        raise StateError("report() compares the last training step with its plan; make one first")
    passes = Counter(unit for phase, unit in events if phase == "backward")
    microbatches = max(passes.values(), default=1)
    reduced = sum(count for unit, count in passes.items() if units[unit].trainable)
    sync: Sync = "each" if stats.reductions >= reduced else "last"
    return Report(
        plan(microbatches=microbatches, sync=sync, whole=stats.whole),
        MeasuredStep(
            peak_bytes=held.parameters + held.gradients + held.optimizer + stats.peak_buffers,
            bytes_sent=stats.bytes_sent,
            step_seconds=stats.seconds,
            exposed_seconds=stats.waited,
            gathers=stats.gathers,
            reductions=stats.reductions,
        ),
    )
