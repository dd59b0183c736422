"""Parameters of which a rank has a box only: tensor parallelism cuts a matrix by rows or columns.

Pure: no engine, no communication. The engine of a rank shards its box over the data-parallel ranks,
flat, as it shards whole parameters; a checkpoint has to know where in the whole the box lies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_shape
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.regions import Box, as_range, check_region


@dataclass(frozen=True)
class ArrayBox:
    """Where a box lies in a whole array: a ``Box``, checked, and the array's shape.

    Attributes:
        whole: shape of the whole array.
        start: index of the box's first element, along every axis.
        shape: of the box.

    Raises:
        ArgumentError: the box does not lie in the array.
    """

    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("whole", "start", "shape"):
            object.__setattr__(self, name, as_shape(getattr(self, name), f"a box's {name}"))
        if not len(self.whole) == len(self.start) == len(self.shape):
            raise ArgumentError(
                f"a box of an array of shape {self.whole} needs {len(self.whole)} indices as start "
                f"and as many extents; got {self.start} and {self.shape}"
            )
        check_region(self.region, self.whole, "a box")

    @property
    def region(self) -> Box:
        """The box without the array that it is of."""
        return Box(self.start, self.stop)

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the box's last element, along every axis."""
        return tuple(map(sum, zip(self.start, self.shape, strict=True)))

    @property
    def size(self) -> int:
        """Elements of the box."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What cuts the box out of the whole array."""
        return tuple(map(slice, self.start, self.stop))

    @property
    def is_whole(self) -> bool:
        """Whether the box is all there is."""
        return self.shape == self.whole

    @property
    def run(self) -> tuple[int, int] | None:
        """The run of elements that the box is in the whole flattened; None if it is no run."""
        found = as_range(self.region, self.whole)
        return None if found is None else (found.start, found.stop)


@dataclass(frozen=True, eq=False)
class BoxShard:
    """A box of an array that is cut along any of its axes: rows, columns, blocks.

    In a ``Unit`` it is the parameter of a tensor-parallel rank: computed with as ``array``, stored
    and found again as part of the whole. In a state that is saved or loaded it is what a rank has.

    Attributes:
        shape: of the whole array.
        start: index of the box's first element, along every axis.
        array: the box, in NumPy or on a GPU; its shape says how far it goes. It may be empty, and
            need not be contiguous.

    Raises:
        ArgumentError: the box does not lie in the array.

    Example::

        part = fc.BoxShard((6, 2), (3, 0), np.zeros((3, 2)))  # rows 3, 4 and 5 of six
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    array: Array

    def __post_init__(self) -> None:
        shape = as_shape(self.shape, "a BoxShard")
        start = as_shape(self.start, "the start of a BoxShard")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "start", start)
        if not is_array(self.array) or not len(shape) == len(start) == self.array.ndim:
            raise ArgumentError(
                f"a BoxShard of an array of shape {shape} needs {len(shape)} indices as start, and "
                f"an array of {len(shape)} dimensions; got {start} and {_described(self.array)}"
            )
        _ = self.box

    @property
    def box(self) -> ArrayBox:
        """Where the box lies."""
        return ArrayBox(self.shape, self.start, self.array.shape)

    def __repr__(self) -> str:
        return f"<BoxShard {self.array.dtype} {self.array.shape} at {self.start} of {self.shape}>"


def is_array(value: object) -> bool:
    """Whether it has what an array of NumPy has, wherever its elements are."""
    if isinstance(value, np.ndarray):
        return True
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    box_like = isinstance(value, (np.generic, BoxShard)) or hasattr(value, "pieces")
    return isinstance(dtype, np.dtype) and isinstance(shape, tuple) and not box_like


def _described(value: object) -> str:
    shape = getattr(value, "shape", None)
    return f"shape {shape}" if is_array(value) else type(value).__name__
