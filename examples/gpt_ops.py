"""The functions that a GPT is made of, each with its derivative, in plain NumPy or CuPy.

All work on rows: (N, features) with N = B * T, so that the matrix products are few and large.
Temporaries are reused in place, since in NumPy memory traffic is what remains beside the matrix
products. A function that ends in ``_backward`` takes the gradient of its output, writes those of
the parameters ``name.*`` into ``grads`` and returns that of its input. ``xp`` is the module of the
arrays, ``numpy`` or ``cupy``.

Results have the floating-point type of the arguments. With 16 bits, matrix products and what is
kept between layers have these; the statistics of norms, exponentials and everything else that
loses by it is computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any, TypeAlias

import numpy as np
from gpt_arrays import Array, column_dot, column_sum, matmul, narrow, row_dot, row_sum, wide

Params: TypeAlias = Mapping[str, Array]
Grads: TypeAlias = MutableMapping[str, Array]

_NORM_EPS = 1e-5
_GELU_LINEAR = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715 * _GELU_LINEAR


def normal(rng: np.random.Generator, shape: tuple[int, ...], std: float) -> Array:
    """Return float32 values around zero."""
    values = rng.standard_normal(shape, dtype=np.float32)
    values *= std
    return values


def linear_init(
    name: str, rng: np.random.Generator, inputs: int, outputs: int, scale: float = 1.0
) -> dict[str, Array]:
    """Return ``name.w`` (inputs, outputs) and ``name.b`` (outputs,).

    With ``scale`` 1 outputs have the variance of inputs (LeCun et al., 1998, Efficient BackProp).
    """
    weight = normal(rng, (inputs, outputs), scale / math.sqrt(inputs))
    return {f"{name}.w": weight, f"{name}.b": np.zeros(outputs, np.float32)}


def linear(xp: Any, params: Params, name: str, x: Array) -> Array:
    """Map (N, inputs) to (N, outputs)."""
    y = matmul(xp, x, params[f"{name}.w"])
    y += params[f"{name}.b"]
    return y


def linear_backward(xp: Any, params: Params, name: str, x: Array, dy: Array, grads: Grads) -> Array:
    """Return (N, inputs); ``x`` is what went into ``linear``."""
    matmul(xp, x.T, dy, out=grads[f"{name}.w"])
    column_sum(xp, dy, out=grads[f"{name}.b"])
    return matmul(xp, dy, params[f"{name}.w"].T)


def layer_norm_init(name: str, width: int) -> dict[str, Array]:
    """Return ``name.gain`` and ``name.bias``, both (width,)."""
    return {f"{name}.gain": np.ones(width, np.float32), f"{name}.bias": np.zeros(width, np.float32)}


def layer_norm(xp: Any, params: Params, name: str, x: Array) -> tuple[Array, tuple[Array, Array]]:
    """Bring each row to mean 0 and variance 1, then apply gain and bias (Ba et al., 2016)."""
    rows = wide(x)
    unit = rows - row_sum(xp, rows, 1.0 / rows.shape[1])
    scale = 1.0 / xp.sqrt(row_dot(xp, unit, unit) / rows.shape[1] + _NORM_EPS)
    unit *= scale
    y = unit * wide(params[f"{name}.gain"])
    y += params[f"{name}.bias"]
    return narrow(y, x.dtype), (unit, scale)


def layer_norm_backward(
    xp: Any, params: Params, name: str, saved: tuple[Array, Array], dy: Array, grads: Grads
) -> Array:
    """Return the gradient of the input, in the memory of ``dy`` if that is no 16-bit array.

    With u the normalised row and g = dy * gain: dx = scale * (g - mean(g) - u * mean(g * u)).
    """
    unit, scale = saved
    dx = wide(dy)
    column_dot(xp, dx, unit, out=grads[f"{name}.gain"])
    column_sum(xp, dx, out=grads[f"{name}.bias"])
    dx *= params[f"{name}.gain"]
    along = row_dot(xp, dx, unit) / dx.shape[1]
    dx -= row_sum(xp, dx, 1.0 / dx.shape[1])
    dx -= unit * along
    dx *= scale
    return narrow(dx, dy.dtype)


def gelu(xp: Any, x: Array) -> tuple[Array, Array]:
    """Return ``x * gate`` and the gate, (1 + tanh(a x + b x^3)) / 2 (Hendrycks, Gimpel, 2016)."""
    before = wide(x)
    gate = before * before
    gate *= _GELU_CUBIC
    gate += _GELU_LINEAR
    gate *= before
    xp.tanh(gate, out=gate)
    gate *= 0.5
    gate += 0.5
    return narrow(before * gate, x.dtype), narrow(gate, x.dtype)


def gelu_backward(x: Array, y: Array, gate: Array, dy: Array) -> Array:
    """Return dy * (gate + y * (1 - gate) * (2 a + 6 b x^2)); the gate's slope needs no tanh."""
    before, opened = wide(x), wide(gate)
    slope = before * before
    slope *= 6.0 * _GELU_CUBIC
    slope += 2.0 * _GELU_LINEAR
    slope *= y
    slope *= 1.0 - opened
    slope += opened
    slope *= dy
    return narrow(slope, x.dtype)


