"""What the ranks of running jobs say of themselves, when somebody of the same user asks.

Who asks makes a folder of the user in memory, which nobody else may enter, and the file ``asked``
in it, which is touched as long as answers are wanted. Ranks that come across it write a file each,
named by their job and rank; without it they write nothing. Who has asked removes all of it. A
folder that another user owns or may enter is used by neither side.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fsdpcore.core.errors import ArgumentError

FORMAT = "fsdpcore-live"
VERSION = 1

SILENT_SECONDS = 3.0
"""A rank that has not answered for so long counts as silent."""

_ASKED = "asked"
_FRESH_SECONDS = 5.0
_MOST_BYTES = 1 << 16
_OURS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def folder() -> Path:
    """Where this user's ranks answer on this host; it need not be there."""
    memory = Path("/dev/shm")  # noqa: S108 (what lies in it is checked)
    base = memory if memory.is_dir() else Path(tempfile.gettempdir())
    return base / f"fsdpcore-{os.getuid()}"


class Answers:
    """The side of a rank.

    Args:
        job: id of its job.
        rank: of this process or thread.
    """

    def __init__(self, job: str, rank: int) -> None:
        digest = hashlib.sha256(job.encode()).hexdigest()[:16]
        self._job = job
        self._name = f"{digest}.{rank}.{os.getpid()}.json"
        self._folder = folder()
        self._asked = self._folder / _ASKED

    @property
    def wanted(self) -> bool:
        """Whether somebody has asked a moment ago; one look at a file."""
        try:
            return time.time() - os.stat(self._asked).st_mtime < _FRESH_SECONDS
        except OSError:
            return False

    def give(self, content: Mapping[str, Any]) -> None:
        """Write an answer in the place of the one before; never raises, for nobody waits for it."""
        told = {"format": FORMAT, "version": VERSION, "job": self._job, "written": time.time()}
        told.update(pid=os.getpid(), pids=_pids())
        data = json.dumps({**told, **content}).encode()
        with contextlib.suppress(OSError), _entered(self._folder) as place:
            part = f".{self._name}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            file = os.open(part, flags, 0o600, dir_fd=place)
            try:
                os.write(file, data)
            finally:
                os.close(file)
            os.replace(part, self._name, src_dir_fd=place, dst_dir_fd=place)


def ask() -> None:
    """Have all ranks of this user on this host answer for a few seconds more.

    Raises:
        ArgumentError: the folder cannot be made, or is not this user's alone.
    """
    path = folder()
    try:
        for last in (False, True):
            path.mkdir(mode=0o700, exist_ok=True)
            try:
                with _entered(path) as place:
                    _touch(place)
                    return
            except FileNotFoundError:  # another one who had asked has just removed it
                if last:
                    raise
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be used: {error.strerror}") from error


def _touch(place: int) -> None:
    file = os.open(_ASKED, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=place)
    try:
        os.utime(file)
    finally:
        os.close(file)


def read(since: float) -> list[dict[str, Any]]:
    """Return what ranks have answered since a moment of wall-clock time, by job and rank.

    Who has said nothing for a while is left out if its process has ended.

    Raises:
        ArgumentError: as of ``ask``.
    """
    found: list[dict[str, Any]] = []
    try:
        with _entered(folder()) as place:
            for name in os.listdir(place):
                if name.endswith(".json") and not name.startswith("."):  # a part of one
                    found += _read(place, name, since)
    except FileNotFoundError:  # another one who had asked has removed it
        return []
    except OSError as error:
        raise ArgumentError(f"{folder()}: cannot be read: {error.strerror}") from error
    return sorted(found, key=lambda answer: (answer["job"], answer["rank"]))


def end() -> None:
    """Have nobody answer any more, and remove what was answered; who else asks asks again."""
    with contextlib.suppress(OSError):
        with _entered(folder()) as place:
            os.unlink(_ASKED, dir_fd=place)
            for name in os.listdir(place):
                os.unlink(name, dir_fd=place)
        folder().rmdir()


def _read(place: int, name: str, since: float) -> Iterator[dict[str, Any]]:
    """Read one answer, if it is one, and new."""
    with contextlib.suppress(OSError, ValueError):
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=place)
        try:
            content = json.loads(os.read(file, _MOST_BYTES))
        finally:
            os.close(file)
        if content.get("format") != FORMAT or content.get("version") != VERSION:
            return
        if content["written"] >= since and not _ended(content):
            yield content


def _ended(answer: Mapping[str, Any]) -> bool:
    """Whether a rank says nothing any more because its process is no more."""
    if time.time() - answer["written"] < SILENT_SECONDS or answer.get("pids") != _pids():
        return False  # of another container: it has numbers of its own
    try:
        os.kill(answer["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _pids() -> str:
    """Which processes have numbers that mean something here; empty if the system does not say."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


@contextlib.contextmanager
def _entered(path: Path) -> Iterator[int]:
    """Open the folder; OSError if it is not this user's alone."""
    place = os.open(path, _OURS)
    try:
        found = os.fstat(place)
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(0, "another user owns it, or may enter it")
        yield place
    finally:
        os.close(place)
