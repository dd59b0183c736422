"""Layers as their users write them, and the plain loop that trains them on one rank.

Nothing here knows of fsdpcore. ``parameters`` of a layer gives (array, gradient) pairs by the names
that the arrays have when the layer is sharded, for the loop and for comparisons.
"""

from __future__ import annotations

import numpy as np

BATCH, WIDTH, OUTPUTS = 12, 7, 3
LR, MOMENTUM = 0.05, 0.9


class Dense:
    def __init__(self, rng, inputs, outputs):
        self.w = (rng.standard_normal((inputs, outputs)) / np.sqrt(inputs)).astype(np.float32)
        self.b = np.zeros(outputs, np.float32)
        self.calls = 0

    def __call__(self, x):
        return self.forward(x)

    def forward(self, x):
        self.calls += 1
        self.x = x
        return x @ self.w + self.b

    def backward(self, dy):
        self.dw = self.x.T @ dy
        self.db = dy.sum(axis=0)
        return dy @ self.w.T

    def parameters(self):
        return {"w": (self.w, self.dw), "b": (self.b, self.db)}


class Tanh:
    def forward(self, x):
        self.y = np.tanh(x)
        return self.y

    def backward(self, dy):
        return dy * (1 - self.y**2)


class Residual:
    """Parameters in an object, in a list of objects, in a list and in a dict."""

    def __init__(self, rng, width):
        self.up = Dense(rng, width, width + 2)
        self.act = Tanh()
        self.more = [Dense(rng, width + 2, width)]
        self.scales = [np.ones(width, np.float32), np.full(width, 0.5, np.float32)]
        self.table = {"shift": np.zeros(width, np.float32), "name": "residual"}
        self.seen = np.arange(3)
        self.me = self

    def forward(self, x):
        self.inputs = x
        self.inner = self.more[0].forward(self.act.forward(self.up.forward(x)))
        return x * self.scales[0] + self.inner * self.scales[1] + self.table["shift"]

    def backward(self, dy):
        self.dscales = [(dy * self.inputs).sum(axis=0), (dy * self.inner).sum(axis=0)]
        self.table["dshift"] = dy.sum(axis=0)
        dx = self.more[0].backward(dy * self.scales[1])
        return dy * self.scales[0] + self.up.backward(self.act.backward(dx))

    def parameters(self):
        inner = {f"up.{name}": pair for name, pair in self.up.parameters().items()}
        inner |= {f"more.0.{name}": pair for name, pair in self.more[0].parameters().items()}
        scales = zip(self.scales, self.dscales, strict=True)
        inner |= {f"scales.{number}": pair for number, pair in enumerate(scales)}
        return {**inner, "table.shift": (self.table["shift"], self.table["dshift"])}


def model(seed=0):
    rng = np.random.default_rng(seed)
    return [Dense(rng, 5, WIDTH), Tanh(), Residual(rng, WIDTH), Dense(rng, WIDTH, OUTPUTS)]


NAMES = ["dense0", "tanh1", "residual2", "dense3"]


def batch(number):
    rng = np.random.default_rng((9, number))
    x = rng.standard_normal((BATCH, 5)).astype(np.float32)
    return x, rng.standard_normal((BATCH, OUTPUTS)).astype(np.float32)


def run(layers, x, wanted):
    """Forward and backward pass of half the summed squares; returns that, and the input's."""
    for layer in layers:
        x = layer.forward(x)
    dy = x - wanted
    loss = 0.5 * float((dy**2).sum())
    for layer in reversed(layers):
        dy = layer.backward(dy)
    return loss, dy


def plain(layers, steps):
    """Train on whole batches, by SGD with momentum; the losses."""
    velocity, losses = {}, []
    for number in range(steps):
        losses.append(run(layers, *batch(number))[0])
        for place, layer in enumerate(layers):
            pairs = layer.parameters() if hasattr(layer, "parameters") else {}
            for name, (array, gradient) in pairs.items():
                mean = gradient / np.float32(BATCH)
                kept = velocity.get((place, name), 0) * np.float32(MOMENTUM) + mean
                velocity[place, name] = kept
                array -= np.float32(LR) * kept
    return losses


def values(layers, names=NAMES):
    """Copies of all arrays, by ``unit.param``, of layers that have gradients, too."""
    return {
        f"{unit}.{name}": array.copy()
        for unit, layer in zip(names, layers, strict=True)
        if hasattr(layer, "parameters")
        for name, (array, _) in layer.parameters().items()
    }
