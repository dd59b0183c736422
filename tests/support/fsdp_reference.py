"""Training that is not sharded, told a second time and apart from the engine, to the bit.

One process plays all ranks, one after the other: each computes the gradients of its rows, and these
are added up in the canonical order of ``support.oracle``. AdamW is written out in the order of
operations that its class documents: bias corrections moved into the step size and eps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from gpt_model import build, cross_entropy
from support.fsdp_models import (
    BATCH,
    DECAY,
    EPS,
    LR,
    MODEL,
    Array,
    Named,
    Setup,
    batch,
    initial,
    rows_of,
)
from support.oracle import reduced
from threadpoolctl import threadpool_limits


def train_unsharded(
    world_size: int, steps: int, setup: Setup
) -> tuple[list[float], list[float | None], Named]:
    """Losses and norms of every step, and all parameters in the end.

    Of ``setup`` it looks only at what may change a result: clip, parts, and deferred.
    """
    params = initial()
    first, second = zeros_like(params), zeros_like(params)
    losses: list[float] = []
    norms: list[float | None] = []
    # As many as the ranks have: the number of threads changes the bits of a matrix product.
    with threadpool_limits(1, user_api="blas"):
        for number in range(1, steps + 1):
            loss, grads = _gradients(params, number - 1, world_size, setup)
            norm = None if setup.clip is None else l2_norm(grads)
            clip = setup.clip or math.inf
            scale = 1.0 if norm is None or norm <= clip else clip / norm
            for unit, values in params.items():
                for name, p in values.items():
                    g = grads[unit][name] if scale == 1.0 else grads[unit][name] * np.float32(scale)
                    _adamw(p, g, first[unit][name], second[unit][name], number)
            losses.append(loss)
            norms.append(norm)
    return losses, norms, params


def zeros_like(params: Named) -> Named:
    """Zeros in the place of every parameter."""
    return {unit: {n: np.zeros_like(a) for n, a in named.items()} for unit, named in params.items()}


def l2_norm(grads: Named) -> float:
    """The global norm, rounded to float32."""
    wide = [array.astype(np.float64) for named in grads.values() for array in named.values()]
    return float(np.float32(math.sqrt(sum(float(np.sum(array * array)) for array in wide))))


def _gradients(params: Named, number: int, ranks: int, setup: Setup) -> tuple[float, Named]:
    """The loss of the whole batch, and the reduced gradients."""
    found = [
        [_one(params, number, rows) for rows in rows_of(r, ranks, setup.parts)]
        for r in range(ranks)
    ]
    summed = [np.array([sum(loss for loss, _ in parts)], np.float64) for parts in found]
    loss = float(reduced(summed, "sum")[0]) / BATCH
    if setup.deferred:  # added up on each rank, then over the ranks
        return loss, _reduce([_added([grads for _, grads in parts]) for parts in found])
    each = [_reduce([parts[part][1] for parts in found]) for part in range(setup.parts)]
    return loss, _added(each)


def _one(params: Named, number: int, rows: Array) -> tuple[float, Named]:
    """One forward and backward pass of one rank."""
    x, y = batch(number)
    layers, grads = build(MODEL), zeros_like(params)
    kept, value = [], x[rows]
    for name, layer in layers:
        value, saved = layer.forward(params[name], value)
        kept.append(saved)
    loss, dx = cross_entropy(value, y[rows])
    dx = dx * np.float32(len(rows))
    for name, layer in reversed(layers):
        dx = layer.backward(params[name], kept.pop(), dx, grads[name])
    return float(loss) * len(rows), grads


def _reduce(grads: Sequence[Named]) -> Named:
    """Sum over the ranks, and divide by the rows of the whole batch."""
    return {
        unit: {
            name: (reduced([g[unit][name] for g in grads], "sum") / np.float32(BATCH)).astype(
                a.dtype
            )
            for name, a in named.items()
        }
        for unit, named in grads[0].items()
    }


def _added(grads: Sequence[Named]) -> Named:
    total, *others = grads
    for other in others:
        total = {u: {n: a + other[u][n] for n, a in named.items()} for u, named in total.items()}
    return total


def _adamw(p: Array, g: Array, m: Array, v: Array, step: int) -> None:
    beta1, beta2 = 0.9, 0.999
    correction = math.sqrt(1.0 - beta2**step)
    m[...] = m * np.float32(beta1) + g * np.float32(1.0 - beta1)
    v[...] = v * np.float32(beta2) + (g * g) * np.float32(1.0 - beta2)
    move = m / (np.sqrt(v) + np.float32(EPS * correction))
    move = move * np.float32(LR * correction / (1.0 - beta1**step))
    p[...] = p * np.float32(1.0 - LR * DECAY) - move
