"""Optimizers written out for one scalar in Python's float64, from the papers' formulas."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.fsdp.optim import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
)
from fsdpcore.fsdp.optim.bound import BLOCK_ELEMENTS

Array = NDArray[Any]
# The update of one scalar over all steps: (p, gradients, learning rates) to (p, state).
Reference = Callable[[float, Sequence[float], Sequence[float]], tuple[float, list[float]]]

ADAMW = AdamW(lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
ELEMENTWISE: list[Optimizer] = [
    ADAMW,
    AdamW(),
    AdamW(betas=(0.0, 0.0), weight_decay=0.0),
    Adam(),
    Adam(lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    Adam(lr=0.02, betas=(0.8, 0.5), eps=1e-6, weight_decay=0.1, amsgrad=True),
    NAdam(0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, momentum_decay=0.5),
    RAdam(0.02, weight_decay=0.1),  # sure of its variance from step 6 on
    RAdam(0.02, betas=(0.8, 0.5), weight_decay=0.1, decoupled_weight_decay=True),  # never sure
    SGD(0.05),
    SGD(0.05, weight_decay=0.1),
    SGD(0.05, momentum=0.9),
    SGD(0.05, momentum=0.9, weight_decay=0.1),
    SGD(0.05, momentum=0.9, nesterov=True),
    SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    Adagrad(),
    Adagrad(0.1, lr_decay=0.2, weight_decay=0.1, initial_accumulator_value=0.5, eps=1e-6),
    RMSprop(),
    RMSprop(0.02, alpha=0.9, eps=1e-6, weight_decay=0.1, momentum=0.8, centered=True),
    RMSprop(0.02, alpha=0.9, centered=True),
    Lion(),
    Lion(0.02, betas=(0.8, 0.95), weight_decay=0.1),
]


def reference(optimizer: Optimizer) -> Reference:
    """The scalar update with this optimizer's numbers; state in the order of ``state_names``."""
    references: dict[type[Optimizer], Callable[..., tuple[float, list[float]]]] = {
        AdamW: _adamw,
        Adam: _adam,
        NAdam: _nadam,
        RAdam: _radam,
        SGD: _sgd,
        Adagrad: _adagrad,
        RMSprop: _rmsprop,
        Lion: _lion,
    }
    return functools.partial(references[type(optimizer)], optimizer)


def _adamw(
    o: AdamW, p: float, grads: Sequence[float], lrs: Sequence[float]
) -> tuple[float, list[float]]:
    m = v = most = 0.0
    for t, (g, lr) in enumerate(zip(grads, lrs, strict=True), start=1):
        m = o.betas[0] * m + (1 - o.betas[0]) * g
        v = o.betas[1] * v + (1 - o.betas[1]) * g**2
        most = max(most, v)
        m_hat = m / (1 - o.betas[0] ** t)
        v_hat = (most if o.amsgrad else v) / (1 - o.betas[1] ** t)
        p = p - lr * o.weight_decay * p - lr * m_hat / (math.sqrt(v_hat) + o.eps)
    return p, [m, v, most][: 3 if o.amsgrad else 2]


def _adam(
    o: Adam, p: float, grads: Sequence[float], lrs: Sequence[float]
) -> tuple[float, list[float]]:
    m = v = most = 0.0
    for t, (g, lr) in enumerate(zip(grads, lrs, strict=True), start=1):
        d = g + o.weight_decay * p
        m = o.betas[0] * m + (1 - o.betas[0]) * d
        v = o.betas[1] * v + (1 - o.betas[1]) * d**2
        most = max(most, v)
        m_hat = m / (1 - o.betas[0] ** t)
        v_hat = (most if o.amsgrad else v) / (1 - o.betas[1] ** t)
        p = p - lr * m_hat / (math.sqrt(v_hat) + o.eps)
    return p, [m, v, most][: 3 if o.amsgrad else 2]


def _nadam(
    o: NAdam, p: float, grads: Sequence[float], lrs: Sequence[float]
) -> tuple[float, list[float]]:
    m = v = 0.0

    def mu(i: int) -> float:
        return float(o.betas[0] * (1 - 0.96 ** (i * o.momentum_decay) / 2))

    for t, (g, lr) in enumerate(zip(grads, lrs, strict=True), start=1):
        d = g if o.decoupled_weight_decay else g + o.weight_decay * p
        p = p - lr * o.weight_decay * p if o.decoupled_weight_decay else p
        m = o.betas[0] * m + (1 - o.betas[0]) * d
        v = o.betas[1] * v + (1 - o.betas[1]) * d**2
        m_hat = mu(t + 1) * m / (1 - math.prod(map(mu, range(1, t + 2))))
        g_hat = (1 - mu(t)) * d / (1 - math.prod(map(mu, range(1, t + 1))))
        p = p - lr * (m_hat + g_hat) / (math.sqrt(v / (1 - o.betas[1] ** t)) + o.eps)
    return p, [m, v]


