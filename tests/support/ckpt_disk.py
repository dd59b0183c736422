"""A disk in memory that fails, or loses its power, at a chosen call.

``DiskFiles`` stands in for the system's calls::

    disk = Disk()
    LocalStorage("/run", DiskFiles(disk)).prepare()
    files = DiskFiles(disk, Fault(at=7, kind="crash"))
    with suppress(PowerLoss):
        ...                           # the eighth call does not return, and none after it
    after = disk.after_power_loss("nothing")
    LocalStorage("/run", DiskFiles(after))...

What survives is what POSIX promises: the data of a file up to its last fsync, the entries of a
directory up to its own last fsync. Of the rest each item is there or not, whichever is chosen.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fsdpcore.checkpoint.storage.files import Files

CHANGES = ("open", "writev", "fsync", "mkdir", "unlink", "rmdir")
"""Calls that can change what is on the disk; opening only where it makes a file."""

ERRORS = ("ENOSPC", "EIO", "EACCES")
_SECTOR = 512


class PowerLoss(BaseException):
    """The machine is off: the call that was hit raises this, and so does every one after it."""


@dataclass
class Node:
    """A file or directory: as programs see it, and as it surely is on the disk."""

    directory: bool
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    entries: dict[str, Node] = field(default_factory=dict)
    synced_entries: dict[str, Node] = field(default_factory=dict)
    links: int = 1
    number: int = field(default_factory=itertools.count(1).__next__)
    locks: dict[int, bool] = field(default_factory=dict)  # exclusive, by descriptor

    def sync(self) -> None:
        self.synced = bytes(self.data)
        self.synced_entries = dict(self.entries)


class Disk:
    """Files and directories; ``root`` is ``/``, which is always there."""

    def __init__(self, root: Node | None = None) -> None:
        self.root = root or Node(directory=True)
        self.lock = threading.Condition()
        self.off = False

    def after_power_loss(self, kept: str | int) -> Disk:
        """Return another disk with what is left of this one.

        ``kept`` says what of all that was not synced: "nothing"; "everything", as when a process
        is killed; or the seed of a choice, for each entry and each sector by itself.
        """
        chance = random.Random(kept) if isinstance(kept, int) else None

        def survives() -> bool:
            return kept == "everything" if chance is None else chance.random() < 0.5

        def data_of(node: Node) -> bytes:
            new, old = bytes(node.data), node.synced
            if new == old or not survives():
                return old
            if chance is None or chance.random() < 0.3:
                return new
            # A new size without the data, or with some of it.
            left = bytearray(new[: chance.randint(len(old), len(new))])
            for start in range(0, len(left), _SECTOR):
                if chance.random() < 0.5:
                    part = old[start : start + _SECTOR]
                    left[start : start + _SECTOR] = part + bytes(
                        len(left[start : start + _SECTOR]) - len(part)
                    )
            return bytes(left)

        def rest(node: Node) -> Node:
            if not node.directory:
                data = data_of(node)
                return Node(False, bytearray(data), data)
            entries = {}
            for name in sorted({*node.entries, *node.synced_entries}):
                new, old = node.entries.get(name), node.synced_entries.get(name)
                found = new if new is old or survives() else old
                if found is not None:
                    entries[name] = rest(found)
            return Node(True, entries=entries, synced_entries=dict(entries))

        with self.lock:
            return Disk(rest(self.root))

    def copy(self) -> Disk:
        """Return another disk with all that is on this one, synced."""
        return self.after_power_loss("everything")

    def switch_off(self) -> None:
        with self.lock:
            self.off = True
            self.lock.notify_all()


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and when.

    Attributes:
        at: number of the call, from 0, among those that are counted.
        kind: "ENOSPC", "EIO", "EACCES": the call fails with it. "short": a read or write moves
            half of what was asked. "crash": the power fails before the call; "crash after": when
            it is done, or, if it is a write, half done.
        calls: which are counted; all but ``close`` if empty.
        on: counted only if their path contains this.
        stays: all counted calls from there on are hit.
    """

    at: int
    kind: str
    calls: Sequence[str] = ()
    on: str = ""
    stays: bool = False


