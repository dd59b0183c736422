"""Values of one dtype into another, without warnings: overflow gives inf, NaN stays NaN."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpcore.buffers import Array


def put(target: Array, values: Array) -> None:
    """Copy values into an array of the same shape, rounded where that has another dtype."""
    # Not even a signalling NaN may raise, where warnings are errors: it is what was saved.
    with np.errstate(all="ignore"):
        target[...] = values


def rounded(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return an array with another dtype; itself if it has that dtype."""
    if array.dtype == dtype:
        return array
    found: Array = np.empty(array.shape, dtype)
    put(found, array)
    return found
