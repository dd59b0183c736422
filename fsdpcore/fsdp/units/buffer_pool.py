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
                self.spare_bytes -= spare.nbytes
                return self._spare.pop(number)
        while self._spare and self.live_bytes + self.spare_bytes + nbytes > self._most:
            self.spare_bytes -= self._spare.pop().nbytes  # the largest
        return None

    def give(self, buffer: Array) -> None:
        """Take back what ``take`` has returned; it may be handed out again at once."""
        memory = self._used.pop(id(buffer))
        self.live_bytes -= memory.nbytes
        self.spare_bytes += memory.nbytes
        self._spare.append(memory)
        self._spare.sort(key=_nbytes)

    def reset_peak(self) -> None:
        """Begin a new measurement of the peak."""
        self.peak_bytes = self.live_bytes

    def clear(self) -> None:
        """Free what is not handed out."""
        self._spare.clear()
        self.spare_bytes = 0


def _nbytes(array: Array) -> int:
    return array.nbytes
