"""``Plan``: a training step as data, before anything runs, and as text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from fsdpcore.core import text
from fsdpcore.fsdp.plan.sizes import Persistent, UnitSize
from fsdpcore.fsdp.plan.step_log import Live, PlannedCollective
from fsdpcore.fsdp.plan.times import Times
from fsdpcore.fsdp.sharding.placement import Placement
from fsdpcore.fsdp.sharding.strategy import Strategy


@dataclass(frozen=True)
class Plan:
    """One training step of one rank: what it holds, what it sends, and how long that takes.

    With F ranks that share a copy, n elements of a unit in ``padded = ceil(n / F) * F``, ``shard =
    padded / F``, and p, r, m bytes of an element of gathered parameters, of gradients, and of the
    master shard, a rank holds between steps, for each unit:

    - parameters: ``shard * p``, or ``padded * p`` where gathered parameters stay until the update;
      and ``shard * m`` if the master shard is not what is gathered;
    - gradients: ``shard * r``, or ``padded * r`` where each rank keeps those of the whole buffer;
    - optimizer: m bytes for each state of each element of the shard that is not padding.

    Not counted are what the model computes with, and what a transport keeps for its messages.

    Attributes:
        strategy, placement, world_size, rank: what it is for.
        units: in the order of the forward pass.
        microbatches: forward and backward passes before the update, or of each virtual rank.
        operations: in the order in which they are issued.
        persistent: held between steps.
        peak_live: alive during the step only, at the moment when most is.
        compute_seconds: forward and backward passes of all units; None if not given.
        times: of the step, with the communication that nothing hides; None if not known.
        pinned: how much of ``persistent`` is in the memory of the host, while a GPU computes.
        tensor: ranks that have the boxes of the same parameters; units are those of one of them.
        whole: each pass is that of a function that gets all units at once.
        virtual_ranks: as of ``FSDP``.
        quantising: as of ``HeldMemory``.
    """

    strategy: Strategy
    placement: Placement
    world_size: int
    rank: int
    units: tuple[UnitSize, ...]
    microbatches: int
    operations: tuple[PlannedCollective, ...]
    persistent: Persistent
    peak_live: Live
    compute_seconds: float | None = None
    times: Times | None = None
    pinned: int = 0
    tensor: int = 1
    whole: bool = False
    virtual_ranks: int | None = None
    quantising: int = 0

    @property
    def peak_live_bytes(self) -> int:
        """What is alive during the step only, at most."""
        return self.peak_live.total

    @property
    def peak_bytes(self) -> int:
        """The most that the rank ever holds."""
        return self.persistent.total + self.quantising + self.peak_live.total

    @property
    def version_bytes(self) -> int:
        """This rank's part of a version of an elastic job, about.

        That is the master parameters and the optimizer's state, dealt out evenly over the ranks. It
        is sent to a rank of another host for each version, unless that is a replica. A rank keeps
        up to four times as much: its own part and that of another, of two versions.
        """
        place = self.placement
        masters = sum(
            size * np.dtype(dtype).itemsize
            for unit in self.units
            for size, dtype in ((unit.size, unit.dtype), *unit.frozen_parts)
        )
        return (masters // place.shards + self.persistent.optimizer) // place.replicas

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
        kind = self.placement.reduction
        exchanged = {o.unit for o in self.operations if o.kind == "all_to_all_v"}
        return len(exchanged) + sum(o.kind == kind and o.phase != "update" for o in self.operations)

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
        """Return all operations as a text."""
        return _operations(self)

    def __str__(self) -> str:
        return _summary(self)

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
            "placement": {
                "shards": place.shards,
                "replicas": place.replicas,
                "regather": place.regather,
                "keep": place.keep.name.lower(),
            },
            "world_size": self.world_size,
            "rank": self.rank,
            "tensor": self.tensor,
            "microbatches": self.microbatches,
            "whole": self.whole,
            "virtual_ranks": self.virtual_ranks,
            "units": [_unit_as_dict(unit) for unit in self.units],
            "persistent": dataclasses.asdict(self.persistent),
            "peak_live": dataclasses.asdict(self.peak_live),
            "peak_live_bytes": self.peak_live_bytes,
            "peak_bytes": self.peak_bytes,
            "pinned": self.pinned,
            "quantising": self.quantising,
            "bytes_sent": self.bytes_sent,
            "version_bytes": self.version_bytes,
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


def placed(plan: Plan) -> str:
    """Say in one line what a plan is for."""
    place, elements = plan.placement, sum(unit.elements for unit in plan.units)
    shape = f"{place.shards} shards" if place.shards > 1 else "nothing sharded"
    if place.replicas > 1:
        shape += f", {place.replicas} replicas"
    if place.regather != place.shards:
        shape += f", {place.regather} gather again"
    if plan.virtual_ranks is not None:
        shape += f", {plan.virtual_ranks} virtual ranks"
    if plan.tensor > 1:
        shape += f", parameters cut over {plan.tensor}"
    return (
        f"{plan.strategy.name}, rank {plan.rank} of {plan.world_size} ({shape}): "
        f"{len(plan.units)} units, {text.count(elements)} parameters"
    )


def _memory(plan: Plan) -> str:
    """Return the memory of one rank as a text."""
    rows = [
        ("parameters", plan.persistent.parameters),
        ("gradients", plan.persistent.gradients),
        ("optimizer", plan.persistent.optimizer),
        ("gathered, at the peak", plan.peak_live.parameters),
        ("full gradients, at the peak", plan.peak_live.gradients),
        ("peak", plan.peak_bytes),
    ]
    if plan.quantising:
        rows.insert(3, ("packed, and left out of it", plan.quantising))
    if plan.pinned:
        rows.append(("of which on the host", plan.pinned))
    return text.columns(("memory", "bytes"), [(name, text.size(nbytes)) for name, nbytes in rows])


def _communication(plan: Plan) -> str:
    """Return what a rank sends in a step as a table, one line for equal operations."""
    found: dict[tuple[str, ...], tuple[int, int, float]] = {}
    for operation in plan.operations:
        key = operation.phase, operation.kind, str(operation.group_size)
        number, sent, taken = found.get(key, (0, 0, 0.0))
        found[key] = number + 1, sent + operation.bytes_sent, taken + (operation.seconds or 0.0)
    timed = plan.seconds is not None
    rows = [
        (*key, str(number), text.size(sent), text.duration(taken) if timed else "")
        for key, (number, sent, taken) in found.items()
    ]
    total = str(len(plan.operations)), text.size(plan.bytes_sent), text.duration(plan.seconds)
    header = ("communication", "operation", "ranks", "number", "sent", "time")
    return text.columns(header, [*rows, ("total", "", "", *total)], left=2)


def _summary(plan: Plan) -> str:
    """Return a plan in short."""
    parts = [placed(plan), _memory(plan), _communication(plan)]
    words = (
        [f"{text.size(plan.padding_bytes)} of what is sent is padding"]
        if plan.padding_bytes
        else []
    )
    if plan.step_seconds is not None:
        words.append(
            f"a step takes {text.duration(plan.step_seconds)}, of which "
            f"{text.duration(plan.exposed_seconds)} is waiting for communication"
        )
    return "\n\n".join([*parts, *words])


def _operations(plan: Plan) -> str:
    """Return all operations of a plan, one a line."""
    several = any(operation.microbatch for operation in plan.operations)
    rows = [
        (
            str(operation.microbatch) if several else "",
            operation.phase,
            operation.unit,
            operation.kind,
            "background" if operation.background else "",
            str(operation.group_size),
            text.size(operation.nbytes),
            text.size(operation.padding) if operation.padding else "",
            text.size(operation.bytes_sent),
            text.size(operation.live_bytes),
            text.duration(operation.seconds),
        )
        for operation in plan.operations
    ]
    header = ("pass", "phase", "unit", "operation", "", "ranks", "bytes", "padding", "sent", "live")
    return text.columns((*header, "time"), rows, left=5)
