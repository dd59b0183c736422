"""A multi-layer perceptron written with JAX: one loss of all parameters, which are sharded.

    python examples/mlp_jax.py                          # 4 ranks, threads of this process
    FSDPCORE_TRANSPORT=zmq python examples/mlp_jax.py   # 4 processes over TCP
    fsdpcore run -n 3 examples/mlp_jax.py               # ranks that a launcher has started

It learns scikit-learn's handwritten digits (pip install -e '.[examples,jax]'). Between steps a
rank holds its share of parameters and optimizer state. ``train_step`` gathers all parameters for
the function; with ``adapter.layer`` it would be those of a layer or two at a time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import fsdpcore as fc
from fsdpcore.adapters import jax as adapter

TRAIN, BATCH = 1500, 250  # of 1797 digits; the others are for the test
SIZES = [64, 128, 128, 128, 10]


def model(params: Any, x: Any) -> Any:
    *hidden, last = params.values()
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def cross_entropy(params: Any, x: Any, labels: Any) -> Any:
    logits = jax.nn.log_softmax(model(params, x))
    return -logits[jnp.arange(len(labels)), labels].sum()


def start(inputs: int, outputs: int) -> dict[str, fc.Spec]:
    normal = fc.initializers.normal(std=inputs**-0.5)
    return {"w": fc.Spec((inputs, outputs), init=normal), "b": fc.Spec(outputs)}


def main(backend: fc.Backend, steps: int = 200) -> float:
    """Train on one rank; returns how many of the unseen digits are recognised."""
    digits = load_digits()
    x, labels = (digits.data / 16).astype(np.float32), digits.target
    units = [fc.Unit(f"layer{i}", start(*SIZES[i : i + 2])) for i in range(len(SIZES) - 1)]
    engine = fc.FSDP(units, backend, optimizer=fc.optim.AdamW(lr=2e-3))
    loss_and_grads = adapter.loss_and_grads(cross_entropy)

    rng = np.random.default_rng(0)
    for _ in range(steps):
        rows = rng.choice(TRAIN, BATCH, replace=False)
        mine = np.array_split(rows, backend.world_size)[backend.rank]
        # Sums over all rows become means.
        fc.train_step(engine, loss_and_grads, x[mine], labels[mine], divisor=BATCH)

    with engine.evaluation() as step, step.whole() as (params, _):
        logits = np.asarray(model(params, x[TRAIN:]))
    accuracy = float((logits.argmax(axis=1) == labels[TRAIN:]).mean())
    if backend.rank == 0:
        print(f"{backend.world_size} ranks: {accuracy:.1%} of unseen digits recognised")
    return accuracy


if __name__ == "__main__":
    fc.launch(main, world_size=4)
