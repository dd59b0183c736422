"""Parameters of tensor-parallel layers: drawn whole, cut for a rank, and where gradients go.

Every rank draws the whole parameter with the same generator and keeps its part, so that the values
do not depend on how many ranks there are.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.backend import Backend
from fsdpcore.buffers import Array
from fsdpcore.errors import ArgumentError
from fsdpcore.fsdp.boxes import BoxShard
from fsdpcore.fsdp.checks import as_finite
from fsdpcore.fsdp.initializers import Initializer
from fsdpcore.fsdp.spec import Spec
from fsdpcore.parallel.scope import unfilled
from fsdpcore.parallel.splits import own_range


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
    group: Backend,
    how: float | Initializer,
    dtype: DTypeLike,
) -> Array | BoxShard | Spec:
    """Return this rank's part along ``axis`` of a parameter of that whole shape.

    ``how`` is its standard deviation, or an initialiser: then it is a ``Spec``, nothing is drawn
    from ``rng``, and the engine makes this rank's elements only.
    """
    if not isinstance(how, Initializer):
        return cut(normal(rng, shape, how, dtype), axis, group)
    whole = Spec(shape, dtype, how)
    if group.world_size == 1:
        return whole
    start, stop = own_range(shape[axis], group)
    return whole[(slice(None),) * axis + (slice(start, stop),)]


def spread(
    std: float | None, initializer: Initializer | None, default: float, what: str
) -> float | Initializer:
    """Return what a layer's arguments say of its initial values, as ``weight`` takes it.

    Raises:
        ArgumentError: both are given, or one is not what it should be.
    """
    if initializer is None:
        return default if std is None else as_finite(std, f"{what}: std", minimum=0)
    if not isinstance(initializer, Initializer):
        raise ArgumentError(
            f"{what}: initializer is one of fsdpcore.initializers, got {initializer!r}"
        )
    if std is not None:
        raise ArgumentError(f"{what}: give std or initializer, not both")
    return initializer


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
