"""The parameters handed back, and the engine's memory with them: ``engine.release``."""

from __future__ import annotations

from fsdpcore.collectives import barrier
from fsdpcore.core.buffers import Array
from fsdpcore.fsdp.state.save import ShardedState, full_state
from fsdpcore.fsdp.state.state import ArrayPiece, ShardedArray
from fsdpcore.fsdp.units.buffer_pool import BufferPool
from fsdpcore.fsdp.units.model import ShardedModel


def release(
    model: ShardedModel, pool: BufferPool, *, full: bool, to: int | str
) -> dict[str, ShardedArray | Array]:
    """Return the parameters, and free everything else that the units hold; see ``FSDP.release``."""
    model.status.check_idle("release()")
    if full:
        state = full_state(model, optimizer=False, to=to)
    else:
        state = ShardedState(model).get(optimizer=False, to=to)
        barrier(model.groups.everyone, label="release(full=False)")
    arrays = {name: array if full else _copied(array) for name, array in state.arrays.items()}
    for name, owner in state.info["ties"].items():
        if owner in arrays:
            arrays[name] = arrays[owner]
    for unit in model.units:
        unit.free()
    pool.clear()
    model.status.ended = (
        "was released: its parameters are those that release() has returned; make a new one"
    )
    model.groups.close()
    return arrays


def _copied(array: ShardedArray | Array) -> ShardedArray | Array:
    """Return a copy that does not keep the engine's memory alive."""
    if not isinstance(array, ShardedArray):
        return array.copy()
    pieces = [ArrayPiece(start, stop, data.copy()) for start, stop, data in array.pieces]
    return ShardedArray(
        array.shape, array.dtype, tuple(pieces), array.replica, array.replicas, array.box
    )
