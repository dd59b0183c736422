"""Bring arrays, pieces and files together, and check that they keep what a checkpoint promises.

For what is about to be written and for what was read alike; ``error`` is what to raise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from fsdpcore.checkpoint.format.dtypes import named_dtype
from fsdpcore.checkpoint.format.header import MAX_HEADER_BYTES
from fsdpcore.checkpoint.format.stored import CHECKSUM_BYTES, StoredFile, StoredPiece, StoredTensor
from fsdpcore.checkpoint.format.strict_json import check_text, short
from fsdpcore.core.errors import FsdpcoreError
from fsdpcore.core.geometry.overlaps import overlapping_coordinates
from fsdpcore.core.geometry.regions import Box, Range, Region, check_region, first_overlap

MAX_BYTES = 2**62 - 1
"""Of a file or an array, so that sums of two fit into 63 bits."""

MAX_BLOCK_BYTES = 2**30

MAX_DIMENSIONS = 64
"""Of an array, as many as NumPy has."""

_MAX_NAME_BYTES = 255  # as file systems have it
_MIN_HEADER_BYTES = 10  # the length and {}
_OTHER_FILES = ("COMMIT", "metadata.json")


class MetadataBuilder:
    """The tensors of a checkpoint, added one after the other.

    Args:
        files: what they lie in.
        block_bytes: that have a checksum together, from 1 to ``MAX_BLOCK_BYTES``.
        error: to raise if anything does not fit.
    """

    def __init__(
        self, files: Sequence[StoredFile], block_bytes: int, error: type[FsdpcoreError]
    ) -> None:
        for file in files:
            check_file(file, error)
        self._files = files
        self._ends = [file.table for file in files]
        self._block_bytes = block_bytes
        self._error = error
        self._arrays: list[tuple[str, np.dtype[Any], tuple[int, ...], int]] = []
        # A column for each attribute of the pieces of all arrays.
        self._regions: list[Region] = []
        self._file_of: list[int] = []
        self._offsets: list[int] = []
        self._sizes: list[int] = []

    def add(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        pieces: Sequence[tuple[Region, int, int]],
    ) -> None:
        """Add an array: dtype by its name, and of each piece region, file and offset.

        Raises the ``error`` unless the pieces lie in the array and in files, and do not overlap.
        """
        error = self._error
        try:
            kind = named_dtype(dtype, error)
        except error as fault:
            raise error(f"{short(name)}: {fault}") from None
        itemsize = kind.itemsize
        check_shape(shape, itemsize, name, error)
        if not _ascending(pieces, math.prod(shape)):
            check_pieces([region for region, _, _ in pieces], shape, name, error)
        for region, file, offset in pieces:
            nbytes = region.size * itemsize
            if type(file) is not int or not 0 <= file < len(self._ends):
                raise error(f"{short(name)} lies in file {short(file)} of {len(self._ends)}")
            if type(offset) is not int or not 0 <= offset <= self._ends[file] - nbytes:
                raise error(
                    f"{short(name)} has {nbytes} bytes at byte {short(offset)} of the file "
                    f"{short(self._files[file].name)}, whose data end at byte {self._ends[file]}"
                )
            self._regions.append(region)
            self._file_of.append(file)
            self._offsets.append(offset)
            self._sizes.append(nbytes)
        self._arrays.append((name, kind, shape, len(pieces)))

    def tensors(self) -> dict[str, StoredTensor]:
        """Return all by name; raises the ``error`` unless the pieces fill the files."""
        blocks = place(
            self._files,
            self._file_of,
            self._offsets,
            self._sizes,
            self._block_bytes,
            self._error,
        )
        columns = (self._regions, self._file_of, self._offsets, self._sizes, blocks)
        pieces = map(StoredPiece, *columns)
        return {
            name: StoredTensor(name, dtype, shape, tuple(islice(pieces, count)))
            for name, dtype, shape, count in self._arrays
        }


def is_count(value: object, limit: int = MAX_BYTES) -> bool:
    """Whether a value is an int, no bool, from 0 to ``limit``."""
    return type(value) is int and 0 <= value <= limit


def check_shape(
    shape: tuple[int, ...], itemsize: int, name: str, error: type[FsdpcoreError]
) -> None:
    """Raise ``error`` unless this is the shape of an array that memory could address."""
    if len(shape) > MAX_DIMENSIONS:
        raise error(f"{short(name)} has {len(shape)} axes, more than the {MAX_DIMENSIONS} of NumPy")
    nbytes = itemsize
    for extent in shape:
        if type(extent) is not int or extent < 0:
            raise error(f"{short(name)} has the shape {short(shape)}; it takes integers from 0 on")
        # Not 0, as no library can make an array whose other extents overflow.
        nbytes *= extent or 1
    if nbytes > MAX_BYTES:
        raise error(f"{short(name)} has the shape {short(shape)}, which is 2**62 bytes or more")


def _ascending(pieces: Sequence[tuple[Region, int, int]], size: int) -> bool:
    """Whether all are ranges in the order of an array's elements: what is common, looked at fast.

    Such pieces do not overlap, are not empty, and do not leave the array.
    """
    behind = 0
    for region, _, _ in pieces:
        if type(region) is not Range:
            return False
        start, stop = region.start, region.stop
        if type(start) is not int or type(stop) is not int or not behind <= start < stop <= size:
            return False
        behind = stop
    return True


def check_pieces(
    regions: Sequence[Region], shape: tuple[int, ...], name: str, error: type[FsdpcoreError]
) -> None:
    """Raise ``error`` unless the regions lie in an array, are not empty and do not overlap."""
    if _disjoint_boxes(regions, shape):
        return
    what = short(name)
    for number, region in enumerate(regions):
        check_region(region, shape, f"piece {number} of {what}", error)
        if not region.size:
            raise error(f"piece {number} of {what} is empty")
    found = first_overlap(regions, shape) if len(regions) > 1 else None
    if found is not None:
        one, other = found
        raise error(
            f"pieces {one} and {other} of {what} share elements: {regions[one]} and "
            f"{regions[other]}"
        )


def _disjoint_boxes(regions: Sequence[Region], shape: tuple[int, ...]) -> bool:
    """Whether all are boxes, for which ``check_pieces`` holds: looked at fast, without words."""
    if not shape or any(type(region) is not Box for region in regions):
        return False
    axes = len(shape)
    boxes = [box for box in regions if isinstance(box, Box)]
    if {type(bound) for box in boxes for bound in (box.start, box.stop)} != {tuple}:
        return False
    if any(len(box.start) != axes or len(box.stop) != axes for box in boxes):
        return False
    flat = list(chain.from_iterable((*box.start, *box.stop) for box in boxes))
    if {*map(type, flat)} != {int} or not 0 <= min(flat) <= max(flat) <= MAX_BYTES:
        return False
    rows = np.array(flat, np.int64).reshape(-1, 2 * axes)
    starts, stops = rows[:, :axes], rows[:, axes:]
    if not ((starts < stops) & (stops <= np.array(shape, np.int64))).all():
        return False
    if not starts[:, 1:].any() and bool((stops[:, 1:] == np.array(shape[1:], np.int64)).all()):
        order = np.argsort(starts[:, 0])  # whole rows
        return bool((stops[order[:-1], 0] <= starts[order[1:], 0]).all())
    return overlapping_coordinates(starts, stops) is None


def check_file(file: StoredFile, error: type[FsdpcoreError]) -> None:
    """Raise ``error`` unless a file's name is one, and the parts of the file are in order."""
    check_file_name(file.name, error)
    what = f"the file {short(file.name)}"
    for value in (file.size, file.data_start, file.table):
        if not is_count(value):
            raise error(f"{what} has {short(value)} where a number of bytes belongs")
    if not _MIN_HEADER_BYTES <= file.data_start <= file.table <= file.size:
        raise error(
            f"{what} of {file.size} bytes cannot have its data at byte {file.data_start} and its "
            f"checksums at byte {file.table}"
        )
    if file.data_start > MAX_HEADER_BYTES + 8:
        raise error(f"{what} has a header of {file.data_start} bytes, more than is allowed")
    if (file.size - file.table) % CHECKSUM_BYTES:
        raise error(f"{what} ends with a part of a checksum")
    for value in (file.header_checksum, file.table_checksum):
        if not is_count(value, 2**64 - 1):
            raise error(f"{what} has {short(value)} where a checksum of 64 bits belongs")


