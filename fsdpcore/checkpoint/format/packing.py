"""Many integers as a short text: their width, then little-endian, zlib, base64."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from fsdpcore.core.errors import CorruptCheckpointError
from fsdpcore.core.geometry.region_table import Column, Ints

_WIDTHS = "1248"  # bytes of a number


def pack(numbers: Ints) -> str:
    """Return a text; it is the shorter the more often the same numbers follow each other."""
    least, most = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    width = next(each for each in _WIDTHS if max(-least - 1, most) < 1 << (8 * int(each) - 1))
    data = numbers.astype(f"<i{width}", copy=False).tobytes()
    return width + base64.b64encode(zlib.compress(data)).decode()


def unpack(text: object, count: int, what: str) -> Column:
    """Return the numbers of a text, see ``unpack_parts``."""
    parts = list(unpack_parts(text, [count], what))
    return parts[0] if parts else np.empty(0, np.int8)


def unpack_parts(text: object, counts: Sequence[int], what: str) -> Iterator[Column]:
    """Give the numbers of a text part by part, each when it is asked for.

    Memory is taken for what is there, not for what is claimed.

    Args:
        text: as ``pack`` made it, or anything.
        counts: how many numbers there are to be in each part.
        what: begins the message.

    Raises:
        CorruptCheckpointError: there are not exactly these; maybe not before the end.
    """
    if type(text) is not str:
        raise CorruptCheckpointError(f"{what} are no text")
    stream = zlib.decompressobj()
    try:
        if text[:1] not in tuple(_WIDTHS):
            raise ValueError(f"they begin with {text[:1]!r} where their width belongs")
        width, left = int(text[0]), base64.b64decode(text[1:], validate=True)
        for count in filter(None, counts):
            data = stream.decompress(left, count * width)
            left = stream.unconsumed_tail
            if len(data) != count * width:
                raise _not_these(what, counts)
            yield np.frombuffer(data, f"<i{width}")
        if stream.decompress(left, 1) or not stream.eof or stream.unused_data:
            raise _not_these(what, counts)
    except (binascii.Error, ValueError, zlib.error, OverflowError) as error:
        raise CorruptCheckpointError(f"{what} cannot be unpacked: {error}") from None


def _not_these(what: str, counts: Sequence[int]) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{what} are not the {sum(counts)} numbers that they should be")
