"""The calls of the operating system that storage makes, in one place.

Tests put another class in its place: one that fails at the k-th call, or forgets at a crash what
was never synced. So nothing here retries, loops or interprets; ``local_storage`` does.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence

ReadableBuffer = bytes | bytearray | memoryview
"""Contiguous bytes that are only read."""

WritableBuffer = bytearray | memoryview
"""Contiguous bytes that are filled."""


class Files:
    """The calls themselves. Names are relative to the open directory ``dir_fd``, if one is given.

    Every method blocks, and raises the OSError of its call.
    """

    def open(self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
        """Return a new file descriptor; the mode of a new file is cut by the umask."""
        return os.open(path, flags, mode, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        """Close a file descriptor. It is closed even if this raises."""
        os.close(fd)

    def writev(self, fd: int, buffers: Sequence[ReadableBuffer]) -> int:
        """Write at the file's position; return how many bytes, which may be fewer than given."""
        return os.writev(fd, buffers)

    def preadv(self, fd: int, buffers: Sequence[WritableBuffer], offset: int) -> int:
        """Read from ``offset``; return how many bytes: maybe fewer than asked, 0 at the end."""
        return os.preadv(fd, buffers, offset)

    def fsync(self, fd: int) -> None:
        """Return once the file, or the entries of the directory, would survive a loss of power."""
        os.fsync(fd)

    def fstat(self, fd: int) -> os.stat_result:
        """Return what is known of an open file."""
        return os.fstat(fd)

    def lstat(self, path: str, *, dir_fd: int | None = None) -> os.stat_result:
        """Return what is known of a name; of a symbolic link itself, not of where it points."""
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=False)

    def stat(self, path: str) -> os.stat_result:
        """Return what is known of the file that a path leads to, through symbolic links."""
        return os.stat(path)

    def mkdir(self, path: str, *, dir_fd: int | None = None) -> None:
        """Make a directory; FileExistsError if the name is taken."""
        os.mkdir(path, dir_fd=dir_fd)

    def listdir(self, fd: int) -> list[str]:
        """Return the names in an open directory, in no order."""
        return os.listdir(fd)

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        """Remove a file, or a symbolic link itself."""
        os.unlink(path, dir_fd=dir_fd)

    def rmdir(self, path: str, *, dir_fd: int | None = None) -> None:
        """Remove an empty directory."""
        os.rmdir(path, dir_fd=dir_fd)

    def flock(self, fd: int, operation: int) -> None:
        """Lock or unlock an open file; a lock ends with its descriptor, so with its process."""
        fcntl.flock(fd, operation)
