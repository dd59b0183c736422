"""``memory_estimate``: what a rank holds in training, by what it is for.

Pure arithmetic on a plan: nothing is allocated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fsdpcore.compress.compression import Compression
from fsdpcore.core import text
from fsdpcore.core.checks import as_choice
from fsdpcore.core.errors import ArgumentError
from fsdpcore.fsdp.plan.make_plan import Sync, make_plan
from fsdpcore.fsdp.plan.sizes import Persistent, UnitSize, even_units, lay_out
from fsdpcore.fsdp.plan.units import sizes_of
from fsdpcore.fsdp.sharding.strategy import Strategy
from fsdpcore.fsdp.units.precision import Precision
from fsdpcore.fsdp.units.unit import Unit

Offloaded = Literal["none", "parameters", "all"]
OFFLOADS: tuple[Offloaded, ...] = ("none", "parameters", "all")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank, padding included; what the model computes with is not counted.

    Attributes:
        strategy, world_size, offload: what it is for.
        parameters: shards, and what is gathered as far as it stays until the update.
        gradients: what is kept of the reduced gradients. Where gradients are added up before they
            are reduced, all of them, of which that is a part.
        optimizer: its state.
        live_units: parameters that are gathered for a while, when most memory is in use.
        communication: other buffers of gradients: written, on their way, or waiting for that; with
            ``compression`` packed bytes, and what quantising has left out, too.
        host: what is offloaded, and not counted in the above.
        unsharded: the total of ``no_shard``, all else being equal, and nothing moved.
    """

    strategy: Strategy
    world_size: int
    offload: Offloaded
    parameters: int
    gradients: int
    optimizer: int
    live_units: int
    communication: int
    host: Persistent
    unsharded: int

    @property
    def states(self) -> int:
        """Parameters, gradients and optimizer: what the ZeRO paper calls model states."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The most that the rank holds, without what is offloaded."""
        return self.states + self.live_units + self.communication

    @property
    def saving(self) -> int:
        """How many bytes less than with ``no_shard``."""
        return self.unsharded - self.total

    def as_dict(self) -> dict[str, Any]:
        """Return everything as numbers, strings and dictionaries, for JSON."""
        return dataclasses.asdict(self) | {
            "states": self.states,
            "total": self.total,
            "saving": self.saving,
        }

    def __str__(self) -> str:
        rows = [
            ("parameters", self.parameters, self.host.parameters),
            ("gradients", self.gradients, self.host.gradients),
            ("optimizer", self.optimizer, self.host.optimizer),
            ("live units", self.live_units, 0),
            ("communication buffers", self.communication, 0),
            ("total", self.total, self.host.total),
            ("saving against no_shard", self.saving, 0),
        ]
        moved = self.offload != "none"
        return text.columns(
            (f"{self.strategy.name}, {self.world_size} ranks", "bytes", "offloaded"),
            [
                (name, text.size(here), text.size(there) if moved else "")
                for name, here, there in rows
            ],
        )


def memory_estimate(
    params: float | Iterable[UnitSize | Unit],
    world_size: int,
    *,
    layers: int | None = None,
    strategy: Strategy | str = "full_shard",
    precision: Precision | None = None,
    optimizer_states: int = 2,
    prefetch: int = 1,
    prefetch_bytes: int | None = None,
    overlap: bool = True,
    microbatches: int = 1,
    sync: Sync = "each",
    windowed: bool = False,
    offload: Offloaded = "none",
    rank: int = 0,
    virtual_ranks: int | None = None,
    compression: Compression | None = None,
) -> MemoryEstimate:
    """Work out what a rank holds when it holds most.

    The rules are those of ``make_plan``. What is offloaded is not in memory, but for the parameters
    of units in use and of those that come next. What an update loads of it is not counted.

    Args:
        params: units, or the number of float32 parameters.
        world_size: number of ranks.
        layers: of how many equal units a number of parameters is; by default of one.
        offload: what is moved from the device to the host's memory, or from there to files:
            "none", "parameters", or "all", which is parameters, shards of gradients, and the
            optimizer's state.
        strategy, precision, optimizer_states, sync, microbatches: as of ``make_plan``.
        prefetch, prefetch_bytes, overlap, windowed, rank: as of ``make_plan``.
        virtual_ranks, compression: as of ``make_plan``.

    Returns:
        The bytes of a rank, by what they are for; ``print(estimate)`` shows them.

    Raises:
        ArgumentError: something of this makes no sense.

    Example::

        estimate = fc.memory_estimate(7e9, world_size=64, layers=32)
        print(estimate.total)
    """
    units = _units(params, layers, compression)
    as_choice(offload, OFFLOADS, "offload")
    if windowed and offload != "none":
        raise ArgumentError(
            "what is in a window is in use at any time; leave out either windowed or offload"
        )
    planned = functools.partial(
        make_plan,
        units,
        world_size,
        precision=precision,
        optimizer_states=optimizer_states,
        prefetch=prefetch,
        prefetch_bytes=prefetch_bytes,
        overlap=overlap,
        microbatches=microbatches,
        sync=sync,
        windowed=windowed,
        rank=rank,
        virtual_ranks=virtual_ranks,
        compression=compression,
    )
    plan, plain = planned(strategy=strategy), planned(strategy="no_shard")
    virtual = virtual_ranks is not None
    layouts = lay_out(units, plan.placement.shards, precision, virtual=virtual)
    host = moved(plan.persistent, offload)
    live = plan.peak_live.parameters
    if offload != "none" and plan.placement.whole_parameters:
        live = _most_in_a_row([unit.gathered for unit in layouts], 1 + prefetch)
    shards = plan.persistent.gradients - host.gradients
    full = plan.peak_live.gradients
    gradients = shards
    if virtual or (sync == "last" and microbatches > 1):
        gradients = min(shards + full, sum(unit.gradients for unit in layouts))
    return MemoryEstimate(
        strategy=plan.strategy,
        world_size=plan.world_size,
        offload=offload,
        parameters=plan.persistent.parameters - host.parameters,
        gradients=gradients,
        optimizer=plan.persistent.optimizer - host.optimizer,
        live_units=live,
        communication=shards + full - gradients + plan.quantising,
        host=host,
        unsharded=plain.peak_bytes,
    )


def _units(
    params: float | Iterable[UnitSize | Unit], layers: int | None, compression: Compression | None
) -> tuple[UnitSize, ...]:
    if not isinstance(params, Iterable):
        return even_units(params, 1 if layers is None else layers)
    units = sizes_of(params, compression)
    if layers is not None:
        raise ArgumentError("layers belongs to a number of parameters; units have their own")
    return units


def _most_in_a_row(sizes: Sequence[int], units: int) -> int:
    """The largest sum of so many sizes that follow each other."""
    return max((sum(sizes[n : n + units]) for n in range(len(sizes))), default=0)


def moved(persistent: Persistent, offload: Offloaded) -> Persistent:
    """Return what is offloaded of what a rank holds."""
    if offload == "all":
        return persistent
    return Persistent(persistent.parameters if offload == "parameters" else 0, 0, 0)
