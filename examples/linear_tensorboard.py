"""A training watched in TensorBoard, by the figures that ``engine.on_step`` hands out.

    pip install tensorboardX tensorboard
    python examples/linear_tensorboard.py runs     # then: tensorboard --logdir runs

Each rank writes a run of its own, so that their curves lie over one another: the rank with the
lowest ``waiting`` is the one that the others wait for. W&B and MLflow take the same figures:
``engine.on_step(wandb.log)``, ``engine.on_step(lambda figures: mlflow.log_metrics(figures))``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from tensorboardX import SummaryWriter

import fsdpcore as fc

BATCH = 64


def main(backend: fc.Backend, folder: str, steps: int = 100) -> None:
    """Train a linear model on one rank, and write its figures."""
    writer = SummaryWriter(str(Path(folder) / f"rank{backend.rank}"))

    def write(figures: dict[str, float]) -> None:
        number = int(figures.pop("step"))
        for name, value in figures.items():
            writer.add_scalar(f"step/{name}", value, number)

    params = {"w": np.zeros((256, 16), np.float32)}
    engine = fc.FSDP([fc.Unit("linear", params)], backend, optimizer=fc.optim.AdamW(lr=0.01))
    engine.on_step(write)
    rng = np.random.default_rng(backend.rank)
    wanted = np.random.default_rng(0).standard_normal((256, 16), np.float32)
    for number in range(steps):
        x = rng.standard_normal((BATCH, 256), np.float32)
        with engine.step(tokens=BATCH) as step:
            with step.forward("linear") as given:
                error = x @ (given["w"] - wanted)
            with step.backward("linear") as (_, grads):
                grads["w"] = x.T @ error / BATCH
            step.update(clip=10.0)
        writer.add_scalar("loss", float((error**2).mean()), number + 1)
    writer.close()


if __name__ == "__main__":
    fc.launch(main, world_size=2, transport="zmq", args=(sys.argv[1] if sys.argv[1:] else "runs",))
