"""Checkpoints on a file system: what is written is synced, and no symbolic link is followed.

Below the root everything is reached through open directories, so that neither a name nor what
somebody puts in place of it meanwhile can lead anywhere else. The root itself may be reached
through symbolic links.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from fsdpcore.checkpoint.storage.files import Files, ReadableBuffer, WritableBuffer
from fsdpcore.checkpoint.storage.storage import (
    Storage,
    StorageReader,
    StorageWriter,
    basename,
    split_name,
)

# NONBLOCK: opening a FIFO would wait for somebody at its other end. For files it has no meaning.
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | _SAFE
_ROOT = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | _SAFE
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE

_MAX_BUFFERS = max(16, os.sysconf("SC_IOV_MAX"))

# What file systems say that cannot sync a directory; its entries are durable as they see fit.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
# What they say that have no locks for directories, as on some network file systems.
_CANNOT_LOCK = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class LocalStorage(Storage):
    """A directory of a local or network file system.

    Locks are those of ``flock`` on directories: on a network file system they may be seen by
    processes of this host only.
    """

    locks = True

    def __init__(self, path: str, files: Files | None = None) -> None:
        self.path = os.path.abspath(path)
        self._files = files or Files()

    def __repr__(self) -> str:
        return f"LocalStorage({self.path!r})"

    def prepare(self) -> None:
        missing: list[str] = []
        there = self.path
        while not self._is_directory(there):
            missing.append(there)
            there = os.path.dirname(there)
        # Whoever made the deepest directory may have been killed before its name was durable.
        with suppress(PermissionError):
            self._sync_path(os.path.dirname(there))
        for path in reversed(missing):
            try:
                self._files.mkdir(path)
            except FileExistsError:  # several ranks may do this at the same time
                if not self._is_directory(path):
                    raise  # a symbolic link that leads nowhere
            self._sync_path(os.path.dirname(path))

    def names(self, directory: str = "") -> list[str]:
        try:
            with self._opened(directory) as fd:
                return self._files.listdir(fd)
        except FileNotFoundError:
            return []

    def size(self, name: str) -> int:
        directory, base = split_name(name)
        with self._opened(directory) as parent:
            status = self._files.lstat(base, dir_fd=parent)
        return _regular_size(status, self._full(name))

    def make_directory(self, name: str) -> None:
        with self._opened() as root:
            self._files.mkdir(basename(name), dir_fd=root)

    def writer(self, name: str) -> StorageWriter:
        directory, base = split_name(name)
        with self._opened(directory) as parent:
            fd = self._files.open(base, _NEW, dir_fd=parent)
        return _LocalWriter(self, self._files, name, fd)

    def reader(self, name: str) -> StorageReader:
        directory, base = split_name(name)
        with self._opened(directory) as parent:
            fd = self._files.open(base, _READ, dir_fd=parent)
        try:
            return _LocalReader(self._files, fd, self._full(name))
        except BaseException:
            self._files.close(fd)
            raise

    def remove(self, name: str) -> None:
        directory, base = split_name(name)
        with self._opened(directory) as parent:
            self._files.unlink(base, dir_fd=parent)

    def remove_directory(self, name: str) -> None:
        with self._opened() as root:
            with self._opened_in(root, basename(name)) as fd:
                for each in self._files.listdir(fd):
                    # Another process may be removing the same; a directory makes rmdir fail.
                    with suppress(FileNotFoundError, IsADirectoryError):
                        self._files.unlink(each, dir_fd=fd)
            self._files.rmdir(name, dir_fd=root)

    def sync(self, directory: str = "") -> None:
        with self._opened(directory) as fd:
            self._sync_fd(fd)

    @contextmanager
    def claim(self, directory: str) -> Iterator[bool]:
        with self._opened(basename(directory)) as fd, self._unlocking(fd):
            claimed = self._locked(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._check_there(fd, directory)
            yield claimed

    @contextmanager
    def hold(self, directory: str) -> Iterator[None]:
        with self._opened(basename(directory)) as fd, self._unlocking(fd):
            self._locked(fd, fcntl.LOCK_SH)
            self._check_there(fd, directory)
            yield

    def _check_there(self, fd: int, directory: str) -> None:
        """Raise FileNotFoundError if another process has removed an open directory.

        Whoever had claimed it may have: then the descriptor leads nowhere, and the name, if there
        is one, is another's.
        """
        with self._opened(directory) as again:
            if not os.path.samestat(self._files.fstat(fd), self._files.fstat(again)):
                raise FileNotFoundError(
                    errno.ENOENT, "was removed by another process", self._full(directory)
                )

    def _locked(self, fd: int, operation: int) -> bool:
        """Lock an open directory; False if others have it. A lock that cannot be is had."""
        try:
            self._files.flock(fd, operation)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _CANNOT_LOCK:
                raise
        return True

    @contextmanager
    def _unlocking(self, fd: int) -> Iterator[None]:
        """Unlock an open directory at the exit.

        Closing it is not enough: a process that was forked meanwhile has the same lock, and keeps
        it for as long as it lives. Nor may that process unlock it.
        """
        process = os.getpid()
        try:
            yield
        finally:
            if os.getpid() == process:
                with suppress(OSError):
                    self._files.flock(fd, fcntl.LOCK_UN)

    @contextmanager
    def _opened(self, directory: str = "") -> Iterator[int]:
        """Open the root, or a directory in it; the names of errors are full paths."""
        try:
            fd = self._files.open(self.path, _ROOT)
            if directory:
                root = fd
                try:
                    fd = self._files.open(basename(directory), _DIRECTORY, dir_fd=root)
                finally:
                    self._files.close(root)
        except OSError as error:
            error.filename = self._full(directory)
            raise
        try:
            yield fd
        finally:
            self._files.close(fd)

    @contextmanager
    def _opened_in(self, root: int, directory: str) -> Iterator[int]:
        fd = self._files.open(directory, _DIRECTORY, dir_fd=root)
        try:
            yield fd
        finally:
            self._files.close(fd)

    def _is_directory(self, path: str) -> bool:
        """Return whether there is a directory; NotADirectoryError if it is something else."""
        try:
            status = self._files.stat(path)
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return True

    def _sync_path(self, path: str) -> None:
        fd = self._files.open(path, _ROOT)
        try:
            self._sync_fd(fd)
        finally:
            self._files.close(fd)

    def _sync_fd(self, fd: int) -> None:
        try:
            self._files.fsync(fd)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC:
                raise

    def _full(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path


class _LocalWriter(StorageWriter):
    def __init__(self, storage: LocalStorage, files: Files, name: str, fd: int) -> None:
        self._storage = storage
        self._files = files
        self._name = name
        self._fd = fd

    def write(self, *buffers: ReadableBuffer) -> None:
        for start in range(0, len(buffers), _MAX_BUFFERS):
            some = buffers[start : start + _MAX_BUFFERS]
            wanted = sum(map(_nbytes, some))
            done = self._files.writev(self._fd, some) if wanted else 0
            self.written += done
            while done < wanted:
                more = self._files.writev(self._fd, _rest(some, done))
                if not more:
                    raise OSError(errno.EIO, "nothing was written", self._name)
                done += more
                self.written += more

    def close(self) -> None:
        if self._fd < 0:
            return
        self._files.fsync(self._fd)
        fd, self._fd = self._fd, -1
        self._files.close(fd)

    def discard(self) -> None:
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        with suppress(OSError):
            self._files.close(fd)
        with suppress(OSError):
            self._storage.remove(self._name)


class _LocalReader(StorageReader):
    def __init__(self, files: Files, fd: int, path: str) -> None:
        self._files = files
        self._fd = fd
        self._path = path
        self.size = _regular_size(files.fstat(fd), path)

    def read_into(self, offset: int, *buffers: WritableBuffer) -> None:
        for start in range(0, len(buffers), _MAX_BUFFERS):
            some = buffers[start : start + _MAX_BUFFERS]
            wanted = sum(map(_nbytes, some))
            done = self._files.preadv(self._fd, some, offset) if wanted else 0
            while done < wanted:
                more = self._files.preadv(self._fd, _rest(some, done), offset + done)
                if not more:
                    raise EOFError(
                        f"{self._path} ends at byte {offset + done}; {wanted} bytes from "
                        f"{offset} on were expected"
                    )
                done += more
            offset += wanted

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._files.close(fd)


def _nbytes(buffer: ReadableBuffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


def _rest(buffers: Sequence[WritableBuffer | ReadableBuffer], done: int) -> list[memoryview]:
    """Return what is left of buffers, one behind the other, after the first ``done`` bytes."""
    rest = []
    for buffer in buffers:
        nbytes = _nbytes(buffer)
        if done < nbytes:
            rest.append(memoryview(buffer).cast("B")[done:])
        done = max(0, done - nbytes)
    return rest


def _regular_size(status: os.stat_result, path: str) -> int:
    if stat.S_ISREG(status.st_mode):
        return status.st_size
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory, not a file", path)
    raise OSError(errno.EINVAL, "is not a regular file", path)
