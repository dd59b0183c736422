"""What is to be kept of an engine, as arrays and plain values: no engine, no communication.

Every array has a name: ``unit.param`` for a parameter, ``optimizer/exp_avg/unit.param`` for an
array of its optimizer. A rank's share of it is given as ranges of the whole, flattened array, so
that it can be stored, and found again, without knowing how the ranks shared it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_dtype, as_finite, as_int, as_shape
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.boxes import ArrayBox

FORMAT = 1
"""Version of ``EngineState``: names of arrays, and keys and meaning of ``info``."""

OPTIMIZER_PREFIX = "optimizer/"
"""What the names of arrays begin with that an optimizer keeps."""


def optimizer_name(state: str, param: str) -> str:
    """Return the name of the array ``state`` that an optimizer keeps of ``param`` (unit.param)."""
    return f"{OPTIMIZER_PREFIX}{state}/{param}"


RECEIVED, RESIDUAL = "received", "residual_of"
"""States of parameters that travel quantised: what all ranks have of them, and, followed by how
many ranks there are, what quantising gradients has left out so far."""


def of_compression(name: str) -> bool:
    """Whether an array is such a state.

    An engine goes on without: it gathers parameters as they are, and has left out nothing.
    """
    return name.startswith(optimizer_name(RECEIVED, "")) or is_residual(name)


def is_residual(name: str) -> bool:
    """Whether an array is the second of these states."""
    return name.startswith(OPTIMIZER_PREFIX + RESIDUAL)


class ArrayPiece(NamedTuple):
    """Elements ``[start, stop)`` of an array that is flattened in C order.

    Attributes:
        start: the first element.
        stop: the element behind the last one.
        array: these elements, 1-D and contiguous.
    """

    start: int
    stop: int
    array: Array


def _piece(start: int, stop: int, array: Array) -> ArrayPiece:
    return ArrayPiece(
        as_int(start, "start of a piece", minimum=0),
        as_int(stop, "stop of a piece", minimum=0),
        array,
    )


@dataclass(frozen=True, eq=False)
class ShardedArray:
    """An array of which this rank has some ranges, and others the rest.

    The pieces of all ranks of one replica cover the array exactly once, and every replica holds the
    same: it is stored once if one replica stores it, be it the first, or another for balance.

    Attributes:
        shape: of the whole array.
        dtype: of the whole array and of the pieces.
        pieces: of this rank: in ascending order, none of them empty, none overlapping. Maybe none.
        replica: which of the copies this rank has a part of, from 0. Where every rank holds all of
            an array, each of them is a replica.
        replicas: how many copies there are.
        box: the box of the array that the pieces are ranges of, flattened in C order; the ranks of
            a replica have boxes that do not overlap. None for the whole array.

    Raises:
        ArgumentError: it does not fit together.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pieces: tuple[ArrayPiece, ...]
    replica: int = 0
    replicas: int = 1
    box: ArrayBox | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", as_shape(self.shape, "a ShardedArray"))
        object.__setattr__(self, "dtype", as_dtype(self.dtype, "a ShardedArray"))
        try:
            pieces = tuple(_piece(*piece) for piece in self.pieces)
        except TypeError:
            raise ArgumentError(
                "the pieces of a ShardedArray are (start, stop, array), for instance "
                f"fc.ArrayPiece(0, 3, array); got {self.pieces!r:.80}"
            ) from None
        object.__setattr__(self, "pieces", pieces)
        for field, minimum in (("replicas", 1), ("replica", 0)):
            number = as_int(getattr(self, field), f"{field} of a ShardedArray", minimum=minimum)
            object.__setattr__(self, field, number)
        if self.replica >= self.replicas:
            raise ArgumentError(
                f"replica {self.replica} of a ShardedArray does not exist; there are "
                f"{self.replicas}, counted from 0"
            )
        if self.box is not None and self.box.whole != self.shape:
            raise ArgumentError(
                f"the box of a ShardedArray of shape {self.shape} lies in one of {self.box.whole}"
            )
        size = self.size if self.box is None else self.box.size
        behind = 0
        for start, stop, array in self.pieces:
            if not behind <= start < stop <= size:
                raise ArgumentError(
                    f"a piece [{start}, {stop}) of an array of {size} elements, behind "
                    f"element {behind}; pieces ascend, do not overlap and are not empty"
                )
            found = (getattr(array, "shape", None), getattr(array, "dtype", None))
            if found != ((stop - start,), self.dtype):
                raise ArgumentError(
                    f"the piece [{start}, {stop}) needs an array of shape ({stop - start},) and "
                    f"dtype {self.dtype}, got {found[0]} and {found[1]}"
                )
            behind = stop

    @property
    def size(self) -> int:
        """Elements of the whole array."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's pieces."""
        return sum(piece.array.nbytes for piece in self.pieces)

    def __repr__(self) -> str:
        ranges = ", ".join(f"[{start}, {stop})" for start, stop, _ in self.pieces[:3])
        more = f" and {len(self.pieces) - 3} more" if len(self.pieces) > 3 else ""
        return (
            f"<ShardedArray {self.dtype} {self.shape}: {ranges or 'no elements'}{more}, "
            f"replica {self.replica} of {self.replicas}>"
        )


