"""Which ranks share a host."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Hashable, Iterable
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def identity() -> str:
    """Return text that is equal in two processes only if one running kernel serves both.

    A name alone does not tell hosts apart: images and containers are cloned with theirs.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # not Linux
        return f"{socket.gethostname()} {uuid.getnode():012x}"


def number(identities: Iterable[Hashable]) -> tuple[int, ...]:
    """Replace identities by numbers, from 0 in the order of their first appearance."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in identities)
