"""Checkpoints in an object store, or whatever else fsspec reaches: ``s3://bucket/run``.

Such a store has no directories to sync and no locks: an object is durable, and seen, when its
writing has ended, so that the marker, written last, commits as it does on a file system. Two jobs
must not save into the same folder at the same time.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fsdpcore.checkpoint.storage.files import ReadableBuffer, WritableBuffer
from fsdpcore.checkpoint.storage.storage import (
    Storage,
    StorageReader,
    StorageWriter,
    basename,
    split_name,
)
from fsdpcore.core.errors import ArgumentError, MissingDependencyError

_REQUEST_BYTES = 8 << 20
"""Bytes asked for at once, which are in memory twice until they are where they belong."""


class FsspecStorage(Storage):
    """A folder of any file system of fsspec.

    Args:
        url: of the folder, such as ``s3://bucket/run`` or ``memory://run``.
        options: for the file system: credentials, endpoints; see its own documentation.

    Raises:
        MissingDependencyError: fsspec, or the package for such URLs, is not installed.
        ArgumentError: fsspec does not know such URLs.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self.path = url
        self._system, self._root = _opened_system(url, options)

    def __repr__(self) -> str:
        return f"FsspecStorage({self.path!r})"

    def prepare(self) -> None:
        with self._errors():
            self._system.makedirs(self._root, exist_ok=True)

    def names(self, directory: str = "") -> list[str]:
        path = self._at(basename(directory)) if directory else self._root
        return sorted(os.path.basename(each) for each in self._listed(path))

    def size(self, name: str) -> int:
        split_name(name)
        with self._errors(name):
            about = self._system.info(self._at(name))
        if about.get("islink"):
            raise OSError(errno.ELOOP, "is a symbolic link", self._full_name(name))
        if about["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, "is a directory", self._full_name(name))
        if about["type"] != "file" or about["size"] is None:
            raise OSError(errno.EINVAL, "is not a regular file", self._full_name(name))
        return int(about["size"])

    def make_directory(self, name: str) -> None:
        path = self._at(basename(name))
        with self._errors(name):
            self._system.invalidate_cache()
            if self._system.exists(path):
                raise FileExistsError(errno.EEXIST, "is there already", self._full_name(name))
            # Without directories of its own, a store does nothing here, or makes an empty object.
            self._system.makedirs(path, exist_ok=True)

    def writer(self, name: str) -> StorageWriter:
        split_name(name)
        path = self._at(name)
        with self._errors(name):
            if self._system.exists(path):
                raise FileExistsError(errno.EEXIST, "is there already", self._full_name(name))
            return _ObjectWriter(self, name, self._system.open(path, "wb"))

    def reader(self, name: str) -> StorageReader:
        return _ObjectReader(self, name, self.size(name))

    def remove(self, name: str) -> None:
        split_name(name)
        with self._errors(name):
            self._system.rm_file(self._at(name))
            self._system.invalidate_cache()

    def remove_directory(self, name: str) -> None:
        path = self._at(basename(name))
        with self._errors(name):
            found = self._listed(path)
            for each, kind in found.items():
                if kind != "directory":
                    with suppress(FileNotFoundError):
                        self._system.rm_file(each)
            self._system.invalidate_cache()
            if "directory" in found.values():
                raise OSError(errno.ENOTEMPTY, "has directories in it", self._full_name(name))
            # Where directories are more than the beginnings of names, an empty one is left.
            if self._system.exists(path):
                try:
                    self._system.rmdir(path)
                except OSError:
                    if self._listed(path):
                        raise
                self._system.invalidate_cache()

    def sync(self, directory: str = "") -> None:
        """Do nothing: an object is durable when its writing has ended."""

    @contextmanager
    def claim(self, directory: str) -> Iterator[bool]:
        basename(directory)
        yield True

    @contextmanager
    def hold(self, directory: str) -> Iterator[None]:
        basename(directory)
        yield

    def _listed(self, path: str) -> dict[str, str]:
        """Return the kind of everything in a folder, by full path; nothing if there is none."""
        with self._errors():
            self._system.invalidate_cache()  # another process may have changed it
            try:
                listed = self._system.ls(path, detail=True)
            except FileNotFoundError:
                return {}
        found = {each["name"].rstrip("/"): str(each["type"]) for each in listed}
        found.pop(path, None)  # an empty object in place of the folder
        return found

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _full_name(self, name: str) -> str:
        return f"{self.path.rstrip('/')}/{name}" if name else self.path

    @contextmanager
    def _errors(self, name: str = "") -> Iterator[None]:
        """Pass on OSError; make one of what the packages of some stores raise instead."""
        try:
            yield
        except (OSError, EOFError):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise OSError(errno.EIO, reason, self._full_name(name)) from error


class _ObjectWriter(StorageWriter):
    def __init__(self, storage: FsspecStorage, name: str, stream: Any) -> None:
        self._storage = storage
        self._name = name
        self._stream = stream

    def write(self, *buffers: ReadableBuffer) -> None:
        with self._storage._errors(self._name):
            for buffer in buffers:
                rest = memoryview(buffer)
                while rest.nbytes:
                    done = self._stream.write(rest)
                    if not done:
                        raise OSError(errno.EIO, "nothing was written", self._name)
                    self.written += done
                    rest = rest.cast("B")[done:]

    def close(self) -> None:
        if self._stream is None:
            return
        with self._storage._errors(self._name):
            self._stream.flush()
            # The files of a local system are durable only then; a stream of objects has no fileno.
            with suppress(io.UnsupportedOperation, AttributeError):
                os.fsync(self._stream.fileno())
            self._stream.close()
        self._stream = None
        self._storage._system.invalidate_cache()

    def discard(self) -> None:
        if self._stream is None:
            return
        stream, self._stream = self._stream, None
        # Some streams forget what they have sent so far; of others there is an object then.
        with suppress(Exception):
            stream.discard()
        with suppress(Exception):
            stream.close()
        with suppress(Exception):
            self._storage.remove(self._name)


class _ObjectReader(StorageReader):
    def __init__(self, storage: FsspecStorage, name: str, size: int) -> None:
        self._storage = storage
        self._name = name
        self.size = size

    def read_into(self, offset: int, *buffers: WritableBuffer) -> None:
        for some in _requests(buffers):
            wanted = sum(each.nbytes for each in some)
            data = self._fetched(offset, wanted)
            start = 0
            for each in some:
                each[:] = data[start : start + each.nbytes]
                start += each.nbytes
            offset += wanted

    def _fetched(self, offset: int, wanted: int) -> memoryview:
        path = self._storage._at(self._name)
        data = b""
        # Some stores answer a request behind the end with an error of their own.
        if offset + wanted <= self.size:
            with self._storage._errors(self._name):
                data = self._storage._system.cat_file(path, start=offset, end=offset + wanted)
        if len(data) != wanted:
            raise EOFError(
                f"{self._storage._full_name(self._name)} ends before byte {offset + wanted}; "
                f"{wanted} bytes from {offset} on were expected"
            )
        return memoryview(data)

    def close(self) -> None:
        """Do nothing: every request stands for itself."""


def _requests(buffers: tuple[WritableBuffer, ...]) -> Iterator[list[memoryview]]:
    """Give all buffers, in order, in lists of so many bytes that they can be asked for at once."""
    waiting: list[memoryview] = []
    room = _REQUEST_BYTES
    for buffer in buffers:
        rest = memoryview(buffer)
        rest = rest.cast("B") if rest.nbytes else rest[:0]
        while rest.nbytes:
            waiting.append(rest[:room])
            rest = rest[room:]
            room -= waiting[-1].nbytes
            if not room:
                yield waiting
                waiting, room = [], _REQUEST_BYTES
    if waiting:
        yield waiting


def _opened_system(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the folder's path in it without a slash behind."""
    try:
        url_to_fs = importlib.import_module("fsspec.core").url_to_fs
    except ImportError as error:
        raise MissingDependencyError(
            f"checkpoints at {url} need fsspec: install the extra with "
            "pip install 'fsdpcore[objects]'"
        ) from error
    try:
        system, root = url_to_fs(url, **options)
    except ImportError as error:
        raise MissingDependencyError(
            f"checkpoints at {url} need one more package besides the extra 'objects': {error}"
        ) from error
    except ValueError as error:
        raise ArgumentError(f"checkpoints cannot be kept at {url}: {error}") from error
    return system, str(root).rstrip("/")