class EngineState(Mapping[str, "ShardedArray | Array"]):
    """The arrays of an engine by name, and what else it has to remember.

    Args:
        arrays: a ``ShardedArray`` where this rank has a part, a plain array where it has all.
        info: plain values that JSON can hold, the same on all ranks::

            format       version of all this, an integer
            step         updates so far
            loss_scale   {"scale": ..., "applied": ...}, or null where losses are not scaled
            optimizer    what updates which parameter, in words; null if nothing does
            strategy     name of the strategy, for information only, as is world_size
            world_size   number of ranks
            ties         for each tied parameter the name of its owner, whose array is its, too
    """

    def __init__(self, arrays: Mapping[str, ShardedArray | Array], info: Mapping[str, Any]) -> None:
        self.arrays = dict(arrays)
        self.info = dict(info)

    def __getitem__(self, name: str) -> ShardedArray | Array:
        return self.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def __repr__(self) -> str:
        return f"<EngineState of {len(self)} arrays, step {self.info.get('step')}>"


@dataclass(frozen=True)
class Progress:
    """What ``info`` says of how far training has come.

    Attributes:
        step: updates so far.
        scale: of the loss, and updates since it changed; None where losses were not scaled.
    """

    step: int
    scale: tuple[float, int] | None

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Progress:
        """Read it.

        Raises:
            ArgumentError: values that are missing or make no sense, or another format.
        """
        version = info.get("format")
        if version != FORMAT or isinstance(version, bool):
            raise ArgumentError(
                f"the state has format {version!r}, but this version of fsdpcore reads {FORMAT}; "
                "for parameters alone, from wherever they are, use engine.load_full"
            )
        step = as_int(info.get("step"), "step in the state's info", minimum=0)
        scale = info.get("loss_scale")
        if scale is None:
            return cls(step, None)
        if not isinstance(scale, Mapping):
            raise ArgumentError(f"loss_scale in the state's info is {scale!r}, not a mapping")
        value = as_finite(scale.get("scale"), "scale of loss_scale in the state's info")
        if not value > 0.0:
            raise ArgumentError(f"the loss scale in the state's info is {value:g}, not positive")
        applied = as_int(scale.get("applied"), "applied of loss_scale in the info", minimum=0)
        return cls(step, (value, applied))


class LoadReport(NamedTuple):
    """What did not fit when a state was loaded.

    Empty unless ``strict=False``, but for ignored arrays that ``load_full`` was not given.

    Attributes:
        missing: arrays of the engine that the state does not have; they stayed as they were.
        unexpected: names in the state that the engine does not have.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
