"""Bring arrays, pieces and files together, and check that they keep what a checkpoint promises.

For what is about to be written and for what was read alike; ``error`` is what to raise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fsdpcore.checkpoint.format.dtypes import named_dtype
from fsdpcore.checkpoint.format.header import MAX_HEADER_BYTES
from fsdpcore.checkpoint.format.piece_table import PieceTable
from fsdpcore.checkpoint.format.stored import CHECKSUM_BYTES, StoredFile
from fsdpcore.checkpoint.format.strict_json import check_text, short
from fsdpcore.core.errors import FsdpcoreError
from fsdpcore.core.geometry.disjoint import overlapping
from fsdpcore.core.geometry.region_table import Column, Ints, RegionTable, ShapeTable, narrowed
from fsdpcore.core.geometry.regions import Region, check_region, first_overlap

MAX_BYTES = 2**62 - 1
"""Of a file or an array, so that sums of two fit into 63 bits."""

MAX_BLOCK_BYTES = 2**30

MAX_DIMENSIONS = 64
"""Of an array, as many as NumPy has."""

_MAX_NAME_BYTES = 255  # as file systems have it
_MIN_HEADER_BYTES = 10  # the length and {}
_NOT_IN_NAMES = re.compile(r"[/\\\x7f\x00-\x1f]")
_OTHER_FILES = ("COMMIT", "metadata.json")


class ArrayKind(NamedTuple):
    """What an array is: dtype and shape of the whole."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class MetadataBuilder:
    """Arrays and their pieces, given one after the other, each piece with its place.

    Args:
        files: what they lie in.
        error: to raise if anything does not fit.
    """

    def __init__(self, files: Sequence[StoredFile], error: type[FsdpcoreError]) -> None:
        self._files = files
        self._error = error
        self.arrays: dict[str, ArrayKind] = {}
        # A column for each attribute of the pieces of all arrays.
        self._regions: list[Region] = []
        self._tensor: list[int] = []
        self._file_of: list[int] = []
        self._offsets: list[int] = []

    def add(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        pieces: Sequence[tuple[Region, int, int]],
    ) -> None:
        """Add an array: dtype by its name, and of each piece region, file and offset.

        Raises the ``error`` unless this is an array, and there are such files.
        """
        error = self._error
        number = len(self.arrays)
        self.arrays[name] = checked_array(name, dtype, shape, error)
        for region, file, offset in pieces:
            if type(file) is not int or not 0 <= file < len(self._files):
                raise error(f"{short(name)} lies in file {short(file)} of {len(self._files)}")
            if not is_count(offset):
                raise error(
                    f"{short(name)} is at byte {short(offset)} of the file "
                    f"{short(self._files[file].name)}"
                )
            self._regions.append(region)
            self._tensor.append(number)
            self._file_of.append(file)
            self._offsets.append(offset)

    def table(self) -> PieceTable:
        """Return all pieces; raises the ``error`` unless they fit, and leave no holes."""
        regions = RegionTable.of(self._regions)
        tensor = np.array(self._tensor, np.int64)
        check_regions(self.arrays, tensor, regions, self._error)
        file, offsets = np.array(self._file_of, np.int64), np.array(self._offsets, np.int64)
        nbytes = bytes_of(self.arrays, tensor, regions, self._error)
        self._check_inside(tensor, file, offsets, nbytes)
        order = np.lexsort((offsets, file))
        counts = np.bincount(file, minlength=len(self._files)).astype(np.int64)
        made = PieceTable(counts, tensor[order], regions.take(order), nbytes[order])
        wanted = made.offsets(np.array([each.data_start for each in self._files], np.int64))
        wrong = np.flatnonzero(offsets[order] != wanted)
        if wrong.size:
            first = wrong[0]
            name = self._files[made.file[first]].name
            raise _not_filled(name, int(offsets[order[first]]), int(wanted[first]), self._error)
        return made

    def _check_inside(self, tensor: Ints, file: Ints, offsets: Ints, nbytes: Ints) -> None:
        ends = np.array([each.table for each in self._files], np.int64)
        outside = np.flatnonzero(offsets > ends[file] - nbytes)
        if outside.size:
            first = outside[0]
            of = self._files[file[first]]
            raise self._error(
                f"{short(list(self.arrays)[tensor[first]])} has {nbytes[first]} bytes at byte "
                f"{offsets[first]} of the file {short(of.name)}, whose data end at byte {of.table}"
            )


