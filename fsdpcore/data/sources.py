"""What rows are read from: an array, several arrays of equal length, or any other sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.core.checks import kind_of
from fsdpcore.core.errors import ArgumentError


def row_count(source: Any) -> int:
    """Return how many rows there are.

    Raises:
        ArgumentError: rows of that cannot be read by their number, or parts differ in length.
    """
    if isinstance(source, (Mapping, tuple)):
        counts = {name: row_count(part) for name, part in _parts(source)}
        if len(set(counts.values())) != 1:
            told = ", ".join(f"{name!r}: {count}" for name, count in counts.items()) or "no parts"
            raise ArgumentError(f"the parts of a dataset need equally many rows, got {told}")
        return counts.popitem()[1]
    try:
        count = len(source)
    except TypeError:
        count = None
    if count is None or not hasattr(source, "__getitem__") or isinstance(source, (str, bytes)):
        raise ArgumentError(
            "a dataset must be an array, a sequence with len() and [], or a tuple or dict of "
            f"such; got {kind_of(source)}"
        )
    return count


def read_rows(source: Any, indices: NDArray[np.int64]) -> Any:
    """Return some rows: of arrays a new array, of other sequences a list, of several parts each."""
    if isinstance(source, Mapping):
        return {name: read_rows(part, indices) for name, part in source.items()}
    if isinstance(source, tuple):
        return tuple(read_rows(part, indices) for part in source)
    if hasattr(source, "dtype") and hasattr(source, "shape"):
        return source[indices]
    return [source[index] for index in indices.tolist()]


def _parts(source: Mapping[Any, Any] | tuple[Any, ...]) -> Iterable[tuple[Any, Any]]:
    return source.items() if isinstance(source, Mapping) else enumerate(source)
