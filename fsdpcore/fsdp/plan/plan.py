"""``make_plan``: a training step as data, before anything runs.

Pure arithmetic: no arrays, no communication.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

from fsdpcore.core.capabilities import Capabilities
from fsdpcore.core.checks import as_choice, as_finite, as_int
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.policy import Costs
from fsdpcore.fsdp.plan import table as plan_table
from fsdpcore.fsdp.plan.sizes import Persistent, UnitSize, lay_out, persistent
from fsdpcore.fsdp.plan.times import Times, seconds, simulate
from fsdpcore.fsdp.plan.units import sizes_of
from fsdpcore.fsdp.plan.walk import Job, Live, Operation, Walk
from fsdpcore.fsdp.sharding.strategy import Placement, Strategy
from fsdpcore.fsdp.step.schedule import Prefetch
from fsdpcore.fsdp.units.precision import Precision
from fsdpcore.fsdp.units.unit import Unit

Sync = Literal["each", "last"]


@dataclass(frozen=True)
class Plan:
    """One training step of one rank: what it holds, what it sends, and how long that takes.

    With F ranks that share a copy, n elements of a unit in ``padded = ceil(n / F) * F``, ``shard =
    padded / F``, and p, r, m bytes of an element of gathered parameters, of gradients, and of the
    master shard, a rank holds between steps, for each unit:

    - parameters: ``shard * p``, or ``padded * p`` where gathered parameters stay until the update;
      and ``shard * m`` if the master shard is not what is gathered;
    - gradients: ``shard * r``;
    - optimizer: m bytes for each state of each element of the shard that is not padding.

    Not counted are what the model computes with, and what a transport keeps for its messages.

    Attributes:
        strategy, placement, world_size, rank: what it is for.
        units: in the order of the forward pass.
        microbatches: forward and backward passes before the update.
        operations: in the order in which they are issued.
        persistent: held between steps.
        peak_live: alive during the step only, at the moment when most is.
        compute_seconds: forward and backward passes of all units; None if not given.
        times: of the step, with the communication that nothing hides; None if not known.
        pinned: how much of ``persistent`` is in the memory of the host, while a GPU computes.
        tensor: ranks that have the boxes of the same parameters; units are those of one of them.
        whole: each pass is that of a function that gets all units at once.
    """

    strategy: Strategy
    placement: Placement
    world_size: int
    rank: int
    units: tuple[UnitSize, ...]
    microbatches: int
    operations: tuple[Operation, ...]
    persistent: Persistent
    peak_live: Live
    compute_seconds: float | None = None
    times: Times | None = None
    pinned: int = 0
    tensor: int = 1
    whole: bool = False

    @property
    def peak_live_bytes(self) -> int:
        """What is alive during the step only, at most."""
        return self.peak_live.total

    @property
    def peak_bytes(self) -> int:
        """The most that the rank ever holds."""
        return self.persistent.total + self.peak_live.total

    @property
    def bytes_sent(self) -> int:
        """By this rank, in the whole step, padding and the norm's reduction included."""
        return sum(operation.bytes_sent for operation in self.operations)

    @property
    def padding_bytes(self) -> float:
        """How much of ``bytes_sent`` is padding, as the mean over the ranks."""
        return float(sum((o.padding_sent for o in self.operations), Fraction(0)))

    @property
    def gathers(self) -> int:
        """How many all_gathers of parameters; a unit with frozen ones has several."""
        return sum(o.kind == "all_gather" and o.phase != "update" for o in self.operations)

    @property
    def reductions(self) -> int:
        """How often gradients of a unit are reduced; over shards and replicas counts once."""
        kind = "reduce_scatter" if self.placement.gathers else "all_reduce"
        return sum(o.kind == kind and o.phase != "update" for o in self.operations)

    @property
    def seconds(self) -> float | None:
        """Of communication, hidden or not; None if the transport's costs are not known."""
        known = [o.seconds for o in self.operations if o.seconds is not None]
        return sum(known) if len(known) == len(self.operations) else None

    @property
    def step_seconds(self) -> float | None:
        """Of the step, without the optimizer; None without ``costs`` and ``compute_seconds``."""
        return None if self.times is None else self.times.step

    @property
    def exposed_seconds(self) -> float | None:
        """In which the rank waits for communication; None as ``step_seconds``."""
        return None if self.times is None else self.times.exposed

    def table(self) -> str:
        """Return all operations as a table."""
        return plan_table.operations(self)

    def __str__(self) -> str:
        return plan_table.summary(self)

    def __repr__(self) -> str:
        return (
            f"<Plan of a step with {self.strategy.name!r} on rank {self.rank} of "
            f"{self.world_size}: {len(self.units)} units, {len(self.operations)} operations, at "
            f"most {self.peak_bytes} bytes>"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return everything as numbers, strings, lists and dictionaries, for JSON."""
        place = self.placement
        return {
            "strategy": dataclasses.asdict(self.strategy),
            "placement": dataclasses.asdict(place) | {"keep": place.keep.name.lower()},
            "world_size": self.world_size,
            "rank": self.rank,
            "tensor": self.tensor,
            "microbatches": self.microbatches,
            "whole": self.whole,
            "units": [_unit_as_dict(unit) for unit in self.units],
            "persistent": dataclasses.asdict(self.persistent),
            "peak_live": dataclasses.asdict(self.peak_live),
            "peak_live_bytes": self.peak_live_bytes,
            "peak_bytes": self.peak_bytes,
            "pinned": self.pinned,
            "bytes_sent": self.bytes_sent,
            "padding_bytes": self.padding_bytes,
            "gathers": self.gathers,
            "reductions": self.reductions,
            "seconds": self.seconds,
            "compute_seconds": self.compute_seconds,
            "step_seconds": self.step_seconds,
            "exposed_seconds": self.exposed_seconds,
            "operations": [dataclasses.asdict(operation) for operation in self.operations],
        }


def _unit_as_dict(unit: UnitSize) -> dict[str, Any]:
    frozen = [[size, str(dtype)] for size, dtype in unit.frozen_parts]
    ties = [list(tie) for tie in unit.ties]
    told = {"name": unit.name, "size": unit.size, "dtype": str(unit.dtype)}
    return told | {"frozen": frozen, "ties": ties}


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
    costs: Costs | Capabilities | None = None,
    compute_seconds: Sequence[float] | None = None,
) -> Plan:
    """Work out a training step, such as every step but the first one is.

    Args:
        units: in the order of the forward pass.
        world_size: number of ranks.
        strategy: a ``Strategy``, or the name of one.
        precision: by default, everything has the dtype of the units.
        optimizer_states: arrays that the optimizer keeps for each parameter; Adam has 2.
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
        costs: of the transport, for ``seconds``.
        compute_seconds: of each unit's forward pass; a backward pass counts twice as long. With
            ``costs``, for ``step_seconds`` and ``exposed_seconds``.

    Raises:
        ArgumentError: something of this makes no sense.
    """
    sizes = sizes_of(units)
    if isinstance(strategy, str):
        strategy = Strategy(strategy)
    world_size = as_int(world_size, "world_size", minimum=1)
    rank = as_int(rank, "rank", minimum=0)
    if rank >= world_size:
        raise ArgumentError(f"rank {rank} is outside of a world of {world_size} ranks")
    as_choice(sync, get_args(Sync), "sync")
    states = as_int(optimizer_states, "optimizer_states", minimum=0)
    place = strategy.place(world_size)
    layouts = lay_out(sizes, place.shards, precision)
    job = Job(
        units=layouts,
        placement=place,
        rank=rank,
        ahead=Prefetch(prefetch, prefetch_bytes, reductions=int(bool(overlap))),
        microbatches=as_int(microbatches, "microbatches", minimum=1),
        deferred=sync == "last",
        windowed=windowed,
        brought=brought,
        tensor=as_int(tensor, "tensor", minimum=1),
        whole=bool(whole),
    )
    walk = Walk(job)
    walk.run()
    compute = None if compute_seconds is None else _compute(compute_seconds, sizes)
    plan = Plan(
        strategy=strategy,
        placement=place,
        world_size=world_size,
        rank=rank,
        units=sizes,
        microbatches=job.microbatches,
        operations=tuple(walk.operations),
        persistent=persistent(layouts, place, rank, optimizer_states=states, windowed=windowed),
        peak_live=walk.peak,
        tensor=job.tensor,
        whole=job.whole,
        compute_seconds=None if compute is None else 3 * job.microbatches * sum(compute),
    )
    return plan if costs is None else _timed(plan, walk, costs, compute)


def _compute(given: Sequence[float], units: Sequence[UnitSize]) -> list[float]:
    if len(given) != len(units):
        raise ArgumentError(
            f"compute_seconds must have one number for each of the {len(units)} units, "
            f"got {len(given)}"
        )
    return [
        as_finite(value, f"compute_seconds of unit {unit.name!r}", minimum=0)
        for value, unit in zip(given, units, strict=True)
    ]


def _timed(
    plan: Plan, walk: Walk, costs: Costs | Capabilities, compute: Sequence[float] | None
) -> Plan:
    """Add what follows from the costs of a transport."""
    operations = tuple(
        dataclasses.replace(o, seconds=seconds(o.kind, o.group_size, o.nbytes, costs))
        for o in plan.operations
    )
    times = None
    if compute is not None:
        taken = {number: o.seconds or 0.0 for number, o in enumerate(operations)}
        times = simulate(walk.events, taken, compute)
    return dataclasses.replace(plan, operations=operations, times=times)
