"""Parameters of tensor-parallel layers: drawn whole, cut for a rank, and where gradients go.

Every rank draws the whole parameter with the same generator and keeps its part, so that the values
do not depend on how many ranks there are.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_finite
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.boxes import BoxShard
from fsdpcore.fsdp.units.initializers import Initializer
from fsdpcore.fsdp.units.spec import Spec
from fsdpcore.parallel.scope import unfilled
from fsdpcore.parallel.splits import own_range

Init: TypeAlias = float | Initializer
"""Initial values: the standard deviation of what is drawn at once, or how to make it later."""


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


def weight(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    axis: int,
    group: Backend | None,
    init: Init,
    dtype: DTypeLike,
) -> Array | BoxShard | Spec:
    """Return this rank's part along ``axis`` of a parameter of that whole shape.

    ``init`` is its standard deviation, or an initialiser: then it is a ``Spec``, nothing is drawn
    from ``rng``, and the engine makes this rank's part: of rows these alone, of columns block by
    block of whole rows, which takes as long as all of them. Without a group, or in one of one rank,
    it is whole.
    """
    if isinstance(init, Initializer):
        whole = Spec(shape, dtype, init)
        if group is None or group.world_size == 1:
            return whole
        start, stop = own_range(shape[axis], group)
        return whole[(slice(None),) * axis + (slice(start, stop),)]
    values = normal(rng, shape, init, dtype)
    return values if group is None else cut(values, axis, group)


def checked(init: Init | None, default: float, what: str) -> Init:
    """Return ``init``, or the standard deviation ``default`` where it is None.

    Raises:
        ArgumentError: it is neither a standard deviation nor an initialiser.
    """
    if init is None:
        return default
    if isinstance(init, Initializer):
        return init
    try:
        return as_finite(init, f"{what}: init as a standard deviation", minimum=0)
    except ArgumentError as error:
        raise ArgumentError(f"{error}; otherwise it is one of fsdpcore.initializers") from None


def cut(whole: Array, axis: int, group: Backend) -> Array | BoxShard:
    """Return this rank's part along ``axis``; in a group of one the whole array, as it is.

    The part is a copy, so that the whole can be freed.
    """
    if group.world_size == 1:
        return whole
    axis %= whole.ndim
    start, stop = own_range(whole.shape[axis], group)
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
    return unfilled(grads, name)
