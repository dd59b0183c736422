"""Logistic regression on handwritten digits: sharded training, all of it in NumPy.

    python examples/digits_logistic.py                          # 4 ranks, threads of this process
    FSDPCORE_TRANSPORT=zmq python examples/digits_logistic.py   # 4 processes over TCP
    fsdpcore run -n 3 examples/digits_logistic.py               # ranks that a launcher has started

The digits are scikit-learn's (pip install -e '.[examples]'). Each step draws a batch, the same
on all ranks, of which each rank computes its rows; so the result is that of a single rank.
"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

import fsdpcore as fc

TRAIN, BATCH = 1500, 256  # of 1797 digits; the others are for the test


def main(backend: fc.Backend, steps: int = 300) -> float:
    """Train on one rank; returns how many of the unseen digits are recognised."""
    digits = load_digits()
    x, labels = (digits.data / 16).astype(np.float32), digits.target
    start = {"w": np.zeros((64, 10), np.float32), "b": np.zeros(10, np.float32)}
    engine = fc.FSDP([fc.Unit("digits", start)], backend, optimizer=fc.optim.AdamW(lr=0.01))

    rng = np.random.default_rng(0)
    for _ in range(steps):
        rows = rng.choice(TRAIN, BATCH, replace=False)
        mine = np.array_split(rows, backend.world_size)[backend.rank]
        with engine.step(divisor=BATCH) as step:  # sums over all rows become means
            with step.forward("digits") as params:
                logits = x[mine] @ params["w"] + params["b"]
            odds = np.exp(logits - logits.max(axis=1, keepdims=True))
            errors = odds / odds.sum(axis=1, keepdims=True)
            errors[np.arange(len(mine)), labels[mine]] -= 1
            with step.backward("digits") as (_, grads):
                grads["w"] = x[mine].T @ errors
                grads["b"] = errors.sum(axis=0)
            step.update()

    with engine.full_params() as whole:
        guesses = (x[TRAIN:] @ whole["digits.w"] + whole["digits.b"]).argmax(axis=1)
        accuracy = float((guesses == labels[TRAIN:]).mean())
    if backend.rank == 0:
        print(f"{backend.world_size} ranks: {accuracy:.1%} of unseen digits recognised")
    return accuracy


if __name__ == "__main__":
    fc.launch(main, world_size=4)
