"""Short hashes by which ranks compare what they hold: equal where the bytes are."""

from __future__ import annotations

import hashlib

DIGEST_BYTES = 16
"""How long a digest is, unless a caller wants it shorter."""


def digest(data: bytes | bytearray | memoryview, size: int = DIGEST_BYTES) -> bytes:
    """Hash bytes; the same on every machine."""
    return hashlib.blake2b(data, digest_size=size).digest()


def hex_digest(data: bytes | bytearray | memoryview, size: int = DIGEST_BYTES) -> str:
    """Return ``digest`` in hexadecimal digits, two for a byte."""
    return digest(data, size).hex()
