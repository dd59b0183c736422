"""Values of one dtype into another, without warnings: overflow gives inf, NaN stays NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_dtype, rounds_into
from fsdpcore.core.errors import ArgumentError


def rounding_dtype(dtype: DTypeLike | None, what: str) -> np.dtype[Any] | None:
    """Return the dtype that floating arrays are to be rounded to; None for None.

    Args:
        dtype: see there.
        what: becomes of that dtype; for messages.

    Raises:
        ArgumentError: it is no dtype, or not a floating one.
    """
    if dtype is None:
        return None
    found = as_dtype(dtype, what)
    if not rounds_into(np.dtype(np.float32), found):
        raise ArgumentError(
            f"dtype is what floating arrays are rounded to, such as float32, not {found}; {what} "
            "keeps the dtypes of other arrays"
        )
    return found


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
