"""Parameters of tensor-parallel layers: drawn whole, cut for a rank, and where gradients go.

Every rank draws the whole parameter with the same generator and keeps its part, so that the values
do not depend on how many ranks there are.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.backend import Backend
from fsdpcore.buffers import Array
from fsdpcore.fsdp.boxes import BoxShard
from fsdpcore.parallel.splits import split


def normal(
    rng: np.random.Generator, shape: tuple[int, ...], std: float, dtype: DTypeLike = np.float32
) -> Array:
    """Return values around zero with standard deviation ``std``.

    They are drawn in float64 for float64, and in float32 for all other types.
    """
    drawn = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    values: Array = rng.standard_normal(shape, dtype=drawn)
    values *= std
    return values.astype(dtype, copy=False)


def cut(whole: Array, axis: int, group: Backend) -> Array | BoxShard:
    """Return this rank's part along ``axis``; in a group of one the whole array, as it is.

    The part is a copy, so that the whole can be freed.
    """
    if group.world_size == 1:
        return whole
    axis %= whole.ndim
    start, stop = split(whole.shape[axis], group.world_size, group.rank)
    first = [0] * whole.ndim
    first[axis] = start
    part = whole[(slice(None),) * axis + (slice(start, stop),)]
    return BoxShard(whole.shape, tuple(first), part.copy())


def gradient(grads: MutableMapping[str, Array], name: str) -> Array | None:
    """Return the array of a gradient, to be written whole; None for a frozen parameter.

    It may have any content: the engine's mappings are spared from filling it with zeros.
    """
    if name not in grads:
        return None
    whole: Any = getattr(grads, "empty", grads.__getitem__)
    found: Array = whole(name)
    return found
