"""Scaled dot-product attention over some heads, and its derivative; no parameters, no ranks.

Shapes: B sequences, T positions, H heads of d features each. Arrays are NumPy's or CuPy's. With 16
bits, what is kept for the derivative and what is returned have these; all between is computed in
float32, scores above all: rounded to bfloat16, one of 50 would be off by 1/8, and its exponential
by as much.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fsdpcore.core.array_module import array_module
from fsdpcore.core.buffers import Array
from fsdpcore.parallel.arrays import matmul, narrow, row_dot, row_sum, wide


class Attended(NamedTuple):
    """What the derivative needs.

    Attributes:
        qkv: queries (scaled), keys and values, (B, T, 3, H, d).
        weights: exponentials of the scores, (B, H, T, T).
        total: their sums along the last axis, (B, H, T, 1).
        mixed: the result, (B, T, H, d).
    """

    qkv: Array
    weights: Array
    total: Array
    mixed: Array


def attend(qkv: Array, *, causal: bool) -> Attended:
    """Mix the values of all positions by softmax(queries keys^T / sqrt(d)) (Vaswani et al., 2017).

    The softmax is not divided out: the division by the sums is done on the result, which is T / d
    times smaller than the weights.

    Args:
        qkv: (B, T, 3, H, d); owned from here on, its queries are scaled in place.
        causal: position t sees positions up to t only.
    """
    xp = array_module(qkv)
    query, key, value = _split(qkv)
    query *= 1.0 / math.sqrt(qkv.shape[-1])
    weights = matmul(wide(query), wide(key).swapaxes(-1, -2))
    if causal:
        weights += _unseen(xp, qkv.shape[1], weights.dtype)
    if weights.size:  # there is no maximum of no positions
        weights -= weights.max(axis=-1, keepdims=True)  # so that no exponential overflows
    xp.exp(weights, out=weights)
    total = row_sum(weights)

    mixed = xp.empty((*qkv.shape[:2], *qkv.shape[3:]), qkv.dtype)
    sums = matmul(weights, wide(value))
    sums /= total  # before it is rounded: float16 may not hold a sum of many values
    mixed.swapaxes(1, 2)[...] = sums
    return Attended(qkv, narrow(weights, qkv.dtype), total, mixed)


def attend_backward(saved: Attended, dmixed: Array) -> Array:
    """Return the gradient of the ``qkv`` that was passed, (B, T, 3, H, d), from (B, T, H, d).

    With p the softmax of the scores and o = p v, the gradient of the scores is
    p * (do v^T - rowsum(do * o)) (Dao et al., 2022, FlashAttention, appendix B.2).
    """
    qkv, weights, total, mixed = saved
    query, key, value = _split(qkv)
    dout = dmixed.swapaxes(1, 2) / total
    dqkv: Array = array_module(qkv).empty_like(qkv)
    dquery, dkey, dvalue = _split(dqkv)

    matmul(wide(weights).swapaxes(-1, -2), dout, out=dvalue)
    dscores = matmul(dout, wide(value).swapaxes(-1, -2))
    dscores -= row_dot(dout, mixed.swapaxes(1, 2))
    dscores *= weights
    found = matmul(dscores, wide(key))
    found *= 1.0 / math.sqrt(qkv.shape[-1])
    dquery[...] = found
    matmul(dscores.swapaxes(-1, -2), wide(query), out=dkey)
    return dqkv


def _split(qkv: Array) -> tuple[Array, Array, Array]:
    """Return three views (B, H, T, d)."""
    query, key, value = (qkv[:, :, i].swapaxes(1, 2) for i in range(3))
    return query, key, value


def _unseen(xp: Any, length: int, dtype: Any) -> Array:
    """Return (T, T) with -inf where a position must not see another, and zeros."""
    mask: Array = xp.triu(xp.full((length, length), -math.inf, dtype), k=1)
    return mask