class DiskFiles(Files):
    """The system's calls on a ``Disk``; safe to use from several threads.

    Attributes:
        log: what was called, the name of the call and the path.
        counted: how many of them a fault's number counts.
        hit: whether the fault came.
    """

    def __init__(self, disk: Disk, fault: Fault | None = None) -> None:
        self.disk = disk
        self.fault = fault
        self.log: list[str] = []
        self.counted = 0
        self.hit = False
        self._open: dict[int, tuple[Node, str]] = {}
        self._next = 1000

    @property
    def open_files(self) -> list[str]:
        """Paths of what was not closed."""
        return [path for _, path in self._open.values()]

    def open(self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
        full = self._full(path, dir_fd)
        making = bool(flags & os.O_CREAT)

        def act() -> int:
            parent, name = self._parent(path, dir_fd)
            node = parent.entries.get(name) if name else parent
            if making:
                assert flags & os.O_EXCL
                if node is not None:
                    raise _error(errno.EEXIST, full)
                node = parent.entries[name] = Node(directory=False)
            if node is None:
                raise _error(errno.ENOENT, full)
            if flags & os.O_DIRECTORY and not node.directory:
                raise _error(errno.ENOTDIR, full)
            if node.directory and flags & (os.O_WRONLY | os.O_RDWR):
                raise _error(errno.EISDIR, full)
            self._next += 1
            self._open[self._next] = (node, full)
            return self._next

        return self._call("open" if making else "reopen", full, act)

    def close(self, fd: int) -> None:
        with self.disk.lock:
            node, _ = self._open.pop(fd)
            if node.locks.pop(fd, None) is not None:
                self.disk.lock.notify_all()

    def writev(self, fd: int, buffers: Sequence[Any]) -> int:
        node, path = self._open[fd]
        data = b"".join(bytes(memoryview(each)) for each in buffers)

        def act(share: float = 1) -> int:
            some = data[: max(1, int(len(data) * share))]
            node.data += some
            return len(some)

        return self._call("writev", path, act)

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        node, path = self._open[fd]
        views = [memoryview(each) for each in buffers]
        flat = [view.cast("B") for view in views if view.nbytes]

        def act(share: float = 1) -> int:
            wanted = max(1, int(sum(view.nbytes for view in flat) * share))
            data, start = bytes(node.data[offset : offset + wanted]), 0
            for view in flat:
                part = data[start : start + view.nbytes]
                view[: len(part)] = part
                start += len(part)
            return len(data)

        return self._call("preadv", path, act)

    def fsync(self, fd: int) -> None:
        node, path = self._open[fd]
        self._call("fsync", path, node.sync)

    def fstat(self, fd: int) -> os.stat_result:
        node, path = self._open[fd]
        return self._call("fstat", path, lambda: _status(node))

    def lstat(self, path: str, *, dir_fd: int | None = None) -> os.stat_result:
        full = self._full(path, dir_fd)
        return self._call("lstat", full, lambda: _status(self._found(path, dir_fd, full)))

    def stat(self, path: str) -> os.stat_result:
        return self._call("stat", path, lambda: _status(self._found(path, None, path)))

    def mkdir(self, path: str, *, dir_fd: int | None = None) -> None:
        full = self._full(path, dir_fd)

        def act() -> None:
            parent, name = self._parent(path, dir_fd)
            if not name or name in parent.entries:
                raise _error(errno.EEXIST, full)
            parent.entries[name] = Node(directory=True)

        self._call("mkdir", full, act)

    def listdir(self, fd: int) -> list[str]:
        node, path = self._open[fd]
        return self._call("listdir", path, lambda: list(node.entries))

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        full = self._full(path, dir_fd)

        def act() -> None:
            if self._found(path, dir_fd, full).directory:
                raise _error(errno.EISDIR, full)
            parent, name = self._parent(path, dir_fd)
            parent.entries.pop(name).links = 0

        self._call("unlink", full, act)

    def rmdir(self, path: str, *, dir_fd: int | None = None) -> None:
        full = self._full(path, dir_fd)

        def act() -> None:
            node = self._found(path, dir_fd, full)
            if not node.directory:
                raise _error(errno.ENOTDIR, full)
            if node.entries:
                raise _error(errno.ENOTEMPTY, full)
            parent, name = self._parent(path, dir_fd)
            parent.entries.pop(name).links = 0

        self._call("rmdir", full, act)

    def flock(self, fd: int, operation: int) -> None:
        node, path = self._open[fd]
        exclusive = bool(operation & fcntl.LOCK_EX)

        def act() -> None:
            if operation & fcntl.LOCK_UN:
                if node.locks.pop(fd, None) is not None:
                    self.disk.lock.notify_all()
                return
            while any(other != fd and (exclusive or alone) for other, alone in node.locks.items()):
                if operation & fcntl.LOCK_NB:
                    raise _error(errno.EWOULDBLOCK, path)
                self.disk.lock.wait()
                self._check_power()
            node.locks[fd] = exclusive

        self._call("flock", path, act)

    # Which call is hit, and how.

    def _call(self, call: str, path: str, act: Callable[..., Any]) -> Any:
        with self.disk.lock:
            self._check_power()
            self.log.append(f"{call} {path}")
            fault = self.fault
            if not self._is_hit(call, path) or fault is None:
                return act()
            self.hit = True
            moves = call in ("writev", "preadv")
            if fault.kind in ERRORS:
                raise _error(getattr(errno, fault.kind), path)
            if fault.kind == "short":
                return act(0.5) if moves else act()
            if fault.kind == "crash after":
                with suppress(OSError):
                    _ = act(0.5) if moves else act()
            self.disk.switch_off()
            raise PowerLoss(f"at {call} {path}")

    def _is_hit(self, call: str, path: str) -> bool:
        fault = self.fault or Fault(-1, "")
        if (fault.calls and call not in fault.calls) or fault.on not in path:
            return False
        self.counted += 1
        number = self.counted - 1
        return number == fault.at or (fault.stays and number > fault.at >= 0)

    def _check_power(self) -> None:
        if self.disk.off:
            raise PowerLoss("the machine is off")

    # Names.

    def _full(self, path: str, dir_fd: int | None) -> str:
        return path if dir_fd is None else f"{self._open[dir_fd][1].rstrip('/')}/{path}"

    def _parent(self, path: str, dir_fd: int | None) -> tuple[Node, str]:
        """Return the directory in which a path ends, and the last name."""
        node = self.disk.root if dir_fd is None else self._open[dir_fd][0]
        assert path.startswith("/") == (dir_fd is None)
        *above, name = path.strip("/").split("/")
        for each in above:
            node = node.entries.get(each) or _missing(path)
            if not node.directory:
                raise _error(errno.ENOTDIR, path)
        if not node.links:
            raise _error(errno.ENOENT, path)
        return node, name

    def _found(self, path: str, dir_fd: int | None, full: str) -> Node:
        parent, name = self._parent(path, dir_fd)
        return parent if not name else parent.entries.get(name) or _missing(full)


def crashes(
    disk: Disk,
    action: Callable[[DiskFiles], object],
    *,
    calls: Sequence[str] = CHANGES,
    kept: Sequence[str | int] = ("nothing", "everything", 1, 2, 3),
) -> Iterator[tuple[str, Disk]]:
    """Run an action on copies of a disk, with a loss of power before and after each of its calls.

    ``action`` does the same whenever it is run; ``disk`` stays as it is. Gives, for every crash and
    every choice of what survives, what happened in words and the disk that is left.
    """
    counting = DiskFiles(disk.copy(), Fault(-1, "", calls))
    action(counting)
    assert counting.counted, "the action makes no call that could be hit"
    moments = [("crash after", at) for at in range(counting.counted)]
    for kind, at in [("crash", 0), *moments]:  # after one call is before the next
        broken = disk.copy()
        files = DiskFiles(broken, Fault(at, kind, calls))
        try:
            action(files)
        except BaseException:  # of several threads, one has the loss and others what followed
            if not broken.off:
                raise
        assert broken.off, f"the action ended without its call {at}"
        for each in kept:
            yield f"{kind} at {files.log[-1]}, kept {each}", broken.after_power_loss(each)


def _missing(path: str) -> Node:
    raise _error(errno.ENOENT, path)


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


def _status(node: Node) -> os.stat_result:
    kind = stat.S_IFDIR | 0o777 if node.directory else stat.S_IFREG | 0o666
    return os.stat_result((kind, node.number, 1, node.links, 0, 0, len(node.data), 0, 0, 0))
