"""A folder of PyTorch's distributed checkpoint as a source of arrays."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

from fsdpcore.checkpoint.format.strict_json import short
from fsdpcore.checkpoint.interchange.array_sources import ArraySource, FillTarget
from fsdpcore.checkpoint.interchange.dcp.metadata import Chunk, read_metadata
from fsdpcore.checkpoint.interchange.dcp.names import DTYPES
from fsdpcore.checkpoint.interchange.dcp.tensors import read_tensor
from fsdpcore.checkpoint.interchange.foreign_files import (
    StridedBox,
    opened_file,
    read_common,
    read_into,
)
from fsdpcore.core.errors import ArgumentError, CheckpointError, CorruptCheckpointError
from fsdpcore.core.geometry.regions import (
    bounding_box,
    intersect,
    missing_elements,
    whole,
)

METADATA_NAME = ".metadata"

_MOST_METADATA = 1 << 30
_MOST_PLACES = 1 << 16  # remembered


def is_dcp(path: object) -> bool:
    """Whether a path is that of a folder with a distributed checkpoint of PyTorch."""
    return isinstance(path, (str, os.PathLike)) and Path(path, METADATA_NAME).is_file()


class DcpSource(ArraySource):
    """The tensors of a distributed checkpoint. Nothing is verified but that sizes fit.

    The file ``.metadata`` is a pickle. It is read as data: nothing that it names is imported.

    Args:
        path: the folder.

    Raises:
        ArgumentError: it is no such folder; a tensor has a dtype that NumPy does not have, or was
            compressed.
        CorruptCheckpointError: its files make no sense, or do not fit.
        CheckpointError: something could not be read.

    Attributes:
        skipped: names of what is no tensor, such as counters of an optimizer. They are pickled
            objects, which are not read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.what = os.fspath(path)
        self._folder = Path(path)
        file = self._folder / METADATA_NAME
        found = read_metadata(_content(file), str(file))
        self.arrays = found.arrays
        self.skipped = found.objects
        self._chunks = found.chunks
        self._places: OrderedDict[Chunk, StridedBox] = OrderedDict()
        self._check_files()

    def _check_files(self) -> None:
        """Raise unless the files are as long as what is in them."""
        ends: dict[str, tuple[int, str]] = {}
        for name, chunks in self._chunks.items():
            for _, (file, offset, length) in chunks:
                ends[file] = max(ends.get(file, (0, "")), (offset + length, name))
        for file, (end, name) in ends.items():
            path = self._folder / file
            try:
                with opened_file(path) as fd:
                    size = os.fstat(fd).st_size
            except ArgumentError as error:
                raise CorruptCheckpointError(f"{error}, which has {short(name)}") from None
            if size < end:
                raise CorruptCheckpointError(
                    f"{path} has {size} bytes, but {short(name)} is at bytes up to {end}"
                )

    def check(self, names: Iterable[str]) -> None:
        for name in names:
            shape = self.arrays[name].shape
            boxes = [chunk.box for chunk in self._chunks[name]]
            missing = missing_elements(whole(shape), boxes, shape)
            if missing:
                raise CheckpointError(
                    f"{self.what}: of {short(name)}, {missing} of {self.arrays[name].size} "
                    "elements were not saved"
                )

    def fill(self, parts: Sequence[FillTarget]) -> None:
        by_file: dict[str, list[tuple[Chunk, FillTarget]]] = {}
        for part in parts:
            shape = self.arrays[part.name].shape
            around = bounding_box(part.region, shape)
            for chunk in self._chunks[part.name]:
                if not shape or intersect(chunk.box, around) is not None:
                    by_file.setdefault(chunk.item.file, []).append((chunk, part))
        for file, here in by_file.items():
            path = self._folder / file
            with opened_file(path) as fd:
                for chunk, (name, region, array) in here:
                    stored = self._place(fd, path, name, chunk)
                    read_common(fd, path, stored, self.arrays[name].shape, region, array)

    def _place(self, fd: int, path: Path, name: str, chunk: Chunk) -> StridedBox:
        """Return where a chunk's elements lie in its file."""
        found = self._places.get(chunk)
        if found is not None:
            return found
        box, (_, offset, length) = chunk

        def read_at(start: int, count: int) -> bytes:
            if not 0 <= start <= start + count <= length:
                raise ValueError(f"bytes {start} to {start + count} of {length}")
            data = bytearray(count)
            read_into(fd, offset + start, memoryview(data), path)
            return bytes(data)

        what = f"{path}, at byte {offset}, {short(name)},"
        saved = read_tensor(read_at, length, what)
        if DTYPES[saved.dtype] != self.arrays[name].dtype or saved.shape != box.shape:
            raise CorruptCheckpointError(
                f"{what} has dtype {saved.dtype} and size {saved.shape}, but "
                f"{self.arrays[name].dtype} and {box.shape} in {METADATA_NAME}"
            )
        found = StridedBox(box, offset + saved.offset, saved.strides)
        self._places[chunk] = found
        if len(self._places) > _MOST_PLACES:
            self._places.popitem(last=False)
        return found


def _content(file: Path) -> bytes:
    if not file.is_file() and file.parent.is_dir():
        others = sorted(each.name for each in file.parent.glob("__*.metadata"))
        hint = ""
        if others:
            hint = (
                f": {others[0]} and its like are of a save with use_collectives=False, of which "
                "each rank has its own; save it with use_collectives=True"
            )
        raise ArgumentError(
            f"{file.parent} has no {METADATA_NAME}, so that it is no distributed checkpoint of "
            f"PyTorch that can be read{hint}"
        )
    with opened_file(file) as fd:
        size = os.fstat(fd).st_size
        if size > _MOST_METADATA:
            raise CorruptCheckpointError(f"{file} has {size} bytes, too many for metadata")
        data = bytearray(size)
        read_into(fd, 0, memoryview(data), file)
    return bytes(data)
