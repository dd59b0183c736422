"""The number that names a group of ranks, alike on all of them."""

from __future__ import annotations

import struct

from fsdpcore.core.digests import digest


def channel_of(parent: int, members: tuple[int, ...], count: int, name: str) -> int:
    """Name a group by how it was made, so that its members agree without communication.

    Always even; a group's collectives use the odd number that follows, apart from user messages.
    """
    seed = struct.pack(f"<QQQ{len(members)}Q", parent, count, len(members), *members)
    seed += name.encode(errors="backslashreplace")
    return int.from_bytes(digest(seed, 8), "little") & ~1
