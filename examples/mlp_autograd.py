"""A multi-layer perceptron written with HIPS autograd, each layer gathered for its own passes only.

    python examples/mlp_autograd.py                          # 4 ranks, threads of this process
    FSDPCORE_TRANSPORT=zmq python examples/mlp_autograd.py   # 4 processes over TCP
    fsdpcore run -n 3 examples/mlp_autograd.py               # ranks that a launcher has started

It learns scikit-learn's handwritten digits (pip install -e '.[examples]'). No gradient is
written by hand: autograd differentiates one layer after the other, with the parameters of that one.
"""

from __future__ import annotations

from typing import Any

import autograd.numpy as np
from autograd.scipy.special import logsumexp
from sklearn.datasets import load_digits

import fsdpcore as fc
from fsdpcore.adapters import autograd

TRAIN, BATCH = 1500, 250  # of 1797 digits; the others are for the test


def linear(params: dict[str, Any], x: Any) -> Any:
    return x @ params["w"] + params["b"]


def hidden(params: dict[str, Any], x: Any) -> Any:
    return np.tanh(linear(params, x))


def cross_entropy(logits: Any, labels: Any) -> Any:
    return np.sum(logsumexp(logits, axis=1) - logits[np.arange(len(labels)), labels])


def layer(function: Any, inputs: int, outputs: int) -> fc.Layer:
    normal = fc.initializers.normal(std=inputs**-0.5)
    start = {"w": fc.Spec((inputs, outputs), init=normal), "b": fc.Spec(outputs)}
    return autograd.layer(function, start)


def main(backend: fc.Backend, steps: int = 100) -> float:
    """Train on one rank; returns how many of the unseen digits are recognised."""
    digits = load_digits()
    x, labels = (digits.data / 16).astype(np.float32), digits.target
    layers = [(f"hidden{i}", layer(hidden, n, 128)) for i, n in enumerate([64, 128, 128])]
    stack = fc.LayerStack([*layers, ("out", layer(linear, 128, 10))])
    loss = autograd.loss(cross_entropy)
    rng = np.random.default_rng(0)
    engine = fc.FSDP(stack.units(rng), backend, optimizer=fc.optim.AdamW(lr=2e-3))
    for _ in range(steps):
        rows = rng.choice(TRAIN, BATCH, replace=False)
        mine = np.array_split(rows, backend.world_size)[backend.rank]
        with engine.step(divisor=BATCH) as step:  # sums over all rows become means
            logits, saved = stack.forward(step, x[mine])
            _, d_logits = loss(logits, labels[mine])
            stack.backward(step, saved, d_logits)
            step.update()

    with engine.evaluation() as step:
        logits, _ = stack.forward(step, x[TRAIN:])
    accuracy = float((logits.argmax(axis=1) == labels[TRAIN:]).mean())
    if backend.rank == 0:
        print(f"{backend.world_size} ranks: {accuracy:.1%} of unseen digits recognised")
    return accuracy


if __name__ == "__main__":
    fc.launch(main, world_size=4)
