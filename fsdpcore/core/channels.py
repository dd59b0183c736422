"""The number that names a group of ranks, alike on all of them."""

from __future__ import annotations

import hashlib
import struct


def channel_of(parent: int, members: tuple[int, ...], count: int, name: str) -> int:
    """Name a group by how it was made, so that its members agree without communication.

    Always even; a group's collectives use the odd number that follows, apart from user messages.
    """
    seed = struct.pack(f"<QQQ{len(members)}Q", parent, count, len(members), *members)
    seed += name.encode(errors="backslashreplace")
    digest = hashlib.blake2b(seed, digest_size=8).digest()
    return int.from_bytes(digest, "little") & ~1
