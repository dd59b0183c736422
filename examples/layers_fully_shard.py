"""Layers as one writes them in NumPy, with their arrays in attributes, sharded by one call.

    python examples/layers_fully_shard.py                          # 4 ranks, threads of one process
    FSDPCORE_TRANSPORT=zmq python examples/layers_fully_shard.py   # 4 processes over TCP
    fsdpcore run -n 3 examples/layers_fully_shard.py               # ranks of a launcher

It learns scikit-learn's handwritten digits (pip install -e '.[examples]'). The layers know
nothing of fsdpcore: whenever one is called, it finds its whole arrays in its attributes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import fsdpcore as fc

TRAIN, BATCH = 1500, 250  # of 1797 digits; the others are for the test


class Dense:
    """An affine map, with a tanh after it if so wanted."""

    def __init__(self, inputs: int, outputs: int, rng: np.random.Generator, tanh: bool) -> None:
        self.w = (rng.standard_normal((inputs, outputs)) * inputs**-0.5).astype(np.float32)
        self.b = np.zeros(outputs, np.float32)
        self.tanh = tanh

    def forward(self, x: Any) -> Any:
        y = x @ self.w + self.b
        self.x, self.y = x, np.tanh(y) if self.tanh else y
        return self.y

    def backward(self, dy: Any) -> Any:
        dy = dy * (1 - self.y**2) if self.tanh else dy
        self.dw, self.db = self.x.T @ dy, dy.sum(axis=0)
        return dy @ self.w.T


def main(backend: fc.Backend, steps: int = 200) -> float:
    """Train on one rank; returns how many of the unseen digits are recognised."""
    digits, rng = load_digits(), np.random.default_rng(0)
    x, labels = (digits.data / 16).astype(np.float32), digits.target
    layers = [Dense(64, 128, rng, True), Dense(128, 128, rng, True), Dense(128, 10, rng, False)]
    sharded = fc.fully_shard(layers, backend, optimizer=fc.optim.AdamW(lr=2e-3))

    for _ in range(steps):
        rows = rng.choice(TRAIN, BATCH, replace=False)
        mine = np.array_split(rows, backend.world_size)[backend.rank]
        with sharded.step(divisor=BATCH) as step:  # sums over all rows become means
            y = x[mine]
            for layer in layers:
                y = layer.forward(y)
            odds = np.exp(y - y.max(axis=1, keepdims=True))
            dy = odds / odds.sum(axis=1, keepdims=True)
            dy[np.arange(len(mine)), labels[mine]] -= 1
            for layer in reversed(layers):
                dy = layer.backward(dy)
            step.update()

    sharded.restore()  # from here on they are plain layers, with whole arrays, on every rank
    y = x[TRAIN:]
    for layer in layers:
        y = layer.forward(y)
    accuracy = float((y.argmax(axis=1) == labels[TRAIN:]).mean())
    if backend.rank == 0:
        print(f"{backend.world_size} ranks: {accuracy:.1%} of unseen digits recognised")
    return accuracy


if __name__ == "__main__":
    fc.launch(main, world_size=4)
