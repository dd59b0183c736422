"""The plan of a step of an engine, and the comparison with the last one."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fsdpcore.collectives.selection.choose import expected_seconds
from fsdpcore.core.errors import StateError
from fsdpcore.fsdp.plan.estimate import moved
from fsdpcore.fsdp.plan.make_plan import Sync, make_plan
from fsdpcore.fsdp.plan.memory import HeldMemory
from fsdpcore.fsdp.plan.plan import Plan
from fsdpcore.fsdp.plan.report import MeasuredStep, Report
from fsdpcore.fsdp.plan.sizes import Persistent
from fsdpcore.fsdp.plan.step_log import Live, PlannedCollective
from fsdpcore.fsdp.sharding.process_groups import ProcessGroups
from fsdpcore.fsdp.step.executor import StepExecutor
from fsdpcore.fsdp.units.model import ShardedModel
from fsdpcore.fsdp.units.owners import together
from fsdpcore.fsdp.units.unit import Unit


def plan_of(
    units: Sequence[Unit],
    model: ShardedModel,
    microbatches: int,
    sync: Sync,
    *,
    windowed: bool,
    whole: bool,
    compute_seconds: Sequence[float] | None = None,
) -> Plan:
    """Plan a step of an engine as it is, by what its groups know of their costs.

    Args:
        units: of the engine, as they were declared.
        model: what it has made of them.
        microbatches, sync, whole, compute_seconds: as of ``make_plan``.
        windowed: the parameters are in a window.
    """
    backend, everyone, options = model.groups.whole, model.groups.everyone, model.options
    updates = [unit.updater for unit in model.units if unit.updater is not None]
    ahead = options.prefetch.among(backend.hosts, on_host=model.device.on_host)
    pinned = None if model.device.on_host else options.offload
    plan = make_plan(
        units,
        backend.world_size,
        strategy=options.strategy,
        precision=options.precision,
        optimizer_states=max((len(update.state) for update in updates), default=0),
        prefetch=ahead.units or 0,
        prefetch_bytes=ahead.max_bytes,
        overlap=ahead.reductions == 1,
        microbatches=microbatches,
        sync=sync,
        windowed=windowed,
        brought=pinned is not None and model.groups.placement.whole_parameters,
        rank=backend.rank,
        tensor=everyone.world_size // backend.world_size,
        whole=whole,
        costs=functools.partial(_seconds, model.groups),
        compute_seconds=compute_seconds,
        compression=None if model.wire is None else model.wire.travel,
        virtual_ranks=options.virtual_ranks,
    )
    plan = _with_owners(plan, model)
    # By the optimizers themselves: not all have as many arrays for each parameter.
    state = Persistent.of(each for unit in model.units for each in unit.store.persistent).optimizer
    persistent = replace(plan.persistent, optimizer=state)
    away = 0 if pinned is None else moved(persistent, pinned.what).total
    return replace(plan, persistent=persistent, pinned=away)


def _with_owners(plan: Plan, model: ShardedModel) -> Plan:
    """Add how parameters go to their owners and back in the update."""
    groups, operations, live = model.groups, list(plan.operations), plan.peak_live
    for units in together(model.units, groups.shards.world_size):
        updates = [(unit.name, unit.updater) for unit in units if unit.updater is not None]
        room = sum(update.room for _, update in updates)
        live = max(live, Live(room, 0), key=lambda each: each.total)
        for name, nbytes, sent in ((n, *each) for n, up in updates for each in up.exchanges):
            exchange = PlannedCollective(
                phase="update",
                kind="all_to_all",
                unit=name,
                microbatch=max((each.microbatch for each in plan.operations), default=0),
                group_size=groups.shards.world_size,
                nbytes=nbytes,
                padding=0,
                bytes_sent=sent,
                live_bytes=room,
                background=False,
            )
            operations.append(replace(exchange, seconds=_seconds(groups, exchange)))
    return replace(plan, operations=tuple(operations), peak_live=live)


def _seconds(groups: ProcessGroups, collective: PlannedCollective) -> float:
    """What a collective takes in the group that carries it out."""
    placement, kind = groups.placement, collective.kind.removesuffix("_v")
    if collective.kind == "all_to_all":
        group = groups.shards
    elif collective.kind != kind:
        sizes = {each.world_size: each for each in (groups.replicas, groups.shards, groups.whole)}
        group = sizes[collective.group_size]
    elif collective.phase == "update":
        group = groups.everyone
    elif collective.kind == "all_reduce":
        group = groups.replicas if placement.reduces_twice else groups.whole
    else:
        regathered = collective.group_size != placement.shards
        group = groups.regather_group if regathered else groups.shards
    here = group.hosts[group.rank]
    alike = groups.everyone.hosts.count(here) // group.hosts.count(here)
    return expected_seconds(kind, collective.nbytes, group, groups=alike)


def report_of(
    units: Sequence[Unit], executor: StepExecutor, held: HeldMemory, *, windowed: bool
) -> Report:
    """Compare the last training step with the plan for as many microbatches as it had.

    Args:
        units: as for ``plan_of``, and ``windowed``.
        executor: of the steps.
        held: what this rank holds.
    """
    model = executor.model
    if executor.trained is None:
        raise StateError("report() compares the last training step with its plan; make one first")
    stats, events = executor.trained
    passes = Counter(unit for phase, unit in events if phase == "backward")
    rounds = model.leaves.rounds if model.leaves.virtual else 1
    microbatches = max(passes.values(), default=rounds) // rounds
    reduced = sum(count for unit, count in passes.items() if model.units[unit].trainable)
    sync: Sync = "each" if stats.reductions >= reduced else "last"
    return Report(
        plan_of(units, model, microbatches, sync, windowed=windowed, whole=stats.whole),
        MeasuredStep(
            peak_bytes=held.states + stats.peak_buffers,
            bytes_sent=stats.bytes_sent,
            step_seconds=stats.seconds,
            exposed_seconds=stats.waited,
            gathers=stats.gathers,
            reductions=stats.reductions,
        ),
        stats.times,
    )
