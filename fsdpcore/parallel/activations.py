"""Functions between the two matrices of an MLP, elementwise, with their derivatives.

Arrays are NumPy's or CuPy's; 16-bit ones are computed with in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from fsdpcore.core.array_module import array_module
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ArgumentError
from fsdpcore.parallel.arrays import narrow, wide


class Activation(Protocol):
    """An elementwise function and its derivative."""

    def forward(self, x: Array) -> tuple[Array, Any]:
        """Return the values, and what ``backward`` needs; ``x`` is kept and not changed."""

    def backward(self, saved: Any, dy: Array) -> Array:
        """Return the gradient of ``x``, a new array of its dtype."""


class Gated:
    """``y = x * gate`` with ``gate = (1 + tanh(linear x + cubic x^3)) / 2``.

    SiLU is x times the logistic function, which is this gate with 1/2 and 0: in this form no
    exponential overflows. GELU in its tanh form has sqrt(2/pi) and 0.044715 times that (Hendrycks
    and Gimpel, 2016).
    """

    def __init__(self, linear: float, cubic: float) -> None:
        self._linear = linear
        self._cubic = cubic

    def forward(self, x: Array) -> tuple[Array, Any]:
        """Return x * gate; kept are x, the result and the gate."""
        before = wide(x)
        if self._cubic:
            gate = before * before
            gate *= self._cubic
            gate += self._linear
            gate *= before
        else:
            gate = before * self._linear
        array_module(x).tanh(gate, out=gate)
        gate *= 0.5
        gate += 0.5
        y = narrow(before * gate, x.dtype)
        return y, (x, y, narrow(gate, x.dtype))

    def backward(self, saved: Any, dy: Array) -> Array:
        """Return dy * (gate + y * (1 - gate) * (2 linear + 6 cubic x^2)); needs no tanh."""
        x, y, gate = saved
        opened = wide(gate)
        slope = 1.0 - opened
        slope *= y
        if self._cubic:
            before = wide(x)
            steep = before * before
            steep *= 6.0 * self._cubic
            steep += 2.0 * self._linear
            slope *= steep
        else:
            slope *= 2.0 * self._linear
        slope += opened
        slope *= dy
        return narrow(slope, x.dtype)


class Relu:
    """``max(x, 0)``, with slope 0 at 0."""

    def forward(self, x: Array) -> tuple[Array, Any]:
        """Return max(x, 0), which is also what is kept."""
        y: Array = array_module(x).maximum(x, x.dtype.type(0))
        return y, y

    def backward(self, saved: Any, dy: Array) -> Array:
        """Return dy where x was positive."""
        y: Array = saved
        return narrow(dy * (y > 0), y.dtype)


_GELU_LINEAR = math.sqrt(2.0 / math.pi)

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": Gated(_GELU_LINEAR, 0.044715 * _GELU_LINEAR),
    "relu": Relu(),
    "silu": Gated(0.5, 0.0),
}


def activation(name: str) -> Activation:
    """Return the function of that name.

    Raises:
        ArgumentError: there is none.
    """
    if name not in ACTIVATIONS:
        raise ArgumentError(
            f"there is no activation {name!r}; choose one of {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]