def checked_array(
    name: str, dtype: str, shape: tuple[int, ...], error: type[FsdpcoreError]
) -> ArrayKind:
    """Return what an array is; raises ``error`` if there can be none like it."""
    try:
        kind = named_dtype(dtype, error)
    except error as fault:
        raise error(f"{short(name)}: {fault}") from None
    check_shape(shape, kind.itemsize, name, error)
    return ArrayKind(kind, shape)


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


def check_regions(
    arrays: Mapping[str, ArrayKind],
    tensor: Column,
    regions: RegionTable,
    error: type[FsdpcoreError],
) -> None:
    """Raise ``error`` unless regions lie in their arrays, are not empty and do not overlap."""
    shapes = ShapeTable([each.shape for each in arrays.values()])
    wrong = regions.misplaced(tensor, shapes)
    if wrong.size:
        number = int(wrong[0])
        owner = int(tensor[number])
        within = int(np.count_nonzero(tensor[:number] == owner))
        what = f"piece {within} of {short(list(arrays)[owner])}"
        check_region(regions[number], shapes.shapes[owner], what, error)
        raise error(f"{what} is empty")
    found = overlapping(tensor, regions, tensor, shapes)
    if found.size:
        owner = int(found[0])
        mine = [regions[each] for each in np.flatnonzero(tensor == owner).tolist()]
        pair = first_overlap(mine, shapes.shapes[owner])
        assert pair is not None
        one, other = pair
        raise error(
            f"pieces {one} and {other} of {short(list(arrays)[owner])} share elements: "
            f"{mine[one]} and {mine[other]}"
        )


def bytes_of(
    arrays: Mapping[str, ArrayKind],
    tensor: Column,
    regions: RegionTable,
    error: type[FsdpcoreError],
) -> Column:
    """Return the bytes of each region; raises ``error`` if they are more than can be counted."""
    itemsizes = np.array([each.dtype.itemsize for each in arrays.values()], np.int64)
    found: Ints = regions.sizes * itemsizes[tensor]
    if found.sum(dtype=np.float64) > MAX_BYTES:
        raise error("the pieces have 2**62 bytes or more")
    return narrowed(found, int(found.max(initial=0)))


def check_filled(
    files: Sequence[StoredFile], table: PieceTable, block_bytes: int, error: type[FsdpcoreError]
) -> Ints:
    """Return the numbers of blocks, see ``PieceTable.blocks``.

    Args:
        files: checked by ``check_file``.
        table: of the pieces in them.
        block_bytes: that have a checksum together, at most ``MAX_BLOCK_BYTES``.
        error: what to raise if the pieces of a file do not fill it, or its table does not fit.
    """
    if len({file.name for file in files}) < len(files):
        raise error("two files have the same name")
    numbers = table.blocks(block_bytes)
    counts = np.diff(numbers[table.begins])
    ends = table.data + np.array([file.data_start for file in files], np.int64)
    for file, end, blocks in zip(files, ends.tolist(), counts.tolist(), strict=True):
        if end != file.table:
            raise _not_filled(file.name, file.table, end, error)
        if blocks != file.blocks:
            raise error(
                f"the file {short(file.name)} has {file.blocks} checksums, but its pieces have "
                f"{blocks} blocks of {block_bytes} bytes"
            )
    return numbers


def _not_filled(name: str, at: int, behind: int, error: type[FsdpcoreError]) -> FsdpcoreError:
    fault = "overlap" if at < behind else "leave a hole"
    return error(
        f"the pieces in the file {short(name)} {fault} between the bytes {min(at, behind)} and "
        f"{max(at, behind)}"
    )


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
    elif _NOT_IN_NAMES.search(name):
        fault = "has a separator or a control character"
    elif len(name.encode()) > _MAX_NAME_BYTES:
        fault = f"has more than {_MAX_NAME_BYTES} bytes"
    if fault is not None:
        raise error(f"the name of a file is {short(name)}, which {fault}")
