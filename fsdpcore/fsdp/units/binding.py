"""What all units of an engine have in common."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpcore.fsdp.sharding.process_groups import ProcessGroups
from fsdpcore.fsdp.sharding.virtual_ranks import Leaves
from fsdpcore.fsdp.units.buffer_pool import BufferPool
from fsdpcore.fsdp.units.optimizers import Optimizers
from fsdpcore.fsdp.units.window import WindowMeetings
from fsdpcore.fsdp.units.wire import Wire


@dataclass(frozen=True)
class Binding:
    """What an engine gives to each of its units.

    Attributes:
        groups: of ranks.
        pool: of gathered parameters and full gradients.
        optimizers: which optimizer updates which parameter; None without one.
        strategy: its name.
        algorithm: of the collectives.
        seed: of the initialisers.
        leaves: whose gradients are summed.
        wire: what travels quantised; None for nothing.
        meetings: of the ranks, before they read what lies in their window.
        loads: by rank of a shard, what it has to do for parameters that it owns in updates.
    """

    groups: ProcessGroups
    pool: BufferPool
    optimizers: Optimizers | None
    strategy: str
    algorithm: str
    seed: int
    leaves: Leaves
    wire: Wire | None
    meetings: WindowMeetings
    loads: list[int]
