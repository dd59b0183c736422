"""What one rank holds of a unit all the time, before anything of it is made."""

from __future__ import annotations

from fsdpcore.fsdp.offload.offload import ArrayKind
from fsdpcore.fsdp.offload.offload_store import Needs
from fsdpcore.fsdp.sharding.process_groups import ProcessGroups
from fsdpcore.fsdp.units.optimizers import Optimizers
from fsdpcore.fsdp.units.sharded_unit import ShardedUnit
from fsdpcore.fsdp.units.updates import state_sizes


def needs_of(unit: ShardedUnit, groups: ProcessGroups, optimizers: Optimizers | None) -> Needs:
    """Return the sizes of what one rank holds of a unit all the time."""
    needs: dict[ArrayKind, list[int]] = {kind: [] for kind in ArrayKind}
    dtypes, place = unit.dtypes, groups.placement
    for part in unit.flat_parameters:
        trained, layout = part is unit.trained_parameter, part.layout
        held = place.parameters_held(layout)
        needs[ArrayKind.TRAINED if trained else ArrayKind.FROZEN].append(
            held * layout.dtype.itemsize
        )
    layout, master = unit.layout, dtypes.master.itemsize
    if dtypes.mixed:
        needs[ArrayKind.MASTER].append(layout.shard_size * master)
    needs[ArrayKind.GRADIENT].append(place.gradients_held(layout) * dtypes.grad.itemsize)
    if optimizers is not None and unit.trainable:
        rank, found = groups.shards.rank, optimizers.of_unit(unit.name)
        sizes = state_sizes(layout, rank, found, unit.boxes)
        needs[ArrayKind.STATE].extend(elements * master for elements in sizes)
    return needs
