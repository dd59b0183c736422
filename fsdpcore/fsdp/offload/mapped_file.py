"""Memory that is a file: mapped, loaded and written when it is told to, and gone with its process.

The file has no name from its first moment, or loses it at once, so nothing is left of it when the
process ends, however that happens. Its place on the disk is reserved when it is made: what is
written to the mapping later cannot fail for lack of room, where a file system reserves as it says.

Arrays on the mapping can be read and written at any time. ``ahead``, ``load``, ``release`` and
``evict`` only say when bytes move between memory and disk, never what the arrays hold. A disk that
fails is an OSError in ``load``; the system ends a process that meets it elsewhere (SIGBUS). Linux
only.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import UnsupportedError

PAGE = mmap.PAGESIZE

# Read-ahead takes so many bytes at a time; a longer request is cut off without a word.
_STRIDE = 1 << 20
# From Linux' headers; Python does not name them.
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_SYNC_WAIT_BEFORE, _SYNC_WRITE, _SYNC_WAIT_AFTER = 1, 2, 4
_FALLOC_KEEP_SIZE, _FALLOC_ZERO_RANGE = 0x01, 0x10
_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_MOUNTS = Path("/proc/self/mountinfo")


class FileSpan(NamedTuple):
    """Bytes ``[start, stop)`` of the file; whole pages."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """How many."""
        return self.stop - self.start


def pages(nbytes: int) -> int:
    """Round up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def joined(spans: list[FileSpan]) -> list[FileSpan]:
    """Return the same bytes in as few spans as possible, in order; empty ones fall out."""
    found: list[FileSpan] = []
    for span in sorted(spans):
        if found and span.start <= found[-1].stop:
            found[-1] = FileSpan(found[-1].start, max(found[-1].stop, span.stop))
        elif span.nbytes:
            found.append(span)
    return found


def check_system() -> None:
    """Raise UnsupportedError where there are no such files."""
    if sys.platform != "linux":
        raise UnsupportedError("offloading to files needs Linux")


def in_memory(directory: str) -> str:
    """Return the kind of file system of a directory if its files are memory, else ''.

    Raises:
        OSError: there is no such directory.
    """
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in _MOUNTS.read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            kind = after.split()[0]
            return kind if kind in _MEMORY else ""
    return ""


class MappedFile:
    """A file without a name, mapped whole.

    Args:
        directory: where it is.
        nbytes: its size, at least 1.

    Raises:
        OSError: it cannot be made, or there is no room for it.
    """

    def __init__(self, directory: str, nbytes: int) -> None:
        descriptor = _anonymous(directory)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            self._memory = mmap.mmap(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self._bytes: Array = np.frombuffer(self._memory, np.uint8)
        self._address = self._bytes.ctypes.data
        self._libc = _libc()
        self._populates = self._discards = True
        # Arrays keep the mapping, which needs no descriptor.
        weakref.finalize(self, os.close, descriptor).atexit = False

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self._bytes.size

    def array(self, start: int, size: int, dtype: np.dtype[Any]) -> Array:
        """Return an array on the bytes from ``start``; zeros, if nobody has written there."""
        return self._bytes[start : start + size * dtype.itemsize].view(dtype)

    def span(self, array: Array) -> FileSpan:
        """Return the pages on which an array of this file lies."""
        start = array.ctypes.data - self._address
        return FileSpan(start // PAGE * PAGE, pages(start + array.nbytes))

    def resident(self, span: FileSpan) -> int:
        """Return how many bytes of a span are in memory."""
        found = np.empty(span.nbytes // PAGE, np.uint8)
        self._check(
            self._libc.mincore(self._address + span.start, span.nbytes, found.ctypes.data),
            "look for",
        )
        return int(np.count_nonzero(found & 1)) * PAGE

    def ahead(self, span: FileSpan) -> None:
        """Begin to read what is not in memory; does not wait for the disk."""
        for start in range(span.start, span.stop, _STRIDE):
            stop = min(span.stop, start + _STRIDE)
            self._advise(FileSpan(start, stop), mmap.MADV_WILLNEED, "read ahead")

    def load(self, span: FileSpan, *, write: bool) -> None:
        """Have a span in memory, ready to be read, or written, without any further delay.

        Raises:
            OSError: the disk failed.
        """
        advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
        if self._populates:
            try:
                self._advise(span, advice, "read")
            except OSError as error:
                if error.errno != errno.EINVAL:  # which is what Linux before 5.14 says
                    raise
                self._populates = False
        if not self._populates:
            self._bytes[span.start : span.stop : PAGE].max(initial=0)

    def release(self, span: FileSpan) -> None:
        """Take the pages from the process; they stay in the system's cache until ``evict``."""
        self._advise(span, mmap.MADV_DONTNEED, "release")

    def write(self, span: FileSpan) -> None:
        """Begin to write a span to disk; does not wait for it."""
        self._sync(span, _SYNC_WRITE)

    def evict(self, span: FileSpan) -> None:
        """Wait until a released span is on disk, and free its memory; no other process maps it."""
        self._sync(span, _SYNC_WAIT_BEFORE | _SYNC_WRITE | _SYNC_WAIT_AFTER)
        os.posix_fadvise(self._descriptor, span.start, span.nbytes, os.POSIX_FADV_DONTNEED)

    def discard(self, span: FileSpan) -> bool:
        """Make a span zeros, without reading or writing any of it; it keeps its place on the disk.

        Returns:
            Whether the file system can do that. If not, nothing has changed.
        """
        if self._discards:
            mode = _FALLOC_KEEP_SIZE | _FALLOC_ZERO_RANGE
            result = self._libc.fallocate(self._descriptor, mode, span.start, span.nbytes)
            if result and ctypes.get_errno() in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                self._discards = False
            else:
                self._check(result, "clear")
        return self._discards

    def _sync(self, span: FileSpan, flags: int) -> None:
        result = self._libc.sync_file_range(self._descriptor, span.start, span.nbytes, flags)
        self._check(result, "write")

    def _advise(self, span: FileSpan, advice: int, what: str) -> None:
        # Not mmap.madvise, which keeps other threads of the process from running.
        result = self._libc.madvise(self._address + span.start, span.nbytes, advice)
        self._check(result, what)

    def _check(self, result: int, what: str) -> None:
        if result:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot {what} offloaded arrays: {os.strerror(number)}")


def _anonymous(directory: str) -> int:
    """Open a new file that has no name."""
    try:
        # With O_EXCL nobody can give it one.
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    descriptor, name = tempfile.mkstemp(prefix="fsdpcore-", dir=directory)
    os.unlink(name)
    return descriptor


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.madvise.argtypes = [address, size, number]
    libc.mincore.argtypes = [address, size, address]
    libc.sync_file_range.argtypes = [number, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    libc.fallocate.argtypes = [number, number, ctypes.c_int64, ctypes.c_int64]
    return libc
