"""Updates in one pass over the arrays, compiled by numba, which is imported at the first use."""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
from typing import Any

from numpy.typing import NDArray

from fsdpcore.core.compiling import Kernel, available, compiled
from fsdpcore.core.errors import MissingDependencyError

__all__ = ["Kernel", "adam", "amsgrad", "available", "require"]


def require(optimizer: str) -> None:
    """Raise MissingDependencyError unless numba is installed, or CuPy, which does without."""
    if not available() and "cupy" not in sys.modules and importlib.util.find_spec("cupy") is None:
        raise _missing(optimizer)


def _missing(optimizer: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"fused=True of {optimizer} needs numba on the host; get it with: pip install "
        "'fsdpcore[numba]', or leave fused out"
    )


@functools.cache
def adam() -> Kernel:
    """Return the kernel of Adam and AdamW; its arguments are those of ``_adam``.

    Raises MissingDependencyError without numba.
    """
    return _compiled(_adam)


@functools.cache
def amsgrad() -> Kernel:
    """Return the same with the largest second moment, an array that stands behind the second."""
    return _compiled(_amsgrad)


def _compiled(function: Kernel) -> Kernel:
    if not available():
        raise _missing("Adam and AdamW")
    return compiled(function)


def _adam(
    param: NDArray[Any],
    grad: NDArray[Any],
    mean: NDArray[Any],
    square: NDArray[Any],
    coupled: Any,
    beta1: Any,
    rest1: Any,
    beta2: Any,
    rest2: Any,
    eps: Any,
    size: Any,
    keep: Any,
) -> None:
    # The scalars have the arrays' dtype: a Python float would make float32 arithmetic float64.
    for i in range(param.size):
        value = param[i]
        g = grad[i]
        if coupled != 0.0:
            g += coupled * value
        m = mean[i] * beta1 + g * rest1
        v = square[i] * beta2 + (g * g) * rest2
        mean[i] = m
        square[i] = v
        param[i] = value * keep - m / (math.sqrt(v) + eps) * size


def _amsgrad(
    param: NDArray[Any],
    grad: NDArray[Any],
    mean: NDArray[Any],
    square: NDArray[Any],
    largest: NDArray[Any],
    coupled: Any,
    beta1: Any,
    rest1: Any,
    beta2: Any,
    rest2: Any,
    eps: Any,
    size: Any,
    keep: Any,
) -> None:
    for i in range(param.size):
        value = param[i]
        g = grad[i]
        if coupled != 0.0:
            g += coupled * value
        m = mean[i] * beta1 + g * rest1
        v = square[i] * beta2 + (g * g) * rest2
        top = largest[i]
        if not v <= top and top == top:  # nan stays
            top = v
        mean[i] = m
        square[i] = v
        largest[i] = top
        param[i] = value * keep - m / (math.sqrt(top) + eps) * size
