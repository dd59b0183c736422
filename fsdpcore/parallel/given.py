"""What layers are given: looked at before anything is sent, alike for groups of any size."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpcore.comm.backend import Backend
from fsdpcore.core.array_module import array_module
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import rounds_into
from fsdpcore.core.errors import ArgumentError
from fsdpcore.parallel.splits import own_size

_FLOAT = np.dtype(np.float32)


def as_array(x: Any, what: str, *, floating: bool = False) -> Array:
    """Return ``x`` in this machine's byte order; the same array where it has that already.

    Raises:
        ArgumentError: it is no array of NumPy or CuPy, or none of real numbers; or, if
            ``floating``, one of integers.
    """
    module = array_module(x)
    real = module is not None and (rounds_into(x.dtype, _FLOAT) if floating else _is_real(x.dtype))
    if not real:
        raise ArgumentError(
            f"{what} must be an array of NumPy or CuPy of "
            f"{'floating-point' if floating else 'real'} numbers; got "
            f"{type(x).__name__ if module is None else x.dtype}"
        )
    array: Array = x
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _is_real(dtype: np.dtype[Any]) -> bool:
    """Whether it is of numbers without an imaginary part; 2 marks those of other packages."""
    return dtype.kind in "biuf" or dtype.isbuiltin == 2


def as_gradient(dy: Any, shape: tuple[int, ...], layer: str, along: Backend | None = None) -> Array:
    """Return the gradient of an output of that shape, as ``as_array`` does.

    Args:
        dy: what ``backward`` was given.
        shape: of the output, whole along the sequence.
        layer: its name.
        along: the group over which axis -2 of the output is cut, if it is.

    Raises:
        ArgumentError: it has another shape, or is no array.
    """
    given = as_array(dy, f"{layer}: the gradient of the output")
    if along is not None:
        shape = (*shape[:-2], own_size(shape[-2], along), *shape[-1:])
    if given.shape != shape:
        raise ArgumentError(
            f"{layer}: the gradient of the output has its shape, {shape}; got {given.shape}"
        )
    return given