def check_file_name(name: object, error: type[FsdpcoreError]) -> None:
    """Raise ``error`` unless ``name`` is that of a file in the checkpoint's own folder."""
    check_text(name, "the name of a file", error)
    assert isinstance(name, str)
    fault = None
    if not name or name.startswith("."):
        fault = "is empty or begins with a dot"
    elif name in _OTHER_FILES:
        fault = "is that of another file of a checkpoint"
    elif any(character in "/\\\x7f" or character < " " for character in name):
        fault = "has a separator or a control character"
    elif len(name.encode()) > _MAX_NAME_BYTES:
        fault = f"has more than {_MAX_NAME_BYTES} bytes"
    if fault is not None:
        raise error(f"the name of a file is {short(name)}, which {fault}")


def place(
    files: Sequence[StoredFile],
    file_of: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    block_bytes: int,
    error: type[FsdpcoreError],
) -> list[int]:
    """Return for each piece the index of its first checksum in the table of its file.

    Args:
        files: checked by ``check_file``.
        file_of: for each piece the index of its file, which exists.
        offsets: for each piece its first byte, at most ``MAX_BYTES``.
        sizes: for each piece its bytes, more than 0 and at most ``MAX_BYTES``.
        block_bytes: that have a checksum together, at most ``MAX_BLOCK_BYTES``.
        error: what to raise if the pieces of a file do not fill it, or its table does not fit.
    """
    if len({file.name for file in files}) < len(files):
        raise error("two files have the same name")
    owner = np.array(file_of, np.int64)
    begin, nbytes = np.array(offsets, np.int64), np.array(sizes, np.int64)
    order = np.lexsort((begin, owner))
    owner, begin, nbytes = owner[order], begin[order], nbytes[order]
    blocks = -(-nbytes // block_bytes)
    first = np.zeros(len(order), np.int64)
    bounds = np.searchsorted(owner, np.arange(len(files) + 1)).tolist()
    for file, low, high in zip(files, bounds, bounds[1:], strict=False):
        _check_filled(file, begin[low:high], nbytes[low:high], error)
        ends = np.cumsum(blocks[low:high])
        first[low + 1 : high] = ends[:-1]
        count = int(ends[-1]) if high > low else 0
        if count != file.blocks:
            raise error(
                f"the file {short(file.name)} has {file.blocks} checksums, but its pieces have "
                f"{count} blocks of {block_bytes} bytes"
            )
    found = np.empty_like(first)
    found[order] = first
    return found.tolist()


def _check_filled(
    file: StoredFile,
    begin: np.ndarray[tuple[int], np.dtype[np.int64]],
    nbytes: np.ndarray[tuple[int], np.dtype[np.int64]],
    error: type[FsdpcoreError],
) -> None:
    """Raise ``error`` unless the pieces of a file, in order, fill it from data to table."""
    ends = np.concatenate(([file.data_start], begin + nbytes))
    begins = np.concatenate((begin, [file.table]))
    wrong = np.flatnonzero(begins != ends)
    if wrong.size:
        at, behind = int(begins[wrong[0]]), int(ends[wrong[0]])
        fault = "overlap" if at < behind else "leave a hole"
        raise error(
            f"the pieces in the file {short(file.name)} {fault} between the bytes "
            f"{min(at, behind)} and {max(at, behind)}"
        )
