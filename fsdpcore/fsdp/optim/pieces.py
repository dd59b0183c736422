"""Parts of parameters as optimizers see them that look at a parameter as a whole."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.core.errors import UnsupportedError
from fsdpcore.core.geometry.boxes import ArrayBox

Reduce = Callable[[NDArray[np.float64]], None]
"""Sums a 1-D array in place over the ranks that share the parameters.

A collective: all ranks call it equally often, with arrays of the same sizes in the same order, and
all of them get the same bits.
"""


@dataclass(frozen=True)
class AnyOrder:
    """A ``Reduce`` of ranks whose number must not change a bit: what they sum has to be exact.

    Attributes:
        total: sums.
        largest: the same, but for the maximum in place of the sum.
    """

    total: Reduce
    largest: Reduce

    def __call__(self, array: NDArray[np.float64]) -> None:
        """See ``Reduce``."""
        self.total(array)


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


Give = Callable[[ShardPiece, NDArray[Any]], None]
"""Writes what a rank has for a piece of a parameter to a flat array of the piece's size."""

Make = Callable[[NDArray[Any]], None]
"""Changes, in place, a whole array in the parameter's shape."""


class Ranks(ABC):
    """The ranks that share parameters, as an optimizer gets them that ``has_owners``: a ``Reduce``.

    Called with an array it sums that, as any ``Reduce`` does.
    """

    @abstractmethod
    def __call__(self, array: NDArray[np.float64]) -> None:
        """See ``Reduce``."""

    @abstractmethod
    def by_owners(
        self, pieces: Sequence[ShardPiece], *, give: Give, make: Make, take: Give
    ) -> None:
        """Have something made of whole arrays, each on one rank; a collective.

        Args:
            pieces: of all parameters, as of ``update_pieces``.
            give: called for each piece with an array to be filled, of the dtype of ``param``.
            make: called on one rank for each parameter, with what all ranks gave, in its shape.
            take: called for each piece with what was made of it, which may be overwritten. In an
                engine ``make`` and ``take`` are called after ``update_pieces`` has returned.
        """


class Alone(Ranks):
    """One rank that has all of each parameter.

    Args:
        reduce: what it sums with.
    """

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce

    def __call__(self, array: NDArray[np.float64]) -> None:
        self._reduce(array)

    def by_owners(
        self, pieces: Sequence[ShardPiece], *, give: Give, make: Make, take: Give
    ) -> None:
        """See ``Ranks.by_owners``; raises UnsupportedError for a piece that is not whole."""
        for piece in pieces:
            if piece.size != math.prod(piece.shape):
                raise UnsupportedError(
                    f"{piece.name!r} is cut over ranks, but has to be whole on one; pass a reduce "
                    "that is a fc.optim.Ranks, as the engine does"
                )
        for piece in pieces:
            whole = np.empty_like(piece.param)
            give(piece, whole)
            make(whole.reshape(piece.shape))
            take(piece, whole)
