"""Patterns of names that somebody gave: none of them may be idle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from fsdpcore.core.errors import ArgumentError


def refuse_idle(patterns: Sequence[str] | None, names: Iterable[str], what: str) -> None:
    """Raise ArgumentError if a pattern (of the shell) fits no name; ``*`` may fit none.

    Args:
        patterns: that were given; None for all names.
        names: that there are.
        what: has them; for the message.
    """
    known = set(names) if patterns else set()
    for pattern in patterns or ():
        if pattern == "*" or pattern in known:
            continue
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ArgumentError(f"there is no array whose name fits {pattern!r} in {what}")
