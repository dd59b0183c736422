"""Values from outside: ``unit.load``, ``unit.update_shards``."""

from __future__ import annotations

from collections.abc import Mapping

from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import rounds_into
from fsdpcore.core.device import Device
from fsdpcore.core.errors import ArgumentError
from fsdpcore.fsdp.units.sharded_unit import ShardedUnit


def load_arrays(unit: ShardedUnit, values: Mapping[str, Array]) -> None:
    """Replace parameters by whole arrays; see ``Unit.load``."""
    device = unit.device
    found = {
        param.name: (param.shape, part.master.dtype)
        for part in unit.flat_parameters
        for param in part.layout.params
    }
    arrays = {}
    for name, value in values.items():
        if name not in found:
            raise ArgumentError(
                f"unit {unit.name!r} has no parameter {name!r} to load; it has "
                f"{', '.join(found) or 'none'}"
            )
        shape, dtype = found[name]
        array = arrays[name] = device.given(value, f"{unit.name}.{name} to load")
        if array.shape != shape or not rounds_into(array.dtype, dtype):
            raise ArgumentError(
                f"{unit.name}.{name} has shape {shape} and dtype {dtype}, but the array to "
                f"load {array.shape} and {array.dtype}"
            )
    # What shows parameters of the unit itself changes while it is loaded.
    shown = [flat for part in unit.flat_parameters if (flat := part.storage.shown) is not None]
    for name, array in arrays.items():
        if any(_shared(array, flat, device) for flat in shown):
            arrays[name] = array.copy()
    with unit.rewriting() as parts:
        for part in parts:
            part.load(arrays)


def _shared(given: Array, own: Array, device: Device) -> bool:
    """Whether what a caller has given may share memory with an array of the device."""
    if not device.owns(given):
        return False
    # Of a GPU's arrays, only for contiguous ones can it be said.
    return not (device.on_host or given.flags.c_contiguous) or device.overlap(given, own)


def checked_shard(unit: ShardedUnit, flat: Array) -> Array:
    """Return what ``flat`` has for a unit's shard, without padding, on the host or the device.

    Raises:
        ArgumentError: another shape or a dtype that is not floating, or of another device.
    """
    array = unit.device.given(flat, f"the shard of unit {unit.name!r}")
    sizes = (unit.valid_size, unit.shard.size)
    if array.ndim != 1 or array.size not in sizes:
        raise ArgumentError(
            f"the shard of unit {unit.name!r} on this rank has {sizes[0]} elements, or {sizes[1]} "
            f"with padding, in one dimension; got an array of shape {array.shape}"
        )
    if not rounds_into(array.dtype, unit.shard.dtype):
        raise ArgumentError(
            f"the shard of unit {unit.name!r} has dtype {unit.shard.dtype}, to which {array.dtype} "
            "cannot be rounded"
        )
    return array[: sizes[0]]


def update_shard(unit: ShardedUnit, flat: Array) -> None:
    """Replace this rank's shard of the trained parameters; see ``Unit.update_shards``."""
    values = checked_shard(unit, flat)
    with unit.writing() as shard:
        unit.device.assign(shard[: values.size], values)
