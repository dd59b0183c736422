"""Flat buffers for gathered parameters and full gradients, used again and again."""

from __future__ import annotations

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
        self._spare: list[Array] = []  # of bytes, the smallest first
        self._used: dict[int, Array] = {}  # by the id of what was handed out
        self._left: dict[int, tuple[str, Array]] = {}  # by the id of what is spare
        self._most = 0
        self.live_bytes = 0
        self.spare_bytes = 0
        self.peak_bytes = 0

    def take(self, size: int, dtype: np.dtype[Any]) -> Array:
        """Return a flat buffer of ``size`` elements, with any content."""
        nbytes = size * dtype.itemsize
        memory = self._reuse(nbytes)
        if memory is None:
            memory = self._backend.empty((nbytes,), np.uint8)
        flat = memory[:nbytes].view(dtype)
        self._used[id(flat)] = memory
        self.live_bytes += memory.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._most = max(self._most, self.live_bytes)
        return flat

    def _reuse(self, nbytes: int) -> Array | None:
        """Take a spare buffer for ``nbytes``; None if one has to be allocated: there is room."""
        for number, spare in enumerate(self._spare):
            if spare.nbytes * _SNUG <= nbytes <= spare.nbytes:
                return self._taken_out(number)
        while self._spare and self.live_bytes + self.spare_bytes + nbytes > self._most:
            self._taken_out(-1)  # the largest
        return None

    def _taken_out(self, number: int) -> Array:
        memory = self._spare.pop(number)
        self.spare_bytes -= memory.nbytes
        self._left.pop(id(memory), None)
        return memory

    def give(self, buffer: Array, content: str = "") -> None:
        """Take back what ``take`` has returned; it may be handed out again at once.

        Until it is, ``left_of`` finds it by its ``content``.
        """
        memory = self._used.pop(id(buffer))
        self.live_bytes -= memory.nbytes
        self.spare_bytes += memory.nbytes
        self._spare.append(memory)
        self._spare.sort(key=_nbytes)
        if content:
            self._left[id(memory)] = content, buffer

    def left_of(self, content: str) -> Array | None:
        """Return a buffer that was given back with this content, if nobody has got it since."""
        return next((buffer for what, buffer in self._left.values() if what == content), None)

    def forget(self) -> None:
        """Find no content any more."""
        self._left.clear()

    def reset_peak(self) -> None:
        """Begin a new measurement of the peak."""
        self.peak_bytes = self.live_bytes

    def clear(self) -> None:
        """Free what is not handed out."""
        self._spare.clear()
        self._left.clear()
        self.spare_bytes = 0


def _nbytes(array: Array) -> int:
    return array.nbytes
