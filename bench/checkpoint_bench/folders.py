"""Where the contestants write: temporary folders, emptied between turns, and the page cache."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from checkpoint_bench.cases import DISK
from fsdpcore.core.errors import ArgumentError

_SPARE = 1.1  # of the bytes that a contestant stores


class Folders:
    """A temporary folder at a place, with one in it for each contestant.

    Args:
        place: one of ``cases.PLACES``.
        parent: where to make it.

    Attributes:
        filesystem: its type, as the system calls it; empty where that is not known.
    """

    def __init__(self, place: str, parent: Path) -> None:
        self._disk = place == DISK
        self._temporary = tempfile.TemporaryDirectory(prefix="fsdpcore-bench-", dir=parent)
        self._root = Path(self._temporary.name)
        self.filesystem = filesystem_of(self._root)

    def of(self, contestant: str) -> Path:
        """Return a contestant's folder, which exists."""
        folder = self._root / contestant.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        return folder

    def clear(self, contestant: str) -> None:
        """Remove all that it has written; on a disk, wait until that is done."""
        for entry in self.of(contestant).iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        if self._disk:
            os.sync()  # or the next one's fsync would have to wait for it

    def drop(self, contestant: str) -> None:
        """Have the system forget what it keeps of these files in memory."""
        for file in self.of(contestant).rglob("*"):
            if file.is_file():
                descriptor = os.open(file, os.O_RDONLY)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)

    def close(self) -> None:
        """Remove everything."""
        self._temporary.cleanup()


def check_room(parent: Path, option: str, nbytes: int, contestants: int) -> None:
    """Check that a folder can be made, and that all contestants' files fit there at a time.

    Raises:
        ArgumentError: no.
    """
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ArgumentError(f"{option} {parent} is no directory that can be written to")
    free = shutil.disk_usage(parent).free
    if free < _SPARE * nbytes * contestants:
        raise ArgumentError(
            f"{option} {parent} has {free / 2**20:.0f} MiB free, too little for {contestants} "
            f"checkpoints of {nbytes / 2**20:.0f} MiB; choose another one, or a smaller --size"
        )


def filesystem_of(folder: Path) -> str:
    """Return the type of the filesystem that a folder is on, such as ext4."""
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    mounted = [line.split()[1:3] for line in lines]
    path = folder.resolve()
    within = [(len(point), kind) for point, kind in mounted if path.is_relative_to(point)]
    return max(within, default=(0, ""))[1]
