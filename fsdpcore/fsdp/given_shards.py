"""Shards that come from outside: ``unit.update_shards`` and ``engine.update_shards``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fsdpcore.buffers import Array
from fsdpcore.errors import ArgumentError
from fsdpcore.fsdp.checks import rounds_into
from fsdpcore.fsdp.consent import check_equal, consent

if TYPE_CHECKING:
    from fsdpcore.fsdp.engine import FSDP
    from fsdpcore.fsdp.unit import Unit


def checked_shard(unit: Unit, flat: Array) -> Array:
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


def update_shard(unit: Unit, flat: Array) -> None:
    """Replace this rank's shard of the trained parameters; see ``Unit.update_shards``."""
    values = checked_shard(unit, flat)
    with unit.writing() as shard:
        unit.device.assign(shard[: values.size], values)


def update_shards(engine: FSDP, shards: Mapping[str, Array]) -> None:
    """Replace this rank's shards of some units; see ``FSDP.update_shards``."""
    what = "update_shards"
    engine.check_idle(what)
    problem, found = "", {}
    try:
        if not isinstance(shards, Mapping):
            raise ArgumentError(f"shards come as a mapping by unit, got {type(shards).__name__}")
        for name, flat in shards.items():
            found[engine[name].name] = checked_shard(engine[name], flat)
    except ArgumentError as error:
        problem = str(error)
    units = [unit.name for unit in engine.units if unit.name in found]
    told = consent(engine.backend, what, problem, repr(units))
    check_equal(engine.backend, told, f"{what}: the units differ between ranks")
    for name in units:
        update_shard(engine[name], found[name])
