"""Plans of copies from stored pieces of an array into the pieces that somebody wants of it.

Everything counts elements. A piece is contiguous by itself: a ``Range`` is one-dimensional, a
``Box`` is in C order inside itself. A plan so says nothing about dtypes, files or memory.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdpcore.checkpoint.regions import Range, Region, common_boxes
from fsdpcore.errors import ArgumentError


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

    @property
    def src_stop(self) -> int:
        """One past the last element of the source that is read."""
        return self.src + _span(self.shape, self.src_strides)

    @property
    def contiguous_src(self) -> bool:
        """Whether every element of the source from ``src`` to ``src_stop`` is read."""
        return _span(self.shape, self.src_strides) == self.size

    @property
    def contiguous_dst(self) -> bool:
        """Whether a gapless run of the target is written."""
        return _span(self.shape, self.dst_strides) == self.size


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
    src_origin, src_strides = _placed(stored, shape)
    dst_origin, dst_strides = _placed(wanted, shape)
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


def split(copy: Copy, limit: int) -> Iterator[Copy]:
    """Yield parts of ``copy``, each spanning at most ``limit`` elements of the source.

    The span of a part is ``src_stop - src``, gaps included. Together the parts copy the same
    elements, each of them once, and they ascend in the source.

    Raises:
        ArgumentError: ``limit`` is below 1.
    """
    if limit < 1:
        raise ArgumentError(f"the limit of a copy's parts must be at least 1, got {limit}")
    return _parts(copy, limit)


def _parts(copy: Copy, limit: int) -> Iterator[Copy]:
    if _span(copy.shape, copy.src_strides) <= limit:
        yield copy
        return
    rows, src_stride, dst_stride = copy.shape[0], copy.src_strides[0], copy.dst_strides[0]
    inner, src_inner, dst_inner = copy.shape[1:], copy.src_strides[1:], copy.dst_strides[1:]
    width = _span(inner, src_inner)
    at_once = max(1, (limit - width) // src_stride + 1)
    for row in range(0, rows, at_once):
        count = min(at_once, rows - row)
        src, dst = copy.src + row * src_stride, copy.dst + row * dst_stride
        if count > 1 or not inner:
            yield Copy(
                (count, *inner), src, (src_stride, *src_inner), dst, (dst_stride, *dst_inner)
            )
        else:
            yield from _parts(Copy(inner, src, src_inner, dst, dst_inner), limit)


def _placed(region: Region, shape: Sequence[int]) -> tuple[int, tuple[int, ...]]:
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


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the elements from the first to one past the last."""
    return sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1


def _dot(index: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum(map(operator.mul, index, strides))
