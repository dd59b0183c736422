"""One tensor as ``torch.save`` writes it: a ZIP archive with a pickle and the elements."""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

from fsdpcore.checkpoint.format.strict_json import short
from fsdpcore.checkpoint.interchange.dcp.names import (
    DTYPES,
    IN_TENSORS,
    REBUILD,
    REBUILD_UNTYPED,
    STORAGES,
    UNTYPED,
)
from fsdpcore.checkpoint.interchange.dcp.pickles import PERSISTENT, Instance, Name, read_pickle
from fsdpcore.core.errors import ArgumentError, CorruptCheckpointError

_MOST_AT_ONCE = 1 << 20  # of a record that is no data, or of the table of contents
_MOST_PICKLE = 64 << 10
_PICKLE = "/data.pkl"
_LOCAL = struct.Struct("<4s22xHH")  # the header in front of a record


class SavedTensor(NamedTuple):
    """Where the elements of a tensor are.

    Attributes:
        dtype: by its name in ``torch``.
        shape: of the tensor.
        strides: from one element to the next along each axis, in elements.
        offset: of the first element, in bytes from the start of the archive.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def read_tensor(read_at: Callable[[int, int], bytes], size: int, what: str) -> SavedTensor:
    """Look where the elements of a tensor are; blocks. They themselves are not read.

    Args:
        read_at: returns bytes of the archive: offset, count.
        size: of the archive.
        what: it is, for messages.

    Raises:
        CorruptCheckpointError: it is no archive of one tensor.
        ArgumentError: it was written on a machine of the other byte order.
    """
    try:
        with zipfile.ZipFile(_Window(read_at, size)) as archive:
            return _Archive(archive, read_at, size, what).tensor()
    except (CorruptCheckpointError, ArgumentError, MemoryError):
        raise
    except Exception as error:  # zipfile raises whatever comes of what it finds
        raise CorruptCheckpointError(
            f"{what} is no archive of torch.save: {type(error).__name__}: {error}"
        ) from error


class _Window(io.RawIOBase):
    """An archive within a file, as ``zipfile`` reads it; never much of it at once."""

    def __init__(self, read_at: Callable[[int, int], bytes], size: int) -> None:
        self._read_at = read_at
        self._size = size
        self._at = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("before the start")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        count = left if count is None or count < 0 else min(count, left)
        if count > _MOST_AT_ONCE:
            raise ValueError(f"{count} bytes beside the data")
        data = self._read_at(self._at, count)
        self._at += count
        return data


class _Archive:
    def __init__(
        self,
        archive: zipfile.ZipFile,
        read_at: Callable[[int, int], bytes],
        size: int,
        what: str,
    ) -> None:
        self._archive = archive
        self._read_at = read_at
        self._size = size
        self._what = what
        self._records = {each.filename: each for each in archive.infolist()}

    def _wrong(self, why: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self._what} is damaged: {why}")

    def tensor(self) -> SavedTensor:
        pickles = [name for name in self._records if name.endswith(_PICKLE)]
        if len(pickles) != 1:
            raise self._wrong(f"it has {len(pickles)} records data.pkl")
        root = pickles[0].removesuffix(_PICKLE)
        order = f"{root}/byteorder"
        if order in self._records and self._content(order) != b"little":
            raise ArgumentError(
                f"{self._what} was written on a machine of another byte order, which is not read "
                "here; save it again, on a little-endian machine"
            )
        saved = read_pickle(self._content(pickles[0]), IN_TENSORS, f"data.pkl of {self._what}")
        return self._rebuilt(saved, root)

    def _content(self, name: str) -> bytes:
        record = self._stored(name)
        if record.file_size > _MOST_PICKLE:
            raise self._wrong(f"its {short(name)} has {record.file_size} bytes")
        return self._archive.read(record)

    def _stored(self, name: str) -> zipfile.ZipInfo:
        record = self._records.get(name)
        if record is None:
            raise self._wrong(f"it has no {short(name)}")
        # torch.save never compresses, so that nothing can become larger than the file.
        if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
            raise self._wrong(f"its {short(name)} is compressed")
        return record

    def _begin(self, record: zipfile.ZipInfo) -> int:
        """Return where the bytes of a record begin in the archive."""
        header = self._read_at(record.header_offset, _LOCAL.size)
        magic, name, more = _LOCAL.unpack(header)
        found = record.header_offset + _LOCAL.size + name + more
        if magic != b"PK\3\4" or found + record.file_size > self._size:
            raise self._wrong(f"its {short(record.filename)} is not where it should be")
        return int(found)

    def _rebuilt(self, saved: Any, root: str) -> SavedTensor:
        if not isinstance(saved, Instance) or saved.of not in (REBUILD, REBUILD_UNTYPED):
            raise self._wrong("it is no tensor")
        typed = saved.of == REBUILD
        if len(saved.args) < (6 if typed else 7):
            raise self._wrong("its tensor lacks arguments")
        storage, start, shape, strides = saved.args[:4]
        kind, key, count = self._storage(storage)
        if typed:
            dtype = STORAGES.get(kind, "")
        else:
            dtype = saved.args[6].name if isinstance(saved.args[6], Name) else ""
        if dtype not in DTYPES or typed == (kind == UNTYPED):
            raise self._wrong(f"its storage is a {kind.name}")
        if any(saved.args[6 if typed else 7 :]):
            raise self._wrong("its tensor is conjugated or negated")
        itemsize = DTYPES[dtype].itemsize
        record = self._stored(f"{root}/data/{key}")
        if record.file_size != count * (itemsize if typed else 1):
            raise self._wrong(f"its storage has {record.file_size} bytes, not as many as it says")
        self._check_inside(start, shape, strides, record.file_size // itemsize)
        return SavedTensor(dtype, shape, strides, self._begin(record) + start * itemsize)

    def _storage(self, storage: Any) -> tuple[Name, str, int]:
        args = storage.args[0] if isinstance(storage, Instance) else None
        if type(args) is tuple and len(args) == 5 and storage.of == PERSISTENT:
            tag, kind, key, _, count = args
            types = (type(kind), type(key), type(count))
            if tag == "storage" and types == (Name, str, int):
                return kind, key, count
        raise self._wrong("its tensor has no storage")

    def _check_inside(self, start: Any, shape: Any, strides: Any, count: int) -> None:
        for each in (shape, strides, (start,)):
            counts = type(each) is tuple and all(type(n) is int and n >= 0 for n in each)
            if not counts:
                raise self._wrong("its tensor has no sizes")
        if len(shape) != len(strides):
            raise self._wrong("its sizes and strides differ in number")
        if math.prod(shape):
            end = start + 1 + sum((n - 1) * each for n, each in zip(shape, strides, strict=True))
            if end > count or math.prod(shape) > count:
                raise self._wrong(f"its tensor goes beyond its storage of {count} elements")
