"""What a rank has of an array, however it was cut: the pieces that are written and read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from fsdpcore.checkpoint.format.strict_json import check_text
from fsdpcore.core.buffers import Array
from fsdpcore.core.device import HOST, Device
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.boxes import ArrayBox, BoxShard, is_array
from fsdpcore.core.geometry.regions import Box, Range, Region, regions_inside, whole
from fsdpcore.fsdp.state.state import ShardedArray

Shard = Array | ShardedArray | BoxShard
"""What a rank has of one array: all of it, flat ranges of it, or a box."""

State = Mapping[str, Shard]


class Part(NamedTuple):
    """One piece of an array in memory.

    Attributes:
        region: which elements.
        array: them; flat for a ``Range``, of the box's shape for a ``Box``.
    """

    region: Region
    array: Array


def shape_of(shard: Shard) -> tuple[int, ...]:
    """Return the shape of the whole array."""
    return shard.shape


def dtype_of(shard: Shard) -> np.dtype[Any]:
    """Return the dtype of the array."""
    return shard.array.dtype if isinstance(shard, BoxShard) else shard.dtype


def replica_of(shard: Shard) -> int:
    """Return of which copy of the array it is a part; 0 where nothing says so."""
    return shard.replica if isinstance(shard, ShardedArray) else 0


def parts_of(shard: Shard) -> list[Part]:
    """Return the pieces that a rank has, none of them empty.

    A whole array is one ``Range`` if it is contiguous in C order, else one ``Box``. A flat range of
    a box of whole rows is a ``Range`` too; of another box it becomes at most ``2 * ndim - 1`` of
    them. All are views.
    """
    if isinstance(shard, ShardedArray):
        if shard.box is None:
            return [Part(Range(start, stop), array) for start, stop, array in shard.pieces]
        return list(_boxed(shard, shard.box))
    if isinstance(shard, BoxShard):
        return [Part(shard.box.region, shard.array)] if shard.array.size else []
    if not shard.size:
        return []
    if shard.flags.c_contiguous:
        return [Part(whole(shard.shape), shard.reshape(-1))]
    return [Part(Box((0,) * shard.ndim, shard.shape), shard)]


def _boxed(shard: ShardedArray, outer: ArrayBox) -> Iterator[Part]:
    """Give the pieces of a box as regions of the whole array."""
    for start, stop, array in shard.pieces:
        for region in regions_inside(outer.region, Range(start, stop), outer.whole):
            part, array = array[: region.size], array[region.size :]
            yield Part(region, part.reshape(region.shape) if isinstance(region, Box) else part)


def checked_state(state: object, device: Device = HOST) -> dict[str, Shard]:
    """Return a state by name after checking that it is one.

    Args:
        state: a mapping from names to what a rank has of each array.
        device: whose arrays may be in it, beside NumPy's.

    Raises:
        ArgumentError: it is no mapping from names to arrays that can be stored.
    """
    if not isinstance(state, Mapping):
        raise ArgumentError(
            "a state is an engine, or a mapping from names to arrays, ShardedArray or BoxShard; "
            f"got {type(state).__name__}"
        )
    found: dict[str, Shard] = {}
    for name, shard in state.items():
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"the name of an array is a non-empty string, got {name!r}")
        check_text(name, "the name of an array")
        if isinstance(shard, ShardedArray):
            for piece in shard.pieces:
                _check_place(name, piece.array, device)
        elif isinstance(shard, BoxShard):
            _check_place(name, shard.array, device)
        else:
            if isinstance(shard, (np.ma.MaskedArray, np.matrix)):
                raise ArgumentError(
                    f"{name!r} is a {type(shard).__name__}, of which only the numbers would be "
                    "stored; convert it to a plain array"
                )
            if isinstance(shard, np.generic):
                shard = np.asarray(shard)
            _check_place(name, shard, device)
        found[name] = shard
    return found


def _check_place(name: str, array: object, device: Device) -> None:
    """Raise ArgumentError unless something is an array that this rank can get at."""
    if isinstance(array, np.ndarray) or device.owns(array):
        return
    kind = type(array)
    if is_array(array):
        raise ArgumentError(
            f"{name!r} is a {kind.__module__.partition('.')[0]}.{kind.__name__}, but what is saved "
            f"and loaded here is on the device {device}; convert it to NumPy, as cupy.asnumpy does"
        )
    raise ArgumentError(
        f"{name!r} is a {kind.__name__}; convert it to a NumPy array, or pass plain values as "
        "extra="
    )
