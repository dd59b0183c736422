"""What a process has mapped: files without a name, and memory that ranks share."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_HEAD = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ +(.*)$")


def unnamed(directory: str | os.PathLike[str], pid: int | str = "self") -> dict[str, int]:
    """Return the bytes in memory of such files in a directory, by what the kernel calls them."""
    found: dict[str, int] = {}
    current = ""
    with contextlib.suppress(OSError):  # the process has ended
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            head = _HEAD.match(line)
            if head:
                path = head[1]
                inside = path.startswith(f"{os.fspath(directory)}/") and path.endswith("(deleted)")
                current = path if inside else ""
                if inside:
                    found.setdefault(path, 0)
            elif current and line.startswith("Rss:"):
                found[current] += int(line.split()[1]) * 1024
    return found


def segments(pid: int | str = "self") -> set[str]:
    """The memory of ``backend.empty`` and of regions that a process has mapped, by its numbers."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "memfd:fsdpcore" in line:
                found.add(" ".join(line.split()[3:5]))
    return found
