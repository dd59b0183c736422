"""Where checkpoints are kept: a folder of folders of files, whatever kind of store that is.

Names are relative to the store's root: plain basenames, at most two of them joined by one ``/``.
Nothing is renamed, appended to or overwritten, so that the same protocol serves a file system and
an object store. Errors of the system stay OSError here; callers say what they mean.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from types import TracebackType

from fsdpcore.checkpoint.storage.files import ReadableBuffer, WritableBuffer
from fsdpcore.core.errors import ArgumentError


class StorageWriter(ABC):
    """A new file, written from start to end by one thread.

    As a context manager it is closed at the end of the block, or discarded if that raises.

    Attributes:
        written: bytes so far.
    """

    written: int = 0

    @abstractmethod
    def write(self, *buffers: ReadableBuffer) -> None:
        """Write contiguous buffers, all of them, one behind the other; blocks.

        They are the caller's again when this returns.

        Raises:
            OSError: not all was written; nothing but ``discard`` makes sense now.
        """

    @abstractmethod
    def close(self) -> None:
        """Make the contents durable and end the file; blocks. Does nothing once it has ended.

        On a file system the name itself is durable after ``Storage.sync`` of its directory.

        Raises:
            OSError: the contents may be lost; the file is to be discarded.
        """

    @abstractmethod
    def discard(self) -> None:
        """Give the file up, and remove what there is of it; after ``close`` this does nothing.

        Never raises OSError: what could not be removed is left to whoever clears the directory.
        """

    def __enter__(self) -> StorageWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.close()
        except BaseException:
            self.discard()
            raise


class StorageReader(ABC):
    """A file, read anywhere, by several threads at once. A context manager.

    Attributes:
        size: of the file in bytes, when it was opened.
    """

    size: int

    @abstractmethod
    def read_into(self, offset: int, *buffers: WritableBuffer) -> None:
        """Fill contiguous buffers, all of them, with the bytes from ``offset`` on; blocks.

        Raises:
            EOFError: the file ends before; buffers are filled in part.
            OSError: it could not be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the file back; no thread may be reading. Does nothing if that was done before."""

    def __enter__(self) -> StorageReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Storage(ABC):
    """A folder of folders of files. Every method blocks and raises the OSError of the system.

    ArgumentError for a name that is not one or two plain basenames. Usable from several threads.

    Attributes:
        path: of the root, for messages.
        locks: whether ``hold`` is seen by other processes.
        checks: whether what is read is compared with its checksums.
    """

    path: str
    locks: bool = False
    checks: bool = True

    @abstractmethod
    def prepare(self) -> None:
        """Make the root, and what is missing above it, durable; it may exist already."""

    @abstractmethod
    def names(self, directory: str = "") -> list[str]:
        """Return the names in a directory, in no order; none where there is no such directory."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the bytes of a file; OSError for what is not a regular file."""

    @abstractmethod
    def make_directory(self, name: str) -> None:
        """Make a directory in the root; FileExistsError if that name is taken."""

    @abstractmethod
    def writer(self, name: str) -> StorageWriter:
        """Make a file and return what writes it; FileExistsError if that name is taken."""

    @abstractmethod
    def reader(self, name: str) -> StorageReader:
        """Open a file; OSError, without waiting, for what is not a regular file."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, or a symbolic link itself; FileNotFoundError if there is none."""

    @abstractmethod
    def remove_directory(self, name: str) -> None:
        """Remove a directory and the files in it. Links are removed, never followed.

        Raises:
            FileNotFoundError: there is none.
            OSError: something could not be removed; ENOTEMPTY if the directory has directories in
                it, which are left there, or files that appeared meanwhile.
        """

    @abstractmethod
    def sync(self, directory: str = "") -> None:
        """Make durable which names are in a directory; of the root, if none is given."""

    @abstractmethod
    def claim(self, directory: str) -> AbstractContextManager[bool]:
        """Enter with True if nobody holds a directory, and let nobody hold it until the exit.

        Raises:
            FileNotFoundError: it is not there, or was removed at this moment.
        """

    @abstractmethod
    def hold(self, directory: str) -> AbstractContextManager[None]:
        """Hold a directory until the exit or the end of the process. Several may at a time.

        Raises:
            FileNotFoundError: it is not there, or was removed while this waited for a ``claim``.
        """

    def read(self, name: str, limit: int) -> bytes:
        """Return what a small file holds; OSError (EFBIG) if that is more than ``limit`` bytes."""
        with self.reader(name) as reader:
            if reader.size > limit:
                raise OSError(
                    errno.EFBIG, f"has {reader.size} bytes, at most {limit} are expected", name
                )
            data = bytearray(reader.size)
            reader.read_into(0, memoryview(data))
        return bytes(data)

    def put(self, name: str, data: ReadableBuffer) -> None:
        """Write a new small file; its contents are durable when this returns."""
        with self.writer(name) as writer:
            writer.write(data)


def split_name(name: str) -> tuple[str, str]:
    """Return the directory, empty for the root, and the basename of a name below a root.

    Raises:
        ArgumentError: it is not one or two plain basenames.
    """
    parts = name.split("/") if isinstance(name, str) else []
    if not 1 <= len(parts) <= 2 or any(
        part in ("", ".", "..") or "\0" in part or not _encodable(part) for part in parts
    ):
        raise ArgumentError(
            f"a name in a checkpoint's folder is a plain basename, or two joined by '/'; got "
            f"{name!r}"
        )
    return ("", parts[0]) if len(parts) == 1 else (parts[0], parts[1])


def basename(name: str) -> str:
    """Return ``name`` after checking that it is one plain basename; else ArgumentError."""
    directory, base = split_name(name)
    if directory:
        raise ArgumentError(f"a directory of checkpoints is a plain basename, got {name!r}")
    return base


def _encodable(part: str) -> bool:
    try:
        os.fsencode(part)
    except UnicodeEncodeError:
        return False
    return True
