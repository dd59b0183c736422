"""New safetensors files, written under other names and put in place once they are whole."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from fsdpcore.checkpoint.files import ReadableBuffer
from fsdpcore.errors import ArgumentError

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class PartialFile:
    """A file under another name until ``place``; a context manager that removes it unless placed.

    What a killed process leaves has the same name, and is written anew. While one process writes
    it, no other can.

    Args:
        path: of the file that it becomes.

    Raises:
        ArgumentError: another process writes it.
        OSError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._partial = path.with_name(f".{path.name}.partial")
        self._placed = False
        self._fd = self._opened()

    def _opened(self) -> int:
        while True:
            fd = os.open(self._partial, _FLAGS, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Another process may have put it in place before it was locked here.
                if os.path.samestat(os.fstat(fd), os.lstat(self._partial)):
                    os.ftruncate(fd, 0)
                    return fd
            except BlockingIOError:
                os.close(fd)
                raise ArgumentError(f"another process is writing {self.path}") from None
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def write(self, data: ReadableBuffer) -> None:
        """Append bytes; blocks. Raises OSError."""
        view = memoryview(data).cast("B")
        while view.nbytes:
            view = view[os.write(self._fd, view) :]

    def sync(self) -> None:
        """Make durable what was written; blocks. Raises OSError."""
        os.fsync(self._fd)

    def place(self) -> None:
        """Give the file its name, in place of what has that."""
        os.replace(self._partial, self.path)
        self._placed = True

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._placed:
            with suppress(OSError):
                os.unlink(self._partial)
        os.close(self._fd)


def sync_directory(path: Path) -> None:
    """Make durable which names are in a directory; OSError, but not where none can be synced."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)


def place_all(files: Sequence[PartialFile], stale: Sequence[Path]) -> None:
    """Put files in place that are one model; blocks. Raises OSError.

    Args:
        files: the index, if there is one, is the last: it comes when the others are there.
        stale: what is removed before, the old index first.
    """
    parent = files[0].path.parent
    for each in files:
        each.sync()
    for path in stale:
        with suppress(FileNotFoundError):
            os.unlink(path)
    if stale:
        sync_directory(parent)
    for each in files[:-1]:
        each.place()
    if len(files) > 1:
        sync_directory(parent)
    files[-1].place()
    sync_directory(parent)
