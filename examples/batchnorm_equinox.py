"""An Equinox model with batch norm: the engine takes the module, running statistics come as aux.

    python examples/batchnorm_equinox.py                     # 3 ranks, threads of this process
    fsdpcore run -n 2 examples/batchnorm_equinox.py runs/bn  # saves there; again: it goes on

It tells three kinds of points apart (pip install -e '.[examples,jax]'). Each part of the batch is
normalised by itself, and belongs to no rank: 1, 2, 3 and 6 ranks train alike.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fsdpcore as fc
from fsdpcore.adapters import jax as adapter

BATCH, PARTS = 96, 6
SGD = fc.optim.Optax(optax.sgd(0.1, momentum=0.9, nesterov=True))


def start() -> Any:
    one, two = jax.random.split(jax.random.key(0))
    norm = eqx.nn.BatchNorm(16, "part", mode="batch")
    hidden, out = eqx.nn.Linear(4, 16, key=one), eqx.nn.Linear(16, 3, key=two)
    return eqx.nn.Sequential([hidden, norm, eqx.nn.Lambda(jax.nn.relu), out])


def loss_fn(model: Any, x: Any, kinds: Any, state: Any) -> Any:
    calls = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="part")
    logits, state = calls(x, state)
    return -jax.nn.log_softmax(logits)[jnp.arange(len(x)), kinds].sum(), state


LOSS_AND_GRADS = adapter.loss_and_grads(loss_fn, has_aux=True)  # once: compiled for all ranks


def batch(step: int) -> Any:
    x = np.random.default_rng(step).normal(size=(BATCH, 4)).astype(np.float32)
    return x, (x[:, 0] * x[:, 1] > 0).astype(int) + (x[:, 2] > 0.5)


def mean(own: Any, backend: fc.Backend) -> Any:
    """Return the mean over the parts of all ranks; a count, which all have, stays."""
    return fc.all_reduce(own.mean(0), backend, op="mean") if own.dtype.kind == "f" else own[0]


def main(backend: fc.Backend, folder: str = "", steps: int = 100) -> Any:
    """Train on one rank, from the checkpoint if there is one; returns the model and its state."""
    model, state = eqx.nn.make_with_state(start)()
    engine = fc.FSDP(model, backend, optimizer=fc.optim.Average(SGD, ema=0.9))
    if folder and fc.checkpoint.steps(folder):
        saved = {"model": engine, "statistics": state}
        state = fc.checkpoint.load(folder, saved, backend).state["statistics"]
    mine = np.split(np.arange(BATCH), PARTS)[backend.rank :: backend.world_size]
    while engine.steps < steps:
        (x, kinds), states = batch(engine.steps), []
        with engine.step(divisor=BATCH) as step:
            for part in mine:  # the last one reduces the gradients of all
                later = nullcontext() if part is mine[-1] else step.no_sync()
                with later, step.whole() as (params, grads):
                    (_, new), found = LOSS_AND_GRADS(params, x[part], kinds[part], state)
                    grads.update(found)
                states.append(new)
            step.update()
        state = jax.tree.map(lambda *own: mean(np.array(own), backend), *states)
    if folder:
        fc.checkpoint.save(folder, {"model": engine, "statistics": state}, backend)
    with engine.averaged():  # the average of the weights
        return eqx.nn.inference_mode(engine.full_tree()), state


if __name__ == "__main__":
    model, state = fc.launch(main, world_size=3, args=tuple(sys.argv[1:2]))[0]
    x, kinds = batch(2**32)
    logits, _ = jax.vmap(model, in_axes=(0, None))(x, state)
    print(f"{(logits.argmax(1) == kinds).mean():.0%} of {BATCH} new points")
