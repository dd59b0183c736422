"""Files of others, read at an offset: bytes as they lie there, or boxes with any strides."""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from fsdpcore.core.buffers import Array, byte_view
from fsdpcore.core.errors import ArgumentError, CheckpointError, CorruptCheckpointError, in_words
from fsdpcore.core.geometry.regions import (
    Box,
    Range,
    Region,
    as_range,
    common_boxes,
    first_element,
)

_WINDOW_BYTES = 4 << 20  # read at once where elements are put elsewhere than they lie
_GAP_BYTES = 64 << 10  # between two rows: what is not needed of these is not read, either


@contextmanager
def opened_file(path: Path) -> Iterator[int]:
    """Open a file to read; gives its descriptor.

    Raises:
        ArgumentError: there is none, or it is no regular file.
        CheckpointError: the system refuses.
    """
    try:
        # NONBLOCK: opening a FIFO would wait for somebody at its other end.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise ArgumentError(f"there is no file {path}") from None
        raise CheckpointError(f"{path} cannot be read: {in_words(error)}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ArgumentError(f"{path} is no regular file")
        yield fd
    finally:
        os.close(fd)


def read_into(fd: int, offset: int, data: memoryview, path: Path) -> None:
    """Fill memory with the bytes at an offset; blocks.

    Raises:
        CorruptCheckpointError: the file ends before.
        CheckpointError: the system refuses.
    """
    while data.nbytes:
        try:
            count = os.preadv(fd, [data], offset)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {in_words(error)}") from error
        if not count:
            raise CorruptCheckpointError(f"{path} was cut off while it was read")
        data, offset = data[count:], offset + count


class StridedBox(NamedTuple):
    """A box of an array that lies in a file.

    Attributes:
        box: of the array.
        offset: of its first element in the file, in bytes.
        strides: from one element to the next along each axis, in elements; not negative.
    """

    box: Box
    offset: int
    strides: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...], offset: int) -> StridedBox:
        """Return that of a whole array in C order."""
        return cls(Box((0,) * len(shape), shape), offset, strides_of(shape))


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of an array in C order, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def read_common(
    fd: int, path: Path, stored: StridedBox, shape: tuple[int, ...], region: Region, array: Array
) -> None:
    """Read what a stored box and a region of the same array have in common; blocks.

    Args:
        fd, path: of the file.
        stored: what lies where.
        shape: of the array.
        region: that is wanted.
        array: the memory of the region: flat and contiguous for a ``Range``, of the box's shape for
            a ``Box``. The rest of it stays as it is.

    Raises:
        CorruptCheckpointError, CheckpointError: as ``read_into``.
    """
    box, offset, strides = stored
    if isinstance(region, Range) and _in_order(box.shape, strides):
        run = as_range(box, shape)
        if run is not None:  # the usual case, which needs no boxes
            start, stop = max(run.start, region.start), min(run.stop, region.stop)
            if start < stop:
                part = array[start - region.start : stop - region.start]
                at = offset + (start - run.start) * array.itemsize
                read_into(fd, at, byte_view(part).data, path)
            return
    for common in common_boxes(box, region, shape):
        before = (
            (low - origin) * stride
            for low, origin, stride in zip(common.start, box.start, strides, strict=True)
        )
        target = _view(region, array, common, shape)
        _read_strided(fd, path, offset + sum(before) * array.itemsize, strides, target)


def _view(region: Region, array: Array, box: Box, shape: tuple[int, ...]) -> Array:
    """Return the part of a region's memory that is a box of the array."""
    if isinstance(region, Box):
        pairs = zip(box.start, box.stop, region.start, strict=True)
        slices = tuple(slice(low - origin, high - origin) for low, high, origin in pairs)
        found: Array = array[slices] if slices else array
        return found
    strides = [stride * array.itemsize for stride in strides_of(shape)]
    return as_strided(array[first_element(box, shape) - region.start :], box.shape, strides)


def _read_strided(
    fd: int, path: Path, offset: int, strides: tuple[int, ...], target: Array
) -> None:
    """Fill an array, which is not empty, with elements that lie ``strides`` apart in a file."""
    itemsize = target.itemsize
    if target.flags.c_contiguous and _in_order(target.shape, strides):
        read_into(fd, offset, byte_view(target).data, path)
        return
    steps = [(n - 1) * stride for n, stride in zip(target.shape, strides, strict=True)]
    span = (1 + sum(steps)) * itemsize
    axis = max(range(target.ndim), key=lambda each: steps[each] and strides[each])
    stride = strides[axis] * itemsize
    gap = stride - (span - steps[axis] * itemsize)
    if steps[axis] and (gap >= _GAP_BYTES or span > _WINDOW_BYTES):
        # Some rows of the outermost axis at a time; with wide gaps between them, each for itself.
        most = 1 if gap >= _GAP_BYTES else _WINDOW_BYTES // stride
        rows = max(1, min(most, target.shape[axis] // 2))
        ahead = (slice(None),) * axis
        for row in range(0, target.shape[axis], rows):
            part = target[(*ahead, slice(row, row + rows))]
            _read_strided(fd, path, offset + row * stride, strides, part)
        return
    scratch = np.empty(span // itemsize, target.dtype)
    read_into(fd, offset, byte_view(scratch).data, path)
    target[...] = as_strided(scratch, target.shape, [each * itemsize for each in strides])


def _in_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements lie one behind the other in C order, with nothing between them."""
    size = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != size:
            return False
        size *= extent
    return True
