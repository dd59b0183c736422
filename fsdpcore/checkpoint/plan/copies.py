"""Plans of copies from stored pieces of an array into the pieces that somebody wants of it.

Everything counts elements. A piece is contiguous by itself: a ``Range`` is one-dimensional, a
``Box`` is in C order inside itself. A plan so says nothing about dtypes, files or memory.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from fsdpcore.core.geometry.regions import Range, Region, common_boxes


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of a flat source and where they belong in a flat target, as strided arrays of both.

    Attributes:
        shape: at least one axis, no extent is 0.
        src: position of the first element in the flat source.
        src_strides: elements from one to the next along each axis: positive, and each at least as
            large as all that is inside it.
        dst: position of the first element in the flat target.
        dst_strides: the same as ``src_strides`` there.
    """

    shape: tuple[int, ...]
    src: int
    src_strides: tuple[int, ...]
    dst: int
    dst_strides: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def copies(shape: Sequence[int], stored: Region, wanted: Region) -> list[Copy]:
    """Return what to copy from a flat piece that is ``stored`` to a flat target that is ``wanted``.

    Both are regions of an array of ``shape``. Every element that they have in common is in exactly
    one copy. There is none if they have nothing in common, one for two ranges or two boxes, at most
    ``2 * ndim - 1`` else, ascending on both sides. Axes are merged where both sides allow it, and
    those of extent 1 left out.
    """
    if isinstance(stored, Range) and isinstance(wanted, Range):
        start = stored.start if stored.start > wanted.start else wanted.start
        stop = stored.stop if stored.stop < wanted.stop else wanted.stop
        if start >= stop:
            return []
        return [Copy((stop - start,), start - stored.start, (1,), start - wanted.start, (1,))]
    common = common_boxes(stored, wanted, shape)
    if not common:
        return []
    src_origin, src_strides = placed(stored, shape)
    dst_origin, dst_strides = placed(wanted, shape)
    return [
        _merged(
            box.shape,
            _dot(box.start, src_strides) - src_origin,
            src_strides,
            _dot(box.start, dst_strides) - dst_origin,
            dst_strides,
        )
        for box in common
    ]


def placed(region: Region, shape: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return how far each axis steps in the flat piece, and where an index of zeros would be.

    The element with a global index is at ``dot(index, strides) - origin`` of the piece.
    """
    if isinstance(region, Range):
        return region.start, _strides(shape)
    strides = _strides(region.shape)
    return _dot(region.start, strides), strides


def _merged(
    shape: tuple[int, ...],
    src: int,
    src_strides: tuple[int, ...],
    dst: int,
    dst_strides: tuple[int, ...],
) -> Copy:
    """Return the copy with as few axes as do."""
    axes: list[tuple[int, int, int]] = []  # extent and both strides, outermost first
    for extent, src_stride, dst_stride in zip(shape, src_strides, dst_strides, strict=True):
        if extent == 1:
            continue
        if axes:
            rows, outer_src, outer_dst = axes[-1]
            if outer_src == extent * src_stride and outer_dst == extent * dst_stride:
                axes[-1] = (rows * extent, src_stride, dst_stride)
                continue
        axes.append((extent, src_stride, dst_stride))
    if not axes:
        return Copy((1,), src, (1,), dst, (1,))
    extents, of_src, of_dst = zip(*axes, strict=True)
    return Copy(extents, src, of_src, dst, of_dst)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a C-contiguous array, in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the elements from the first to one past the last."""
    return sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1


def _dot(index: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum(map(operator.mul, index, strides))