def _radam(
    o: RAdam, p: float, grads: Sequence[float], lrs: Sequence[float]
) -> tuple[float, list[float]]:
    m = v = 0.0
    k = 2 / (1 - o.betas[1]) - 1
    for t, (g, lr) in enumerate(zip(grads, lrs, strict=True), start=1):
        d = g if o.decoupled_weight_decay else g + o.weight_decay * p
        p = p - lr * o.weight_decay * p if o.decoupled_weight_decay else p
        m = o.betas[0] * m + (1 - o.betas[0]) * d
        v = o.betas[1] * v + (1 - o.betas[1]) * d**2
        r = k - 2 * t * o.betas[1] ** t / (1 - o.betas[1] ** t)
        u = m / (1 - o.betas[0] ** t)
        if r > 5:
            s = math.sqrt((r - 4) * (r - 2) * k / ((k - 4) * (k - 2) * r))
            u = u * s * math.sqrt(1 - o.betas[1] ** t) / (math.sqrt(v) + o.eps)
        p = p - lr * u
    return p, [m, v]


def _sgd(
    o: SGD, p: float, grads: Sequence[float], lrs: Sequence[float]
) -> tuple[float, list[float]]:
    b: float | None = None
    for g, lr in zip(grads, lrs, strict=True):
        d = g + o.weight_decay * p
        if o.momentum:
            b = d if b is None else o.momentum * b + d
            d = d + o.momentum * b if o.nesterov else b
        p = p - lr * d
    return p, [] if b is None else [b]


def _adagrad(
    o: Adagrad, p: float, grads: Sequence[float], lrs: Sequence[float]
) -> tuple[float, list[float]]:
    total = o.initial_accumulator_value
    for t, (g, lr) in enumerate(zip(grads, lrs, strict=True)):
        d = g + o.weight_decay * p
        total = total + d**2
        p = p - lr / (1 + t * o.lr_decay) * d / (math.sqrt(total) + o.eps)
    return p, [total]


def _rmsprop(
    o: RMSprop, p: float, grads: Sequence[float], lrs: Sequence[float]
) -> tuple[float, list[float]]:
    square = mean = buffer = 0.0
    for g, lr in zip(grads, lrs, strict=True):
        d = g + o.weight_decay * p
        square = o.alpha * square + (1 - o.alpha) * d**2
        mean = o.alpha * mean + (1 - o.alpha) * d
        variance = max(square - mean**2, 0.0) if o.centered else square
        d = d / (math.sqrt(variance) + o.eps)
        buffer = o.momentum * buffer + d
        p = p - lr * buffer
    centered = [mean] if o.centered else []
    return p, [square, *centered, *([buffer] if o.momentum else [])]


def _lion(
    o: Lion, p: float, grads: Sequence[float], lrs: Sequence[float]
) -> tuple[float, list[float]]:
    m = 0.0
    for g, lr in zip(grads, lrs, strict=True):
        c = o.betas[0] * m + (1 - o.betas[0]) * g
        p = p - lr * ((c > 0) - (c < 0) + o.weight_decay * p)
        m = o.betas[1] * m + (1 - o.betas[1]) * g
    return p, [m]


def muon_reference(
    o: Muon, p: Array, grads: Sequence[Array], lrs: Sequence[float]
) -> tuple[Array, Array]:
    """A matrix over all steps, in float64: the iteration acts on singular values alone."""
    a, b, c = o.ns_coefficients
    mean = np.zeros(p.shape)
    for g, lr in zip(grads, lrs, strict=True):
        mean = o.momentum * mean + (1 - o.momentum) * g
        u = o.momentum * mean + (1 - o.momentum) * g if o.nesterov else mean
        left, values, right = np.linalg.svd(u, full_matrices=False)
        values = values / max(np.sqrt((values**2).sum()), o.eps)
        for _ in range(o.ns_steps):
            values = a * values + b * values**3 + c * values**5
        rows, columns = p.shape
        size = max(1, rows / columns) ** 0.5
        if o.adjust_lr_fn == "match_rms_adamw":
            size = 0.2 * max(rows, columns) ** 0.5
        p = p * (1 - lr * o.weight_decay) - lr * size * (left * values) @ right
    return p, mean


@functools.lru_cache(maxsize=16)
def random_data(size: int, steps: int, dtype: Any) -> tuple[Array, Array]:
    """A parameter and a gradient for each step, read-only."""
    rng = np.random.default_rng(0)
    param = rng.standard_normal(size).astype(dtype)
    grads = rng.standard_normal((steps, size)).astype(dtype)
    param.flags.writeable = grads.flags.writeable = False
    return param, grads


def updated(
    optimizer: Optimizer, param: Array, grads: Array, **options: Any
) -> tuple[Array, dict[str, Array]]:
    """Take one step per row of grads on a copy of param; return it and the state."""
    param = param.copy()
    state = optimizer.init_state(param.size, param.dtype)
    for step, grad in enumerate(grads, start=1):
        optimizer.update(param, grad, state, step=step, **options)
    return param, state


def sampled(size: int) -> list[int]:
    """All indices of a small array; of a large one those around the block boundaries."""
    if size < 1000:
        return list(range(size))
    near = [edge + k for edge in range(0, size + 1, BLOCK_ELEMENTS) for k in range(-9, 10)]
    near += [*range(size - 9, size), *range(0, size, 9973)]
    return sorted({i for i in near if 0 <= i < size})
