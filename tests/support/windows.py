"""Simulated ranks with and without a window of the host, whatever the transport itself offers."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from fsdpcore.transports.simulated.backend import SimBackend
from numpy.typing import DTypeLike

import fsdpcore as fc
from fsdpcore.core.buffers import Array


class WithWindow(SimBackend):
    """One plain array for all ranks; they call ``shared_window`` on the whole job only."""

    def __init__(self, rank: int, world: Any, *args: Any) -> None:
        super().__init__(rank, world, *args)
        self._first: WithWindow = world[0] if world else self
        self._window_lock = threading.Lock()
        self._windows: list[Array] = []
        self._opened = 0

    def shared_window(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        first, number = self._first, self._opened
        self._opened += 1
        with first._window_lock:
            if len(first._windows) == number:
                first._windows.append(np.zeros(shape, dtype))
        fc.barrier(self)
        return first._windows[number]

    @property
    def window_bytes(self) -> int:
        """All windows together."""
        return sum(math.prod(window.shape) * window.itemsize for window in self._first._windows)


class WithoutWindow(SimBackend):
    """Has no way to one."""

    def shared_window(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        raise fc.UnsupportedError("this transport has no windows")


class RefusedWindow(SimBackend):
    """Finds out only when asked, as processes do that cannot see each other's memory."""

    def shared_window(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        fc.barrier(self)
        raise fc.UnsupportedError("these ranks cannot share memory")
