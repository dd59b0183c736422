"""The plan of an engine's step, and the comparison with the last one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from fsdpcore.core.errors import StateError
from fsdpcore.fsdp.plan.estimate import moved
from fsdpcore.fsdp.plan.plan import Plan, Sync, make_plan
from fsdpcore.fsdp.plan.report import Measured, Report
from fsdpcore.fsdp.units.storage import keeps_all

if TYPE_CHECKING:
    from fsdpcore.fsdp.engine import FSDP


def plan_of(engine: FSDP, microbatches: int, sync: Sync, *, whole: bool) -> Plan:
    """Plan a step of the engine as it is; with the transport's own costs, no tuned ones."""
    updates = [unit.updater for unit in engine.units if unit.updater is not None]
    ahead = engine.prefetching
    pinned = None if engine.device.on_host else engine.offload
    plan = make_plan(
        engine.units,
        engine.backend.world_size,
        strategy=engine.strategy,
        precision=engine.precision,
        optimizer_states=max((len(update.state) for update in updates), default=0),
        prefetch=ahead.units,
        prefetch_bytes=ahead.max_bytes,
        overlap=ahead.overlaps(engine.backend.hosts, on_host=engine.device.on_host),
        microbatches=microbatches,
        sync=sync,
        windowed=engine.windowed,
        brought=pinned is not None and keeps_all(engine.placement),
        rank=engine.backend.rank,
        tensor=engine.everyone.world_size // engine.backend.world_size,
        whole=whole,
        costs=engine.backend.capabilities,
    )
    # By the optimizers themselves: not all have as many arrays for each parameter.
    state = sum(update.nbytes for update in updates)
    held = replace(plan.persistent, optimizer=state)
    away = 0 if pinned is None else moved(held, pinned.what).total
    return replace(plan, persistent=held, pinned=away)


def report_of(engine: FSDP) -> Report:
    """Compare the last step with the plan for as many microbatches as it had."""
    stats, held = engine.stats, engine.held()
    if not stats.reductions:
        raise StateError("report() compares the last training step with its plan; make one first")
    passes = Counter(unit for phase, unit in engine.executor.events if phase == "backward")
    microbatches = max(passes.values(), default=1)
    reduced = sum(count for unit, count in passes.items() if engine.units[unit].trainable)
    sync: Sync = "each" if stats.reductions >= reduced else "last"
    return Report(
        plan_of(engine, microbatches, sync, whole=stats.whole),
        Measured(
            peak_bytes=held.parameters + held.gradients + held.optimizer + stats.peak_buffers,
            bytes_sent=stats.bytes_sent,
            step_seconds=stats.seconds,
            exposed_seconds=stats.waited,
            gathers=stats.gathers,
            reductions=stats.reductions,
        ),
    )
