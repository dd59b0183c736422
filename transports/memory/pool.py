"""``Pool``: parts of segments that are in use, and those that are free to be used again."""

from __future__ import annotations

import bisect
import mmap
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

_LINE = 64  # bytes; small arrays begin at cache lines, large ones at pages
_PAGE = mmap.PAGESIZE


class HasSize(Protocol):
    """A segment."""

    nbytes: int


S = TypeVar("S", bound=HasSize)


class Pool(Generic[S]):
    """First fit, with free neighbours joined; segments are never given back.

    Attributes:
        nbytes: of all segments.
    """

    def __init__(self, grow: Callable[[int], S]) -> None:
        self.nbytes = 0
        self._grow = grow
        self._segments: list[S] = []
        self._free: list[tuple[int, int, int]] = []  # number of the segment, offset, size
        self._returned: deque[tuple[S, int, int]] = deque()

    def take(self, nbytes: int) -> tuple[S, int, int]:
        """Return a segment, and the offset and size of a part of at least ``nbytes``.

        Raises:
            What ``grow`` does.
        """
        while self._returned:
            self._join(*self._returned.popleft())
        unit = _PAGE if nbytes >= _PAGE else _LINE
        size = max(1, -(-nbytes // unit)) * unit
        for at, (number, offset, room) in enumerate(self._free):
            start = -(-offset // unit) * unit
            if start + size <= offset + room:
                self._free[at : at + 1] = [
                    (number, low, high - low)
                    for low, high in ((offset, start), (start + size, offset + room))
                    if high > low
                ]
                return self._segments[number], start, size
        segment = self._grow(size)
        self.nbytes += segment.nbytes
        self._segments.append(segment)
        if segment.nbytes > size:
            self._free.append((len(self._segments) - 1, size, segment.nbytes - size))
        return segment, 0, size

    def give(self, segment: S, offset: int, size: int) -> None:
        """Return a part. Takes no lock, so that it may run wherever an array is collected."""
        self._returned.append((segment, offset, size))

    def _join(self, segment: S, offset: int, size: int) -> None:
        number = self._segments.index(segment)
        at = bisect.bisect(self._free, (number, offset, 0))
        if at < len(self._free):
            following, start, room = self._free[at]
            if following == number and start == offset + size:
                size += room
                del self._free[at]
        if at > 0:
            before, start, room = self._free[at - 1]
            if before == number and start + room == offset:
                offset, size = start, size + room
                del self._free[at - 1]
                at -= 1
        self._free.insert(at, (number, offset, size))
