"""A body: a NumPy training with dropout, an average and a position, that stops and goes on."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

import fsdpcore as fc
from fsdpcore.checkpoint import PerRank

WIDTH, HIDDEN, ROWS = 6, 8, 4


def units() -> list[fc.Unit]:
    numbers = np.random.default_rng(7)
    first = {"w": numbers.normal(size=(WIDTH, HIDDEN)), "b": np.zeros(HIDDEN)}
    return [fc.Unit("first", first), fc.Unit("last", {"w": numbers.normal(size=(HIDDEN, 1))})]


class Trainer:
    """All that has to be kept is what ``state`` names."""

    def __init__(self, backend: fc.Backend) -> None:
        self.backend = backend
        self.engine = fc.FSDP(units(), backend, optimizer=fc.optim.AdamW(lr=0.05))
        self.dropout = np.random.default_rng([11, backend.rank])
        self.order = np.random.default_rng(5)  # equal on all ranks
        self.average = np.zeros(WIDTH)
        self.position = 0
        self.losses: tuple[str, ...] = ()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.engine,
            "dropout": PerRank(self.dropout),
            "order": self.order,
            "average": self.average,
            "data": {"position": self.position, "losses": self.losses},
        }

    def step(self) -> None:
        world, rank = self.backend.world_size, self.backend.rank
        every = self.order.normal(size=(world * ROWS, WIDTH)) + 0.01 * self.position
        x = every[rank * ROWS :][:ROWS]
        kept = self.dropout.random((ROWS, HIDDEN)) < 0.5
        with self.engine.step() as step:
            with step.forward("first") as p:
                hidden = np.maximum(x @ p["w"] + p["b"], 0) * kept
            with step.forward("last") as p:
                error = hidden @ p["w"] - x.sum(1, keepdims=True)
            with step.backward("last") as (p, grads):
                grads["w"] = hidden.T @ error
                down = error @ p["w"].T * (hidden > 0)
            with step.backward("first") as (_, grads):
                grads["w"], grads["b"] = x.T @ down, down.sum(0)
            step.update()
        mean = fc.all_reduce(x.mean(0), self.backend, op="mean")
        self.average[...] = 0.9 * self.average + 0.1 * mean
        self.position += world * ROWS
        loss: float = fc.all_reduce(np.square(error).mean(), self.backend, op="mean").item()
        self.losses += (loss.hex(),)

    def words(self) -> dict[str, str]:
        """Say all that there is, by digests of the bits."""
        full = self.engine.state_dict(full=True)
        told = {name: np.asarray(array).tobytes() for name, array in full.items()}
        told["average"] = self.average.tobytes()
        told["dropout"] = repr(self.dropout.bit_generator.state).encode()
        told["order"] = repr(self.order.bit_generator.state).encode()
        told["rest"] = repr((self.engine.steps, self.position, self.losses)).encode()
        return {name: hashlib.sha256(data).hexdigest() for name, data in told.items()}


def resumed(backend: fc.Backend, folder: str, stops: list[int], upto: int) -> dict[str, str]:
    """Train up to a step in a new trainer, and save after some; go on from what is there."""
    trainer = Trainer(backend)
    try:
        loaded = fc.checkpoint.load(folder, trainer.state(), backend)
    except fc.CheckpointNotFoundError:
        pass
    else:
        trainer.position = loaded.state["data"]["position"]
        trainer.losses = loaded.state["data"]["losses"]
    while trainer.engine.steps < upto:
        trainer.step()
        if trainer.engine.steps in stops:
            fc.checkpoint.save(folder, trainer.state(), backend)
    return trainer.words()


def stopped_and_whole(
    backend: fc.Backend, folder: str
) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Return what a training holds that stopped twice, what one that did not, and at step 3."""
    at_three = resumed(backend, folder, [3], 3)
    resumed(backend, folder, [5], 5)
    return resumed(backend, folder, [], 8), resumed(backend, folder + "-none", [], 8), at_three


def on_other_ranks(backend: fc.Backend, folder: str) -> dict[str, str]:
    """Return what other ranks have of step 3."""
    trainer = Trainer(backend)
    loaded = fc.checkpoint.load(folder, trainer.state(), backend, step=3)
    trainer.position = loaded.state["data"]["position"]
    trainer.losses = loaded.state["data"]["losses"]
    found = trainer.words()
    trainer.step()  # it goes on
    return found
