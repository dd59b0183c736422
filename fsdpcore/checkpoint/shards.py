"""What a rank has of an array, however it was cut: the pieces that are written and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from fsdpcore.buffers import Array
from fsdpcore.checkpoint.regions import Box, Range, Region, check_region, whole
from fsdpcore.checkpoint.strict_json import check_text
from fsdpcore.device import HOST, Device
from fsdpcore.errors import ArgumentError
from fsdpcore.fsdp.checks import as_shape
from fsdpcore.fsdp.state import ShardedArray


@dataclass(frozen=True, eq=False)
class BoxShard:
    """A box of an array that is cut along any of its axes: rows, columns, blocks.

    Attributes:
        shape: of the whole array.
        start: index of the box's first element, along every axis.
        array: the box, in NumPy or on a GPU; its shape says how far it goes. It may be empty, and
            need not be contiguous.

    Raises:
        ArgumentError: the box does not lie in the array.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    array: Array

    def __post_init__(self) -> None:
        shape = as_shape(self.shape, "a BoxShard")
        start = as_shape(self.start, "the start of a BoxShard")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "start", start)
        if not _is_array(self.array) or not len(shape) == len(start) == self.array.ndim:
            raise ArgumentError(
                f"a BoxShard of an array of shape {shape} needs {len(shape)} indices as start, and "
                f"an array of {len(shape)} dimensions; got {start} and {_described(self.array)}"
            )
        check_region(self.region, shape, "a BoxShard")

    @property
    def region(self) -> Box:
        """Where the box lies."""
        return Box(self.start, tuple(map(sum, zip(self.start, self.array.shape, strict=True))))


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


def parts_of(shard: Shard) -> list[Part]:
    """Return the pieces that a rank has, none of them empty.

    A whole array is one ``Range`` if it is contiguous in C order, else one ``Box``.
    """
    if isinstance(shard, ShardedArray):
        return [Part(Range(start, stop), array) for start, stop, array in shard.pieces]
    if isinstance(shard, BoxShard):
        return [Part(shard.region, shard.array)] if shard.array.size else []
    if not shard.size:
        return []
    if shard.flags.c_contiguous:
        return [Part(whole(shard.shape), shard.reshape(-1))]
    return [Part(Box((0,) * shard.ndim, shard.shape), shard)]


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
    if _is_array(array):
        raise ArgumentError(
            f"{name!r} is a {kind.__module__.partition('.')[0]}.{kind.__name__}, but what is saved "
            f"and loaded here is on the device {device}; convert it to NumPy, as cupy.asnumpy does"
        )
    raise ArgumentError(
        f"{name!r} is a {kind.__name__}; convert it to a NumPy array, or pass plain values as "
        "extra="
    )


def _is_array(value: object) -> TypeGuard[Array]:
    """Whether it has what an array of NumPy has, wherever its elements are."""
    if isinstance(value, np.ndarray):
        return True
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return (
        isinstance(dtype, np.dtype)
        and isinstance(shape, tuple)
        and not isinstance(value, (np.generic, ShardedArray, BoxShard))
    )


def _described(value: object) -> str:
    return f"shape {value.shape}" if _is_array(value) else type(value).__name__
