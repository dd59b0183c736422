"""Integers that count the rows of a table which is cut over the ranks: tokens of a vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpcore.comm.backend import Backend
from fsdpcore.core.array_module import array_module, on_host
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ArgumentError
from fsdpcore.parallel.splits import own_range


def checked(values: Any, size: int, what: str) -> Array:
    """Return ``values`` as int64.

    On a GPU a look at them would wait for it; there ``outside`` finds what is out of range.

    Raises:
        ArgumentError: they are no array of integers or, on the host, not all in [0, ``size``). All
            ranks raise it, since all have the same.
    """
    dtype = getattr(values, "dtype", None)
    if array_module(values) is None or dtype is None or dtype.kind not in "iu":
        raise ArgumentError(f"{what} are an array of integers, got {dtype or type(values)}")
    if on_host(values) and values.size:
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= size:
            wrong = low if low < 0 else high
            raise ArgumentError(f"{what} are in [0, {size}), got {wrong}")
    found: Array = values.astype(np.int64)
    return found


def outside(values: Array, size: int) -> Array | None:
    """Return where checked ``values`` are out of range; None on the host, where none is."""
    return None if on_host(values) else (values < 0) | (values >= size)


def localised(values: Array, size: int, group: Backend) -> tuple[Array, Array]:
    """Return the values as indices into this rank's part, and which of them are in it.

    The first are only right where the second, an array of bools, is true.
    """
    start, stop = own_range(size, group)
    local = values - start
    return local, (local >= 0) & (local < stop - start)