class CausalAttention:
    """Multi-head attention in which position t sees the positions up to t; no parameters."""

    def __init__(self, heads: int, context: int, xp: Any) -> None:
        self._xp = xp
        self._heads = heads
        self._mask = xp.asarray(np.triu(np.full((context, context), -np.inf, np.float32), k=1))

    def forward(self, qkv: Array) -> tuple[Array, Any]:
        """Map (B, T, 3, D) to rows (B * T, D). Owns ``qkv`` from here on and scales its queries.

        The softmax is not divided out: ``weights`` are the exponentials, and the division by their
        sum happens on the result, which is H * T / D times smaller.
        """
        xp = self._xp
        batch, length, _, width = qkv.shape
        query, key, value = self._split(qkv)
        query *= 1.0 / math.sqrt(width // self._heads)
        weights = wide(matmul(xp, query, key.swapaxes(-1, -2)))
        weights += self._mask[:length, :length]
        weights -= weights.max(axis=-1, keepdims=True)
        xp.exp(weights, out=weights)
        total = row_sum(xp, weights)
        weights = narrow(weights, qkv.dtype)

        mixed = xp.empty((batch, length, width), qkv.dtype)
        out = self._heads_first(mixed)
        matmul(xp, weights, value, out=out)
        out /= total
        return mixed.reshape(-1, width), (qkv, weights, total, mixed)

    def backward(self, saved: Any, dmixed: Array) -> Array:
        """Map the gradient (B * T, D) of the result to that of qkv, (B * T, 3 * D).

        With p the softmax of the scores and o = p v, the gradient of the scores is
        p * (do v^T - rowsum(do * o)) (Dao et al., 2022, FlashAttention, appendix B.2).
        """
        xp = self._xp
        qkv, weights, total, mixed = saved
        query, key, value = self._split(qkv)
        out = self._heads_first(mixed)
        dout = narrow(self._heads_first(dmixed.reshape(mixed.shape)) / total, qkv.dtype)
        dqkv: Array = xp.empty_like(qkv)
        dquery, dkey, dvalue = self._split(dqkv)

        matmul(xp, weights.swapaxes(-1, -2), dout, out=dvalue)
        dscores = wide(matmul(xp, dout, value.swapaxes(-1, -2)))
        dscores -= row_dot(xp, dout, out)
        dscores *= weights
        dscores = narrow(dscores, qkv.dtype)
        matmul(xp, dscores, key, out=dquery)
        dquery *= 1.0 / math.sqrt(query.shape[-1])
        matmul(xp, dscores.swapaxes(-1, -2), query, out=dkey)
        return dqkv.reshape(len(dmixed), -1)

    def _split(self, qkv: Array) -> tuple[Array, Array, Array]:
        """Return three views (B, H, T, D / H)."""
        query, key, value = (self._heads_first(qkv[:, :, i]) for i in range(3))
        return query, key, value

    def _heads_first(self, x: Array) -> Array:
        """Return (B, T, D) as a view (B, H, T, D / H)."""
        batch, length, width = x.shape
        view: Array = x.reshape(batch, length, self._heads, width // self._heads).swapaxes(1, 2)
        return view
