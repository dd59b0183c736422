"""Checkpoints in memory: a ``Storage`` whose files are arrays of bytes, here or elsewhere."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from fsdpcore.checkpoint.storage.files import ReadableBuffer, WritableBuffer
from fsdpcore.checkpoint.storage.storage import (
    Storage,
    StorageReader,
    StorageWriter,
    split_name,
)
from fsdpcore.core.buffers import Bytes

Fetch = Callable[[int, Bytes], None]


def new_room(size: int) -> Bytes:
    """Memory of so many bytes."""
    return np.empty(size, np.uint8)


class MemoryFile:
    """What a file holds, or who does.

    Args:
        size: in bytes.
        fetch: fills memory with the bytes from an offset on; blocks. Any thread may call it.
    """

    def __init__(self, size: int, fetch: Fetch) -> None:
        self.size = size
        self.fetch = fetch

    @classmethod
    def of(cls, data: Bytes) -> MemoryFile:
        """One that is in the memory of this process."""

        def fetch(offset: int, out: Bytes) -> None:
            np.copyto(out, data[offset : offset + out.size])

        return cls(data.size, fetch)


class MemoryStorage(Storage):
    """Folders of files in memory, of one process alone; what is read is taken as it is.

    Args:
        path: what messages call it.
    """

    checks = False

    def __init__(self, path: str) -> None:
        self.path = path
        self._folders: dict[str, dict[str, MemoryFile]] = {}

    def add(self, name: str, file: MemoryFile) -> None:
        """Have a file, in a folder that need not exist."""
        folder, base = split_name(name)
        self._folders.setdefault(folder, {})[base] = file

    def prepare(self) -> None:
        """Do nothing: it is there."""

    def names(self, directory: str = "") -> list[str]:
        found = [*self._folders.get(directory, {})]
        return found if directory else [*found, *(name for name in self._folders if name)]

    def size(self, name: str) -> int:
        return self._file(name).size

    def make_directory(self, name: str) -> None:
        if name in self._folders:
            raise FileExistsError(errno.EEXIST, "is there already", name)
        self._folders[name] = {}

    def writer(self, name: str) -> StorageWriter:
        folder, base = split_name(name)
        if base in self._folders.get(folder, {}):
            raise FileExistsError(errno.EEXIST, "is there already", name)
        return _MemoryWriter(self, name)

    def reader(self, name: str) -> StorageReader:
        return _MemoryReader(self._file(name), name)

    def remove(self, name: str) -> None:
        self._file(name)
        folder, base = split_name(name)
        del self._folders[folder][base]

    def remove_directory(self, name: str) -> None:
        if self._folders.pop(name, None) is None:
            raise FileNotFoundError(errno.ENOENT, "is not there", name)

    def sync(self, directory: str = "") -> None:
        """Do nothing: memory lasts as long as the process."""

    @contextmanager
    def claim(self, directory: str) -> Iterator[bool]:
        yield True

    @contextmanager
    def hold(self, directory: str) -> Iterator[None]:
        yield

    def _file(self, name: str) -> MemoryFile:
        folder, base = split_name(name)
        found = self._folders.get(folder, {}).get(base)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "is not there", name)
        return found


class _MemoryWriter(StorageWriter):
    def __init__(self, storage: MemoryStorage, name: str) -> None:
        self._storage, self._name = storage, name
        self._content = bytearray()

    def write(self, *buffers: ReadableBuffer) -> None:
        for buffer in buffers:
            self._content += buffer
            self.written = len(self._content)

    def close(self) -> None:
        self._storage.add(self._name, MemoryFile.of(np.frombuffer(self._content, np.uint8)))

    def discard(self) -> None:
        """Do nothing: it was not added."""


class _MemoryReader(StorageReader):
    def __init__(self, file: MemoryFile, name: str) -> None:
        self._file, self._name = file, name
        self.size = file.size

    def read_into(self, offset: int, *buffers: WritableBuffer) -> None:
        views = [np.frombuffer(buffer, np.uint8) for buffer in buffers if len(buffer)]
        wanted = sum(view.size for view in views)
        if offset + wanted > self.size:
            raise EOFError(f"{self._name} has {self.size} bytes, {offset + wanted} are wanted")
        if len(views) == 1:
            self._file.fetch(offset, views[0])
            return
        # In one piece, since one that is elsewhere comes by messages.
        whole = np.empty(wanted, np.uint8)
        self._file.fetch(offset, whole)
        at = 0
        for view in views:
            np.copyto(view, whole[at : at + view.size])
            at += view.size

    def close(self) -> None:
        """Do nothing: the memory is its owner's."""
