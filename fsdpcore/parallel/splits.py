"""How an axis is cut over the ranks of a group: contiguous parts, the first ones longer.

Pure arithmetic, the rule of ``numpy.array_split``: of ``size`` indices in ``parts`` parts, the
first ``size % parts`` parts have one more. With fewer indices than parts, the last ones are empty.
"""

from __future__ import annotations

from typing import Any

from fsdpcore.comm.backend import Backend
from fsdpcore.core.array_module import on_host
from fsdpcore.core.buffers import Array, bounds_of, split_sizes
from fsdpcore.core.checks import as_int, as_real_array
from fsdpcore.core.errors import ArgumentError


def split(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return where a part of an axis begins and ends; the first parts have one index more.

    Args:
        size: indices of the axis.
        parts: how many parts it is cut into.
        index: which part, from 0.

    Returns:
        The first index of the part, and the one behind its last. An empty part has the same twice.

    Raises:
        ArgumentError: ``size`` is negative, ``parts`` below one, or there is no such part.
    """
    ends = bounds(size, parts)
    index = as_int(index, "the index of a part", minimum=0)
    if index >= parts:
        raise ArgumentError(f"there is no part {index} of {parts}; the last is {parts - 1}")
    return ends[index], ends[index + 1]


def own_range(size: int, group: Backend) -> tuple[int, int]:
    """Return where this rank's part of an axis begins and ends."""
    return split(size, group.world_size, group.rank)


def own_size(size: int, group: Backend) -> int:
    """Return how many indices of an axis are this rank's."""
    start, stop = own_range(size, group)
    return stop - start


def bounds(size: int, parts: int) -> list[int]:
    """Return ``parts + 1`` numbers: part i is ``[bounds[i], bounds[i + 1])``.

    Args:
        size: indices of the axis that is cut.
        parts: how many parts; the first ``size % parts`` of them have one index more.

    Raises:
        ArgumentError: ``size`` is negative or ``parts`` below one.
    """
    size = as_int(size, "the size of an axis that is cut", minimum=0)
    parts = as_int(parts, "the number of parts of an axis", minimum=1)
    return bounds_of(split_sizes(size, parts))


def localised(values: Array, size: int, group: Backend) -> tuple[Array, Array]:
    """Return indices as those into this rank's part of ``size``, and which of them are in it.

    The first are only right where the second, an array of bools, is true.
    """
    start, stop = own_range(size, group)
    local = values - start
    return local, (local >= 0) & (local < stop - start)


def outside(values: Array, size: int) -> Array | None:
    """Return which of ``as_indices`` are out of range; None on the host, where none is."""
    return None if on_host(values) else (values < 0) | (values >= size)


def as_gradient(dy: Any, shape: tuple[int, ...], layer: str, along: Backend | None = None) -> Array:
    """Return the gradient of an output of that shape, as ``as_real_array`` does.

    Args:
        dy: what ``backward`` was given.
        shape: of the output, whole along the sequence.
        layer: its name.
        along: the group over which axis -2 of the output is cut, if it is.
    """
    if along is not None:
        shape = (*shape[:-2], own_size(shape[-2], along), *shape[-1:])
    return as_real_array(dy, f"{layer}: the gradient of the output", shape=shape)
