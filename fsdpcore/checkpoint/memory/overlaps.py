"""Whether arrays that are to be filled share memory, so that one would overwrite the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds

from fsdpcore.checkpoint.memory.shards import Shard, parts_of
from fsdpcore.core.array_module import on_host
from fsdpcore.core.buffers import Array
from fsdpcore.core.device import HOST, Device
from fsdpcore.core.errors import ArgumentError

# Of NumPy's exact search. Views that slices and transpositions make need far less; the strides of
# others may take exponential time, and are let through.
_MAX_WORK = 10_000


class _AddressRange(NamedTuple):
    """Where a part lies, from ``low`` to ``high``, in bytes; ``array`` is not to be read."""

    low: int
    high: int
    name: str
    array: Array


class _AddressView:
    """Where an array of a device lies, as NumPy asks for it."""

    def __init__(self, array: Array, device: Device) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.itemsize}",
            "data": (device.address(array), True),
        }


def check_disjoint(state: Mapping[str, Shard], device: Device = HOST) -> None:
    """Raise ArgumentError if two parts of a state share memory, or one has some twice.

    Takes O(n log n) time for n parts where each has memory of its own, or where they are rows,
    columns or tiles of a few matrices.

    Args:
        state: arrays by name.
        device: of those that are not NumPy's. The host and its devices have no address in common.
    """
    extents = []
    for name, shard in state.items():
        for part in parts_of(shard):
            if _overlaps_itself(part.array):
                raise ArgumentError(
                    f"elements of {name!r} share memory (its strides are {part.array.strides}), so "
                    "that it cannot be filled; give a copy"
                )
            array = (
                part.array if on_host(part.array) else np.asarray(_AddressView(part.array, device))
            )
            extents.append(_AddressRange(*byte_bounds(array), name, array))
    for cluster in _clusters(extents):
        for within in _clusters(_by_columns(cluster)):
            _check_pairs(within)


def _check_pairs(extents: Sequence[_AddressRange]) -> None:
    """Compare what lies, by its bounds, in the same place; in ascending order of ``low``."""
    active: list[_AddressRange] = []
    for extent in extents:
        active = [each for each in active if each.high > extent.low]
        for other in active:
            if _share(other.array, extent.array):
                what = f"{other.name!r} and {extent.name!r}"
                if other.name == extent.name:
                    what = f"pieces of {extent.name!r}"
                raise ArgumentError(
                    f"{what} share memory, so that one would overwrite the other; give each array "
                    "memory of its own"
                )
        active.append(extent)


def _clusters(extents: Sequence[_AddressRange]) -> Iterator[list[_AddressRange]]:
    """Give those, two or more, whose bounds hang together, in ascending order."""
    cluster: list[_AddressRange] = []
    end = 0
    for extent in sorted(extents, key=lambda each: each.low):
        if cluster and extent.low >= end:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        end = max(end, extent.high) if cluster else extent.high
        cluster.append(extent)
    if len(cluster) > 1:
        yield cluster


def _by_columns(extents: Sequence[_AddressRange]) -> list[_AddressRange]:
    """Return bounds within a row, where all are columns of one matrix; else as they are.

    What does not share bytes of a row shares none.
    """
    pitches = {max(map(abs, each.array.strides), default=0) for each in extents}
    pitch = pitches.pop()
    if pitches or not pitch:
        return list(extents)
    found = []
    origin = extents[0].low
    for low, _, name, array in extents:
        inner = array.itemsize + sum(
            (extent - 1) * abs(stride)
            for extent, stride in zip(array.shape, array.strides, strict=True)
            if abs(stride) != pitch
        )
        begin = (low - origin) % pitch
        if begin + inner > pitch:
            return list(extents)
        found.append(_AddressRange(begin, begin + inner, name, array))
    return found


def _overlaps_itself(array: Array) -> bool:
    """Whether two elements may share memory: never for what slices and transpositions make."""
    axes = [
        (abs(stride), extent)
        for stride, extent in zip(array.strides, array.shape, strict=True)
        if extent > 1
    ]
    span = array.itemsize
    for stride, extent in sorted(axes):
        if stride < span:
            return True
        span += stride * (extent - 1)
    return False


def _share(one: Array, other: Array) -> bool:
    try:
        # What NumPy declares knows the two special values only.
        return bool(np.shares_memory(one, other, max_work=_MAX_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False
