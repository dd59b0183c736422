"""What is stored: the parameters of a GPT and Adam's two arrays for each, float32, known values."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fsdpcore.core.errors import ArgumentError

Array = NDArray[np.float32]
Shape = tuple[int, ...]

KINDS = ("", "optimizer/exp_avg/", "optimizer/exp_avg_sq/")
"""What stands before a parameter's name: nothing, or what says which of the optimizer's it is."""

_BYTES = 4 * len(KINDS)
_IN_BLOCKS = 0.8  # of all parameters, as in a GPT-2 of this size; embeddings are the rest
_POSITIONS = 1024
# Small integers, which float32 holds exactly; prime, so that no two rows or shards are alike.
_PERIOD = 8191
_SLICE = 1 << 20


def gpt(nbytes: int, layers: int) -> dict[str, dict[str, Shape]]:
    """Return the shapes of a GPT's parameters, by unit and name.

    Args:
        nbytes: of parameters and optimizer state together, which are never more than 0.1 % away
            from it, but for a few KiB.
        layers: transformer blocks, of 12 matrices and vectors each.

    Raises:
        ArgumentError: so many layers do not fit.
    """
    params = nbytes // _BYTES
    width = int(math.sqrt(_IN_BLOCKS * params / (12 * layers))) // 8 * 8
    rest = params - layers * (12 * width * width + 13 * width) - 2 * width
    positions = min(_POSITIONS, rest // (4 * width)) if width else 0
    if positions < 1:
        raise ArgumentError(
            f"a GPT of {layers} layers does not fit {nbytes} bytes; choose a larger --size"
        )
    vocabulary = rest // width - positions
    blocks = {f"block{number}": _block(width) for number in range(layers)}
    return {
        "embedding": {"tokens": (vocabulary, width), "positions": (positions, width)},
        **blocks,
        "end": {"weight": (width,), "bias": (width,)},
    }


def _block(width: int) -> dict[str, Shape]:
    return {
        "norm1.weight": (width,),
        "norm1.bias": (width,),
        "attention.weight": (3 * width, width),
        "attention.bias": (3 * width,),
        "projection.weight": (width, width),
        "projection.bias": (width,),
        "norm2.weight": (width,),
        "norm2.bias": (width,),
        "hidden.weight": (4 * width, width),
        "hidden.bias": (4 * width,),
        "out.weight": (width, 4 * width),
        "out.bias": (width,),
    }


def arrays(nbytes: int, layers: int) -> dict[str, Shape]:
    """Return the shapes of all arrays, by the names that an engine's ``state_dict`` has."""
    units = gpt(nbytes, layers)
    return {
        f"{kind}{unit}.{name}": shape
        for kind in KINDS
        for unit, params in units.items()
        for name, shape in params.items()
    }


def fill(name: str, start: int, out: Array) -> None:
    """Write elements ``[start, start + out.size)`` of the flattened array of that name."""
    for first, part in _slices(name, start, out):
        part[...] = first


def wrong(name: str, start: int, found: Array) -> int:
    """Count the elements that are not what ``fill`` writes."""
    return sum(int(np.count_nonzero(part != right)) for right, part in _slices(name, start, found))


def _slices(name: str, start: int, array: Array) -> Iterator[tuple[Array, Array]]:
    """Yield the right values for each slice of an array, and the slice."""
    shift = sum(name.encode()) * 17
    for first in range(0, array.size, _SLICE):
        part = array[first : first + _SLICE]
        begin = (start + first + shift) % _PERIOD
        yield _values()[begin : begin + part.size], part


@functools.cache
def _values() -> Array:
    """Return enough of the values to find any slice in them; read-only."""
    values = (np.arange(_SLICE + _PERIOD) % _PERIOD).astype(np.float32)
    values.flags.writeable = False
    return values
