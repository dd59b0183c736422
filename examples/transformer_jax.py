"""A transformer written with JAX: parameters in a tree, optax, dropout, several parts of a batch.

    python examples/transformer_jax.py                      # 3 ranks, threads of this process
    fsdpcore run -n 2 examples/transformer_jax.py runs/tr   # saves there; again: it goes on

It learns rows where each token is the sum of the two before it (pip install -e '.[examples,jax]').
Parts of the batch and keys of dropout belong to rows, not ranks: 1, 2, 3 and 6 ranks train alike.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.nn import gelu, log_softmax, softmax, standardize

import fsdpcore as fc
from fsdpcore.adapters import jax as adapter

VOCAB, WIDTH, LENGTH, BLOCKS, BATCH, PARTS = 11, 32, 12, 2, 48, 6
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 400, 1e-3)
ADAMW = fc.optim.Optax(
    optax.adamw(SCHEDULE)
)  # or optax's as it is: it is tried out for each engine
PAST = np.tril(np.ones((LENGTH, LENGTH), bool))


def start() -> Any:
    def w(*shape: int) -> Any:
        return (rng.normal(size=shape) / shape[0] ** 0.5).astype(np.float32)

    rng, n = np.random.default_rng(0), WIDTH
    blocks = [
        {"qkv": w(n, 3 * n), "out": w(n, n), "mlp": [w(n, 4 * n), w(4 * n, n)]}
        for _ in range(BLOCKS)
    ]
    return {"token": w(VOCAB, n), "place": w(LENGTH, n), "blocks": blocks, "head": w(n, VOCAB)}


def row_loss(params: Any, row: Any, key: Any) -> Any:
    x = params["token"][row[:-1]] + params["place"]
    x = jnp.where(jax.random.bernoulli(key, 0.95, x.shape), x / 0.95, 0.0)  # dropout
    for block in params["blocks"]:
        q, k, v = jnp.split(standardize(x) @ block["qkv"], 3, axis=-1)
        x += softmax(jnp.where(PAST, q @ k.T / WIDTH**0.5, -1e9)) @ v @ block["out"]
        x += gelu(standardize(x) @ block["mlp"][0]) @ block["mlp"][1]
    logits = log_softmax(standardize(x) @ params["head"])
    return -logits[jnp.arange(LENGTH), row[1:]].sum()


def loss_fn(params: Any, rows: Any, key: Any, numbers: Any) -> Any:
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
    return jax.vmap(row_loss, (None, 0, 0))(params, rows, keys).sum()


LOSS_AND_GRADS = adapter.loss_and_grads(loss_fn)  # once: it is compiled for all ranks


def batch(step: int) -> Any:
    rows = np.random.default_rng(step).integers(VOCAB, size=(BATCH, LENGTH + 1))
    for at in range(2, LENGTH + 1):
        rows[:, at] = (rows[:, at - 1] + rows[:, at - 2]) % VOCAB
    return rows, adapter.fold_in(jax.random.key(0), step)


def main(backend: fc.Backend, folder: str = "", steps: int = 200) -> Any:
    """Train on one rank, from the checkpoint if there is one; returns the parameters."""
    engine = fc.FSDP(fc.ParamTree(start(), units=2), backend, optimizer=ADAMW)
    if folder and fc.checkpoint.steps(folder):
        fc.checkpoint.load(folder, engine, backend)
    mine = np.split(np.arange(BATCH), PARTS)[backend.rank :: backend.world_size]
    while engine.steps < steps:
        rows, key = batch(engine.steps)
        with engine.step(divisor=BATCH * LENGTH) as step:
            for part in mine:  # the last one reduces the gradients of all
                later = nullcontext() if part is mine[-1] else step.no_sync()
                with later, step.whole() as (params, grads):
                    _, found = LOSS_AND_GRADS(params, rows[part], key, part)
                    grads.update(found)
            step.update(clip=1.0)
    if folder:
        fc.checkpoint.save(folder, engine, backend)
    return engine.full_tree()


if __name__ == "__main__":
    params = fc.launch(main, world_size=3, args=tuple(sys.argv[1:2]))[0]
    rows, key = batch(10**6)
    loss = loss_fn(params, rows, key, np.arange(BATCH)) / BATCH / LENGTH
    print(f"{loss:.2f} for each of the next tokens; a guess has {np.log(VOCAB):.2f}")
