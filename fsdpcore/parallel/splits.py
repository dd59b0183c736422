"""How an axis is cut over the ranks of a group: contiguous parts, the first ones longer.

Pure arithmetic, the rule of ``numpy.array_split``: of ``size`` indices in ``parts`` parts, the
first ``size % parts`` parts have one more. With fewer indices than parts, the last ones are empty.
"""

from __future__ import annotations

from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import bounds_of, split_sizes
from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import ArgumentError


def split(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return where part ``index`` begins and ends.

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

    Raises:
        ArgumentError: ``size`` is negative or ``parts`` below one.
    """
    size = as_int(size, "the size of an axis that is cut", minimum=0)
    parts = as_int(parts, "the number of parts of an axis", minimum=1)
    return bounds_of(split_sizes(size, parts))
