"""A small convolutional network in plain NumPy, each layer gathered for its own passes only.

    python examples/cnn_numpy.py                       # 3 ranks, threads of this process
    fsdpcore run -n 2 examples/cnn_numpy.py runs/cnn   # saves there; again: it goes on

It learns scikit-learn's handwritten digits (pip install -e '.[examples]'). A layer is a function
and its derivative by hand; it owns nothing, and keeps no parameters from one pass to the other.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from sklearn.datasets import load_digits

import fsdpcore as fc

TRAIN, BATCH = 1500, 120  # of 1797 digits; the others are for the test


class Conv:
    """Windows of 3 by 3 pixels times a matrix, then ReLU: (n, c, h, w) to (n, d, h - 2, w - 2)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.shape = inputs * 9, outputs

    def init(self, rng: Any) -> Any:
        w = rng.normal(size=self.shape) * (2 / self.shape[0]) ** 0.5
        return {"w": w.astype(np.float32), "b": np.zeros(self.shape[1], np.float32)}

    def forward(self, params: Any, x: Any) -> Any:
        windows = sliding_window_view(x, (3, 3), axis=(2, 3)).transpose(0, 2, 3, 1, 4, 5)
        windows = windows.reshape(*windows.shape[:3], -1)
        y = np.maximum(windows @ params["w"] + params["b"], 0)
        return y.transpose(0, 3, 1, 2), (windows, y > 0, x.shape)

    def backward(self, params: Any, saved: Any, dy: Any, grads: Any) -> Any:
        windows, active, shape = saved
        dy = dy.transpose(0, 2, 3, 1) * active
        grads["w"] = np.tensordot(windows, dy, ((0, 1, 2), (0, 1, 2)))
        grads["b"] = dy.sum((0, 1, 2))
        d_windows = (dy @ params["w"].T).reshape(*dy.shape[:3], shape[1], 3, 3)
        dx = np.zeros(shape, np.float32)
        for i, j in np.ndindex(3, 3):
            part = d_windows[..., i, j].transpose(0, 3, 1, 2)
            dx[:, :, i : i + dy.shape[1], j : j + dy.shape[2]] += part
        return dx


class Out:
    """All that is left, times a matrix."""

    def init(self, rng: Any) -> Any:
        return {"w": rng.normal(scale=0.05, size=(512, 10)).astype(np.float32)}

    def forward(self, params: Any, x: Any) -> Any:
        return x.reshape(len(x), -1) @ params["w"], x

    def backward(self, params: Any, x: Any, dy: Any, grads: Any) -> Any:
        grads["w"] = x.reshape(len(x), -1).T @ dy
        return (dy @ params["w"].T).reshape(x.shape)


def cross_entropy(logits: Any, labels: Any) -> Any:
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    loss = -np.log(p[np.arange(len(labels)), labels]).sum()
    p[np.arange(len(labels)), labels] -= 1
    return loss, p


def main(backend: fc.Backend, folder: str = "", steps: int = 100) -> Any:
    """Train on one rank, from the checkpoint if there is one; returns parameters by name."""
    digits = load_digits()
    x, labels = (digits.images[:, None] / 16).astype(np.float32), digits.target
    stack = fc.LayerStack([("conv0", Conv(1, 16)), ("conv1", Conv(16, 32)), ("out", Out())])
    units = stack.units(np.random.default_rng(0))
    engine = fc.FSDP(units, backend, optimizer=fc.optim.AdamW(lr=5e-3))
    if folder and fc.checkpoint.steps(folder):
        fc.checkpoint.load(folder, engine, backend)
    while engine.steps < steps:
        rows = np.random.default_rng(engine.steps).choice(TRAIN, BATCH, replace=False)
        mine = np.array_split(rows, backend.world_size)[backend.rank]
        with engine.step(divisor=BATCH) as step:
            logits, saved = stack.forward(step, x[mine])
            _, d_logits = cross_entropy(logits, labels[mine])
            stack.backward(step, saved, d_logits)
            step.update(clip=1.0)
    if folder:
        fc.checkpoint.save(folder, engine, backend)
    with engine.evaluation() as evaluation:
        logits, _ = stack.forward(evaluation, x[TRAIN:])
    if backend.rank == 0:
        print(f"{(logits.argmax(1) == labels[TRAIN:]).mean():.1%} of unseen digits recognised")
    return engine.state_dict(full=True, optimizer=False).arrays


if __name__ == "__main__":
    fc.launch(main, world_size=3, args=tuple(sys.argv[1:2]))
