"""Many integers as a short text: little-endian int64, zlib, base64."""

from __future__ import annotations

import base64
import binascii
import zlib

import numpy as np

from fsdpcore.core.errors import CorruptCheckpointError
from fsdpcore.core.geometry.region_table import Ints

_WIDTH = 8  # bytes of a number


def pack(numbers: Ints) -> str:
    """Return a text; it is the shorter the more often the same numbers follow each other."""
    return base64.b64encode(zlib.compress(numbers.astype("<i8", copy=False).tobytes())).decode()


def unpack(text: object, count: int, what: str) -> Ints:
    """Return the numbers of a text.

    Memory is taken for what is there, not for what is claimed.

    Args:
        text: as ``pack`` made it, or anything.
        count: how many numbers there are to be.
        what: begins the message.

    Raises:
        CorruptCheckpointError: there are not exactly these.
    """
    if type(text) is not str:
        raise CorruptCheckpointError(f"{what} are no text")
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(base64.b64decode(text, validate=True), count * _WIDTH + 1)
    except (binascii.Error, ValueError, zlib.error, OverflowError) as error:
        raise CorruptCheckpointError(f"{what} cannot be unpacked: {error}") from None
    if len(data) != count * _WIDTH or not stream.eof or stream.unused_data:
        raise CorruptCheckpointError(f"{what} are not the {count} numbers that they should be")
    return np.frombuffer(data, "<i8").astype(np.int64, copy=False)
