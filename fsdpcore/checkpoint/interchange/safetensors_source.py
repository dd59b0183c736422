"""Safetensors files of others as a source of arrays: one, several, or those of an index.

They are read with the header of our own files, not with the library ``safetensors``: that has no
float8 for NumPy, slices along axes but gives no run of elements, takes a name that is there twice,
and maps the file, so that one that is cut off meanwhile ends the process; what it writes must be in
memory as a whole. Tests compare what is read and written with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from fsdpcore.checkpoint.format.dtypes import CODES
from fsdpcore.checkpoint.format.header import Header, read_header
from fsdpcore.checkpoint.format.metadata_builder import MAX_DIMENSIONS
from fsdpcore.checkpoint.format.strict_json import decode, short
from fsdpcore.checkpoint.interchange.array_sources import ArraySource, ArraySpec, FillTarget
from fsdpcore.checkpoint.interchange.foreign_files import (
    StridedBox,
    opened_file,
    read_common,
    read_into,
)
from fsdpcore.core.errors import ArgumentError, CorruptCheckpointError

INDEX_ENDING = ".safetensors.index.json"
ENDING = ".safetensors"

_MAX_INDEX_BYTES = 1 << 28


class _FileOffset(NamedTuple):
    """Where an array lies: file and first byte."""

    path: Path
    offset: int


class SafetensorsSource(ArraySource):
    """The arrays in safetensors files. Nothing is verified but that headers and sizes fit.

    Args:
        path: a file, an index, or a folder with either.

    Raises:
        ArgumentError: there is no such file, or a dtype that NumPy does not have.
        CorruptCheckpointError: a file is no valid safetensors file, or the index does not fit.
        CheckpointError: something could not be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.what = os.fspath(path)
        self._found: dict[str, ArraySpec] = {}
        self.arrays = self._found
        self._places: dict[str, _FileOffset] = {}
        index, files = _files_of(Path(path))
        for file in files:
            self._add(file, _header_of(file))
        if index is not None:
            self._check_index(index)

    def _add(self, file: Path, header: Header) -> None:
        for name, code, shape, _, offset in header.entries:
            if name in self._places:
                raise CorruptCheckpointError(
                    f"{short(name)} is in {self._places[name].path.name} and in {file.name}"
                )
            if code not in CODES:
                raise ArgumentError(
                    f"{file}: {short(name)} has the dtype {code}, of less than a byte, which NumPy "
                    "does not have"
                )
            if len(shape) > MAX_DIMENSIONS:
                raise ArgumentError(
                    f"{file}: {short(name)} has {len(shape)} axes, more than the {MAX_DIMENSIONS} "
                    "of NumPy"
                )
            self._found[name] = ArraySpec(CODES[code], shape)
            self._places[name] = _FileOffset(file, offset)

    def _check_index(self, index: dict[str, str]) -> None:
        for name, file in index.items():
            place = self._places.get(name)
            if place is None or place.path.name != file:
                raise CorruptCheckpointError(
                    f"{self.what}: by the index {short(name)} is in {short(file)}, but it is not"
                )
        for name in self._places:
            if name not in index:
                raise CorruptCheckpointError(
                    f"{self.what}: {short(name)} is in {self._places[name].path.name}, but not in "
                    "the index"
                )

    def check(self, names: Iterable[str]) -> None:
        pass  # all of an array is there, or its file is refused

    def fill(self, parts: Sequence[FillTarget]) -> None:
        by_file: dict[Path, list[FillTarget]] = {}
        for part in parts:
            by_file.setdefault(self._places[part.name].path, []).append(part)
        for file, here in by_file.items():
            with opened_file(file) as fd:
                for name, region, array in here:
                    shape = self._found[name].shape
                    stored = StridedBox.whole(shape, self._places[name].offset)
                    read_common(fd, file, stored, shape, region, array)


def _files_of(path: Path) -> tuple[dict[str, str] | None, list[Path]]:
    """Return the index, if there is one, and the files."""
    if path.is_dir():
        names = sorted(each for each in os.listdir(path) if not each.startswith("."))
        indexes = [each for each in names if each.endswith(INDEX_ENDING)]
        if len(indexes) > 1:
            raise ArgumentError(
                f"{path} has several indexes: {', '.join(indexes)}; name the one that is meant"
            )
        if not indexes:
            files = [path / each for each in names if each.endswith(ENDING)]
            if not files:
                raise ArgumentError(f"{path} has no file that ends with {ENDING}")
            return None, files
        path = path / indexes[0]
    if not path.name.endswith(".json"):
        return None, [path]
    index = _read_index(path)
    return index, [path.parent / each for each in dict.fromkeys(index.values())]


def _read_index(path: Path) -> dict[str, str]:
    with opened_file(path) as fd:
        size = os.fstat(fd).st_size
        if size > _MAX_INDEX_BYTES:
            raise CorruptCheckpointError(f"{path} has {size} bytes, too many for an index")
        data = bytearray(size)
        read_into(fd, 0, memoryview(data), path)
    content = decode(bytes(data), str(path))
    index = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(index, dict) or not index:
        raise CorruptCheckpointError(f"{path} has no weight_map, so that it is no index")
    for name, file in index.items():
        # A plain name, so that no index leads to files elsewhere.
        plain = isinstance(file, str) and file not in ("", ".", "..")
        if not plain or any(each in file for each in "/\\\0"):
            raise CorruptCheckpointError(
                f"{path}: the file of {short(name)} is {short(file)}, which is no plain name"
            )
    return index


def _header_of(file: Path) -> Header:
    with opened_file(file) as fd:

        def read_at(offset: int, count: int) -> bytes:
            data = bytearray(count)
            read_into(fd, offset, memoryview(data), file)
            return bytes(data)

        try:
            return read_header(read_at, os.fstat(fd).st_size)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{file}: {error}") from None
