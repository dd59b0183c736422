"""Flat buffers for gathered parameters and full gradients, used again and again."""

from __future__ import annotations

import bisect
from operator import attrgetter
from typing import Any

import numpy as np

from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array

# A buffer that came back serves requests that are smaller by no more than this. Otherwise a step
# would hold more than its plan says; what is freed goes back to the memory of ``Backend.empty``.
_SNUG = 0.98


class BufferPool:
    """Hands out flat buffers in the memory that the backend moves fastest, and takes them back.

    What came back is kept for the next request of its size, so a step through units of one size
    allocates nothing once it is warm. But no more memory is ever held than was handed out at once:
    what does not fit is freed before that would be exceeded.

    Attributes:
        live_bytes: handed out now.
        spare_bytes: kept to be handed out again.
        peak_bytes: largest value of ``live_bytes`` since ``reset_peak``.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._spare: list[_Buffer] = []  # the smallest first
        self._used: dict[int, _Buffer] = {}  # by the id of what was handed out
        self._most = 0
        self.live_bytes = 0
        self.spare_bytes = 0
        self.peak_bytes = 0

    def take(self, size: int, dtype: np.dtype[Any]) -> Array:
        """Return a flat buffer of ``size`` elements, with any content."""
        nbytes = size * dtype.itemsize
        buffer = self._reuse(nbytes) or _Buffer(self._backend.empty((nbytes,), np.uint8))
        flat = buffer.show(nbytes, dtype)
        self._used[id(flat)] = buffer
        self.live_bytes += buffer.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._most = max(self._most, self.live_bytes)
        return flat

    def _reuse(self, nbytes: int) -> _Buffer | None:
        """Take a spare buffer for ``nbytes``; None if one has to be allocated: there is room."""
        for number, spare in enumerate(self._spare):
            if spare.nbytes * _SNUG <= nbytes <= spare.nbytes:
                return self._taken_out(number)
        while self._spare and self.live_bytes + self.spare_bytes + nbytes > self._most:
            self._taken_out(-1)  # the largest
        return None

    def _taken_out(self, number: int) -> _Buffer:
        buffer = self._spare.pop(number)
        self.spare_bytes -= buffer.nbytes
        return buffer

    def give(self, flat: Array, content: str = "") -> None:
        """Take back what ``take`` has returned; it may be handed out again at once.

        Until it is, ``left_of`` finds it by its ``content``.
        """
        buffer = self._used.pop(id(flat))
        buffer.content = content
        self.live_bytes -= buffer.nbytes
        self.spare_bytes += buffer.nbytes
        bisect.insort(self._spare, buffer, key=attrgetter("nbytes"))

    def left_of(self, content: str) -> Array | None:
        """Return a buffer that was given back with this content, if nobody has got it since."""
        return next((spare.flat for spare in self._spare if spare.content == content), None)

    def forget(self) -> None:
        """Find no content any more."""
        for spare in self._spare:
            spare.content = ""

    def reset_peak(self) -> None:
        """Begin a new measurement of the peak."""
        self.peak_bytes = self.live_bytes

    def clear(self) -> None:
        """Free what is not handed out."""
        self._spare.clear()
        self.spare_bytes = 0


class _Buffer:
    """Memory, and the array of it that was handed out last.

    Attributes:
        flat: that array; the same object again for the same size and dtype, as collectives remember
            by the object where an array lies.
        content: what it was given back with.
    """

    __slots__ = ("_memory", "content", "flat", "nbytes")

    def __init__(self, memory: Array) -> None:
        self._memory = self.flat = memory
        self.nbytes: int = memory.nbytes
        self.content = ""

    def show(self, nbytes: int, dtype: np.dtype[Any]) -> Array:
        """Return its first ``nbytes`` as an array of ``dtype``."""
        if self.flat.dtype != dtype or self.flat.nbytes != nbytes:
            self.flat = self._memory[:nbytes].view(dtype)
        return self.flat
