"""New safetensors files, written under other names and put in place once they are whole."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from fsdpcore.checkpoint.storage.files import ReadableBuffer
from fsdpcore.core.errors import ArgumentError

_State = tuple[int, int, int, int]

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class PartialFile:
    """A file under another name until ``place``; a context manager that removes it unless placed.

    What a killed process leaves has the same name, and is written anew. While one process writes
    it, no other can; what another one does to it between ``finish`` and ``place`` is noticed.

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
        self._finished: _State | None = None
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

    def finish(self) -> None:
        """Make durable what was written, and close the file; blocks. Raises OSError."""
        if self._finished is None:
            os.fsync(self._fd)
            self._finished = _state(os.fstat(self._fd))
            os.close(self._fd)

    def check(self) -> None:
        """Raise ArgumentError if another process has changed the file since ``finish``."""
        if not self._is_ours():
            raise ArgumentError(f"another process is writing {self.path}, or has written it")

    def place(self) -> None:
        """Give the file its name, in place of what has that; call ``finish`` before."""
        os.replace(self._partial, self.path)
        self._placed = True

    def _is_ours(self) -> bool:
        if self._finished is None:
            return True  # as it is locked
        try:
            return _state(os.lstat(self._partial)) == self._finished
        except FileNotFoundError:
            return False

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):
            if not self._placed and self._is_ours():
                os.unlink(self._partial)
        if self._finished is None:
            os.close(self._fd)


def _state(found: os.stat_result) -> _State:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


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
    """Put files in place that are one model; blocks.

    Args:
        files: the index, if there is one, is the last: it comes when the others are there.
        stale: what is removed before, the old index first.

    Raises:
        ArgumentError: another process has written one of them meanwhile.
        OSError: the system refuses.
    """
    parent = files[0].path.parent
    for each in files:
        each.finish()
    for each in files:
        each.check()
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
