"""Flat buffers for gathered parameters and full gradients: reused within a step, freed after."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpcore.backend import Backend
from fsdpcore.buffers import Array


class BufferPool:
    """Hands out flat buffers and takes them back; ``clear`` gives the memory up.

    Buffers that came back wait for a unit of the same size. As soon as none of them fits, all are
    freed, so that units of different sizes never pile up: no more memory is held than was handed
    out at once.

    Attributes:
        live_bytes: handed out now.
        peak_bytes: largest value of ``live_bytes`` since ``reset_peak``.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._free: dict[tuple[int, np.dtype[Any]], list[Array]] = {}
        self.live_bytes = 0
        self.peak_bytes = 0

    def take(self, size: int, dtype: np.dtype[Any]) -> Array:
        """Return a flat buffer of ``size`` elements, with any content."""
        free = self._free.get((size, dtype))
        if not free:
            self._free.clear()
        buffer = free.pop() if free else self._backend.empty((size,), dtype)
        self.live_bytes += buffer.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return buffer

    def give(self, buffer: Array) -> None:
        """Take a buffer back; it may be handed out again at once."""
        self.live_bytes -= buffer.nbytes
        self._free.setdefault((buffer.size, buffer.dtype), []).append(buffer)

    def reset_peak(self) -> None:
        """Begin a new measurement of the peak."""
        self.peak_bytes = self.live_bytes

    def clear(self) -> None:
        """Free what is not handed out."""
        self._free.clear()
