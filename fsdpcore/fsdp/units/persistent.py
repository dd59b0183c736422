"""What one rank holds of a unit all the time, told before anything of it is made.

Stores and plans ask here. What was made is counted by ``OffloadStore``: the two differ where an
optimizer makes more state than its ``state_shapes`` say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.fsdp.offload.arrays import ArrayKind, PersistentArray
from fsdpcore.fsdp.sharding.placement import Placement
from fsdpcore.fsdp.units.optimizers import Optimizers
from fsdpcore.fsdp.units.precision import Dtypes
from fsdpcore.fsdp.units.sharded_unit import ShardedUnit
from fsdpcore.fsdp.units.updates import state_sizes


def persistent_arrays(
    trained: FlatLayout,
    frozen: Iterable[FlatLayout],
    dtypes: Dtypes,
    placement: Placement,
    shard: int,
    states: Sequence[int],
    *,
    windowed: bool = False,
) -> list[PersistentArray]:
    """Return what one rank holds of a unit, in the order in which it is made.

    Args:
        trained: what is trained, in the dtype that is gathered.
        frozen: what is not.
        dtypes: of what is trained.
        placement: who keeps what.
        shard: which of the shards the rank has.
        states: elements of each array of the optimizer.
        windowed: the parameters are in a window, of which a rank's part is its shard.
    """
    whole = placement.whole_parameters and not windowed
    kinds = [*((ArrayKind.FROZEN, layout) for layout in frozen), (ArrayKind.TRAINED, trained)]
    found = [
        _persistent(kind, layout, layout.dtype.itemsize, shard, whole) for kind, layout in kinds
    ]
    if dtypes.mixed:
        found.append(_persistent(ArrayKind.MASTER, trained, dtypes.master.itemsize, shard, False))
    found += [PersistentArray(ArrayKind.STATE, size * dtypes.master.itemsize) for size in states]
    whole = placement.whole_gradients
    return [*found, _persistent(ArrayKind.GRADIENT, trained, dtypes.grad.itemsize, shard, whole)]


def _persistent(
    kind: ArrayKind, layout: FlatLayout, itemsize: int, shard: int, whole: bool
) -> PersistentArray:
    size, valid = layout.shard_size, layout.valid_size(shard)
    if whole:
        size, valid = layout.padded_size, layout.size
    return PersistentArray(kind, size * itemsize, (size - valid) * itemsize)


def persistent_of(
    unit: ShardedUnit,
    placement: Placement,
    shard: int,
    optimizers: Optimizers | None,
    *,
    windowed: bool = False,
) -> list[PersistentArray]:
    """Return what one rank would hold of a unit; the arguments are as above.

    The engine's own ``placement`` says what it holds; another one what it would hold with that.
    """
    layouts = [part.layout for part in unit.flat_parameters]
    if unit.layout.world_size != placement.shards:
        layouts = [replace(layout, world_size=placement.shards) for layout in layouts]
    trained, *frozen = layouts
    states: Sequence[int] = ()
    if optimizers is not None and unit.trainable:
        states = state_sizes(trained, shard, optimizers.of_unit(unit.name), unit.boxes)
    return persistent_arrays(
        trained, frozen, unit.dtypes, placement, shard, states, windowed=windowed
    )
