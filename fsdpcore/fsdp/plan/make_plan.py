"""``make_plan``: a training step is worked out before anything runs.

Pure arithmetic: no arrays, no communication.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Literal, get_args

import numpy as np

from fsdpcore.compress.compression import Compression
from fsdpcore.compress.packing import Span
from fsdpcore.core.capabilities import Capabilities
from fsdpcore.core.checks import as_choice, as_finite, as_int
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.core.geometry.leaf_tree import LeafTree
from fsdpcore.core.policy import Costs
from fsdpcore.fsdp.plan.plan import Plan
from fsdpcore.fsdp.plan.sizes import UnitBytes, UnitSize, lay_out, persistent
from fsdpcore.fsdp.plan.step_log import PlannedCollective, StepLog
from fsdpcore.fsdp.plan.times import seconds, simulate
from fsdpcore.fsdp.plan.units import sizes_of
from fsdpcore.fsdp.plan.walk import PlannedStep, walk
from fsdpcore.fsdp.sharding.placement import storage_kind
from fsdpcore.fsdp.sharding.strategy import Strategy
from fsdpcore.fsdp.sharding.travel import Travel
from fsdpcore.fsdp.sharding.virtual_ranks import Leaves
from fsdpcore.fsdp.units.options import Prefetch
from fsdpcore.fsdp.units.precision import Precision
from fsdpcore.fsdp.units.unit import Unit

Sync = Literal["each", "last"]
CollectiveSeconds = Callable[[PlannedCollective], float]


def make_plan(
    units: Iterable[UnitSize | Unit],
    world_size: int,
    *,
    strategy: Strategy | str = "full_shard",
    precision: Precision | None = None,
    optimizer_states: int = 2,
    prefetch: int = 1,
    prefetch_bytes: int | None = None,
    overlap: bool = True,
    microbatches: int = 1,
    sync: Sync = "each",
    windowed: bool = False,
    brought: bool = False,
    rank: int = 0,
    tensor: int = 1,
    whole: bool = False,
    costs: Costs | Capabilities | CollectiveSeconds | None = None,
    compute_seconds: Sequence[float] | None = None,
    compression: Compression | Travel | None = None,
    virtual_ranks: int | None = None,
) -> Plan:
    """Work out a training step, such as every step but the first one is.

    Args:
        units: in the order of the forward pass.
        world_size: number of ranks.
        strategy: a ``Strategy``, or the name of one.
        precision: by default, everything has the dtype of the units.
        optimizer_states: arrays that the optimizer keeps for each parameter; Adam has 2, with
            ``amsgrad`` 3, Muon 1.
        prefetch: how many units are gathered ahead of their use.
        prefetch_bytes: how many bytes at most; a unit that is larger alone is fetched nevertheless.
        overlap: gradients are reduced while the backward pass goes on.
        microbatches: forward and backward passes before the update.
        sync: "each": gradients are reduced in each of them; "last": only in the last one, and
            added up until then.
        windowed: all ranks that share a copy are on one host, with the parameters in a window.
        brought: a GPU computes, and gets all parameters from the memory of the host, where each
            rank has them.
        rank: whose memory is told; the last ranks may have less of the optimizer's state.
        tensor: number of ranks over which parameters are cut, each with ``world_size`` ranks that
            shard its boxes; ``units`` have the sizes of the boxes.
        whole: all units are gathered at once, as by ``Step.whole``.
        costs: of the transport, for ``seconds``; or what tells them for each collective.
        compute_seconds: of each unit's forward pass; a backward pass counts twice as long. With
            ``costs``, for ``step_seconds`` and ``exposed_seconds``.
        compression: what is quantised on its way; in every group of ranks, unless a ``Travel`` says
            more. Of a ``UnitSize`` all is that is not ``exact``.
        virtual_ranks: as of ``FSDP``; all passes are those of each of them then, and gradients are
            reduced once.

    Returns:
        What the step gathers, reduces, holds and sends, in order; ``print(plan)`` shows it.

    Raises:
        ArgumentError: something of this makes no sense.

    Example::

        units = [fc.UnitSize(f"layer{i}", 1_000_000) for i in range(8)]
        plan = fc.make_plan(units, world_size=16, strategy="shard_grad_op")
        print(plan)
    """
    quantised = compression.compression if isinstance(compression, Travel) else compression
    sizes = sizes_of(units, quantised)
    if isinstance(strategy, str):
        strategy = Strategy(strategy)
    world_size, rank = _checked_world(world_size, rank)
    as_choice(sync, get_args(Sync), "sync")
    states = as_int(optimizer_states, "optimizer_states", minimum=0)
    place, virtual = strategy.place(world_size), virtual_ranks is not None
    travel = Travel.of(compression, place) if isinstance(compression, Compression) else compression
    if virtual_ranks is not None:
        virtual_ranks = as_int(virtual_ranks, "virtual_ranks", minimum=world_size)
        if travel is not None:
            raise ArgumentError(
                "compression does not go together with virtual_ranks; plan with one of them"
            )
    leaves = Leaves(LeafTree(virtual_ranks or world_size), place, rank, virtual)
    lags = travel is not None and travel.lags
    layouts = lay_out(sizes, place.shards, precision, virtual=virtual, lags=lags)
    if travel is not None:
        _check_float32(layouts)
    step = PlannedStep(
        units=layouts,
        leaves=leaves,
        ahead=Prefetch(prefetch, prefetch_bytes, reductions=int(bool(overlap) and world_size > 1)),
        microbatches=as_int(microbatches, "microbatches", minimum=1),
        deferred=sync == "last",
        storage=storage_kind(place, windowed=windowed, pinned=brought),
        tensor=as_int(tensor, "tensor", minimum=1),
        whole=bool(whole),
        travel=travel,
    )
    log = walk(step)
    compute = None if compute_seconds is None else _compute(compute_seconds, sizes)
    passes = step.microbatches * (len(leaves.mine) if virtual else 1)
    plan = Plan(
        strategy=strategy,
        placement=place,
        world_size=world_size,
        rank=rank,
        units=sizes,
        microbatches=step.microbatches,
        operations=tuple(log.collectives),
        persistent=persistent(layouts, place, rank, optimizer_states=states, windowed=windowed),
        peak_live=log.peak,
        tensor=step.tensor,
        whole=step.whole,
        virtual_ranks=virtual_ranks,
        quantising=0 if travel is None else travel.kept(_travelling(layouts), rank),
        compute_seconds=None if compute is None else 3 * passes * sum(compute),
    )
    return plan if costs is None else _timed(plan, log, costs, compute)


def _travelling(units: Iterable[UnitBytes]) -> list[tuple[FlatLayout, Sequence[Span]]]:
    """Return of each unit that is trained what travels, and what of that travels as it is."""
    return [(unit.trained, unit.exact) for unit in units if unit.trained.size]


def _check_float32(units: Iterable[UnitBytes]) -> None:
    """Raise ArgumentError where something trained would travel otherwise."""
    for unit in units:
        if unit.trained.size and unit.trained.dtype != np.float32:
            raise ArgumentError(
                f"compression is for float32, but unit {unit.name!r} travels as "
                f"{unit.trained.dtype}; plan without precision, and with float32 parameters"
            )


def _checked_world(world_size: int, rank: int) -> tuple[int, int]:
    world_size = as_int(world_size, "world_size", minimum=1)
    rank = as_int(rank, "rank", minimum=0)
    if rank >= world_size:
        raise ArgumentError(f"rank {rank} is outside of a world of {world_size} ranks")
    return world_size, rank


def _compute(given: Sequence[float], units: Sequence[UnitSize]) -> list[float]:
    count = len(given) if isinstance(given, Sized) else repr(given)
    if count != len(units):
        raise ArgumentError(
            f"compute_seconds must have one number for each of the {len(units)} units, got {count}"
        )
    return [
        as_finite(value, f"compute_seconds of unit {unit.name!r}", minimum=0)
        for value, unit in zip(given, units, strict=True)
    ]


def _timed(
    plan: Plan,
    log: StepLog,
    costs: Costs | Capabilities | CollectiveSeconds,
    compute: Sequence[float] | None,
) -> Plan:
    """Add what follows from the costs of a transport."""

    def taken_by(o: PlannedCollective) -> float:
        if isinstance(costs, Costs | Capabilities):
            return seconds(o.kind, o.group_size, o.nbytes, costs)
        return costs(o)

    operations = tuple(dataclasses.replace(o, seconds=taken_by(o)) for o in plan.operations)
    times = None
    if compute is not None:
        taken = {number: o.seconds or 0.0 for number, o in enumerate(operations)}
        times = simulate(log.events, taken, compute)
    return dataclasses.replace(plan, operations=operations, times=times)
