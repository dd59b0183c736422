"""Parts of parameters as optimizers see them that look at a parameter as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.core.geometry.boxes import ArrayBox

Reduce = Callable[[NDArray[np.float64]], None]
"""Sums a 1-D array in place over the ranks that share the parameters.

A collective: all ranks call it equally often, with arrays of the same sizes in the same order, and
all of them get the same bits.
"""


@dataclass(frozen=True)
class PieceSpec:
    """Which part of a parameter a rank holds: elements ``[start, stop)`` in C order, maybe none.

    Attributes:
        name: of the parameter; unique among those that are passed together.
        shape: of the whole parameter.
        start, stop: in elements of the flattened parameter; equal where the rank holds nothing.
        box: of which they count the elements, if the rank has to do with a box of the parameter
            only; None for all of it.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    box: ArrayBox | None = None

    @property
    def size(self) -> int:
        """Elements that this rank holds."""
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class ShardPiece:
    """A ``PieceSpec`` with its arrays, which belong to the caller.

    Attributes:
        name, shape, start, stop, box: as in ``PieceSpec``.
        param: float32 or float64, ``(stop - start,)``, contiguous; written by the update.
        grad: likewise, of that or a narrower floating dtype; only read.
        state: of this parameter, from ``init_pieces``; written.
        out: if given, a floating array of the same size and no wider than ``param`` that gets the
            updated elements, rounded.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    param: NDArray[Any]
    grad: NDArray[Any]
    state: Mapping[str, NDArray[Any]]
    out: NDArray[Any] | None = None
    box: ArrayBox | None = None

    @property
    def size(self) -> int:
        """Elements that this rank holds."""
        return self.stop - self.start
