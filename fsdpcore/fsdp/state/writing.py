"""What an engine has, written in place: state, shards, ignored arrays, progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import numpy as np

from fsdpcore.collectives.consensus import LocalAttempt, agree
from fsdpcore.core.buffers import Array, byte_view
from fsdpcore.core.device import Device
from fsdpcore.core.disagreement import check_same
from fsdpcore.core.errors import ArgumentError
from fsdpcore.fsdp.state.entries import entries_of, ignored_of
from fsdpcore.fsdp.state.save import info_of, sharded
from fsdpcore.fsdp.state.state import EngineState, Progress, ShardedArray
from fsdpcore.fsdp.units.loading import checked_shard, update_shard
from fsdpcore.fsdp.units.model import ShardedModel
from fsdpcore.fsdp.units.sharded_unit import ShardedUnit
from fsdpcore.fsdp.units.views import locked, read_only

UNCHANGED = "Nothing was changed on any rank"


def set_progress(model: ShardedModel, progress: Progress) -> None:
    """Go on from this step and loss scale, as far as the model's policy allows it."""
    model.status.steps = progress.step
    scaler, policy = model.scaler, model.scaler.policy
    if policy is not None and progress.scale is not None:
        scale, applied = progress.scale
        scaler.scale = min(max(scale, policy.minimum), policy.maximum)
        scaler.applied = min(applied, policy.interval - 1)


@contextmanager
def writing_state(model: ShardedModel, *, optimizer: bool) -> Iterator[EngineState]:
    """Give this rank's parts to be written in place; see ``FSDP.writing_state``."""
    model.status.check_idle("writing_state")
    model.status.check_own("writing_state")
    arrays: dict[str, ShardedArray | Array] = {}
    received = None if optimizer else False
    with ExitStack() as stack:
        for unit in model.units:
            stack.enter_context(unit.rewriting(optimizer=optimizer, received=received))
        for entry in entries_of(model.units, optimizer=optimizer):
            arrays[entry.name] = sharded(model.groups, entry, entry.data.view())
        ignored = {
            name: unit.ignored[p].copy() for name, (unit, p) in ignored_of(model.units).items()
        }
        try:
            yield EngineState({**arrays, **ignored}, info_of(model))
        finally:
            for array in arrays.values():
                assert isinstance(array, ShardedArray)
                for piece in array.pieces:
                    locked(piece.array)
            for name, (unit, param) in ignored_of(model.units).items():
                set_ignored(unit, param, ignored[name])


def update_shards(model: ShardedModel, shards: Mapping[str, Array]) -> None:
    """Replace this rank's shards of some units; see ``FSDP.update_shards``."""
    what = "update_shards"
    model.status.check_idle(what)
    model.status.check_own(what)
    found = {}
    with LocalAttempt() as attempt:
        if not isinstance(shards, Mapping):
            raise ArgumentError(f"shards come as a mapping by unit, got {type(shards).__name__}")
        for name, flat in shards.items():
            found[name] = checked_shard(model[name], flat)
    names = [unit.name for unit in model.units if unit.name in found]
    everyone = model.groups.everyone
    told = agree(everyone, what, attempt.error, repr(names), ending=UNCHANGED)
    check_same(
        [[each] for each in told],
        everyone.ranks,
        lambda found: f"{what}: the units differ between ranks: {found.ranks} differ",
    )
    for name in names:
        update_shard(model[name], found[name])


def set_ignored(unit: ShardedUnit, param: str, array: Array) -> None:
    """Have ``array`` be an ignored array from now on.

    If it is the same, nothing changes: who shares the memory of the present one goes on doing so.
    """
    if not same_bits(array, unit.ignored[param], unit.device):
        unit.ignored[param] = read_only(array)


def same_bits(one: ShardedArray | Array, other: ShardedArray | Array, device: Device) -> bool:
    """Whether two arrays have the same bits."""
    if isinstance(one, ShardedArray) or isinstance(other, ShardedArray):
        return one is other
    one, other = device.given(one, "an array"), device.given(other, "an array")
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return bool(np.array_equal(_bits(one, device), _bits(other, device)))


def _bits(array: Array, device: Device) -> Array:
    return byte_view(np.ascontiguousarray(device.to_host(array)))
