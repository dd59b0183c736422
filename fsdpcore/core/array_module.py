"""Which module of array functions an array belongs to: NumPy, or CuPy where it is on a GPU.

CuPy is never imported here: who has one of its arrays has imported it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from fsdpcore.core.buffers import Array


def array_module(array: object) -> Any:
    """Return ``numpy`` or ``cupy``, or None if ``array`` is an array of neither."""
    if isinstance(array, np.ndarray):
        return np
    cupy = sys.modules.get("cupy")
    return cupy if isinstance(array, getattr(cupy, "ndarray", ())) else None


def on_host(array: Array) -> bool:
    """Whether it is a NumPy array."""
    return isinstance(array, np.ndarray)


def place(array: Array) -> str:
    """Say where an array is, for messages and comparisons: "the host", or for instance "cuda:0"."""
    if on_host(array):
        return "the host"
    on_gpu: Any = array
    return f"cuda:{on_gpu.device.id}"


def address(array: Array) -> int:
    """Return where the first element is, in the memory of the array's device."""
    if on_host(array):
        return array.ctypes.data
    on_gpu: Any = array
    return int(on_gpu.data.ptr)
