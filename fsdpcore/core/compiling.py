"""Functions compiled by numba, where it is installed; it is imported at the first use."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

Kernel = Callable[..., None]


@functools.cache
def available() -> bool:
    """Return whether numba is installed; does not import it."""
    return importlib.util.find_spec("numba") is not None


def compiled(function: Kernel) -> Kernel:
    """Return a function as numba compiles it; the order of its operations stays."""
    import numba

    # Division by zero gives inf as in NumPy. No fastmath: the bits are those of NumPy.
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        kernel: Kernel = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder that could keep the compiled code
        kernel = numba.njit(**options)(function)
    return kernel
