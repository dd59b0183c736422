"""A small multi-layer perceptron for the tests of adapters: as layers, and written out in NumPy.

What is written out shares no code with the layers, and none with the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Named = dict[str, dict[str, Array]]

SIZES = (5, 11, 7, 3)  # odd ones: nothing divides by 2, 3 or 4
BATCH = 12
LR, MOMENTUM = 0.1, 0.9


class Dense:
    """x @ w + b, and tanh of it if asked for."""

    def __init__(self, inputs: int, outputs: int, tanh: bool, dtype: Any = np.float32) -> None:
        self.shape = (inputs, outputs)
        self.tanh = tanh
        self.dtype = np.dtype(dtype)

    def init(self, rng: np.random.Generator) -> dict[str, Array]:
        w = rng.normal(size=self.shape) / np.sqrt(self.shape[0])
        b = rng.normal(size=self.shape[1])
        return {"w": w.astype(self.dtype), "b": b.astype(self.dtype)}

    def forward(self, params: Mapping[str, Array], x: Array) -> tuple[Array, Any]:
        y = x @ params["w"] + params["b"]
        y = np.tanh(y) if self.tanh else y
        return y, (x, y)

    def backward(
        self, params: Mapping[str, Array], saved: Any, dy: Array, grads: MutableMapping[str, Array]
    ) -> Array:
        x, y = saved
        if self.tanh:
            dy = dy * (1 - y * y)
        np.matmul(x.T, dy, out=grads["w"])
        grads["b"] = dy.sum(axis=0)
        return dy @ params["w"].T


def layers(dtype: Any = np.float32) -> list[tuple[str, Dense]]:
    """The layers by name."""
    last = len(SIZES) - 2
    return [(f"dense{i}", Dense(SIZES[i], SIZES[i + 1], i < last, dtype)) for i in range(last + 1)]


def initial(seed: int = 5, dtype: Any = np.float32) -> Named:
    """The parameters to begin with."""
    rng = np.random.default_rng(seed)
    return {name: layer.init(rng) for name, layer in layers(dtype)}


def batch(number: int, dtype: Any = np.float32) -> tuple[Array, Array]:
    """The rows of a step, the same on all ranks, and what is wanted for them."""
    rng = np.random.default_rng((9, number))
    x = rng.normal(size=(BATCH, SIZES[0])).astype(dtype)
    return x, np.tanh(x[:, : SIZES[-1]] * 2 - x[:, 1:2]).astype(dtype)


def rows_of(backend: Any) -> Array:
    """This rank's rows of a batch."""
    return np.array_split(np.arange(BATCH), backend.world_size)[backend.rank]


def square_loss(y: Array, wanted: Array) -> tuple[float, Array]:
    """Half the sum of squares, and its gradient; to be divided by the rows of all ranks."""
    difference = y - wanted
    return float((difference.astype(np.float64) ** 2).sum() / 2), difference


def loss_and_grads(params: Mapping[str, Mapping[str, Array]], x: Array, wanted: Array) -> Any:
    """Loss and gradients, written out for whole parameters."""
    activations = [x]
    names = [f"dense{i}" for i in range(len(SIZES) - 1)]
    for name in names:
        y = activations[-1] @ params[name]["w"] + params[name]["b"]
        activations.append(y if name == names[-1] else np.tanh(y))
    dy = activations[-1] - wanted
    loss = float((dy.astype(np.float64) ** 2).sum() / 2)
    grads: Named = {}
    for i in reversed(range(len(names))):
        if i < len(names) - 1:
            dy = dy * (1 - activations[i + 1] ** 2)
        grads[names[i]] = {"w": activations[i].T @ dy, "b": dy.sum(axis=0)}
        dy = dy @ params[names[i]]["w"].T
    return loss, grads


def trained(steps: int, dtype: Any = np.float32) -> tuple[list[float], Named]:
    """Losses per row and parameters of training in one process, without the engine."""
    params = initial(dtype=dtype)
    speed = {u: {n: np.zeros_like(a) for n, a in named.items()} for u, named in params.items()}
    losses = []
    for number in range(steps):
        loss, grads = loss_and_grads(params, *batch(number, dtype))
        losses.append(loss / BATCH)
        for unit, named in params.items():
            for name, array in named.items():
                v = speed[unit][name]
                v[...] = MOMENTUM * v + grads[unit][name] / dtype(BATCH)
                array -= dtype(LR) * v
    return losses, params
