"""A training whose ranks come and go; what it ends with, and what it has been through.

    fsdpcore run --elastic -n 1:6 elastic_burned.py FOLDER --steps 200

Every process writes what happens to it into a file of its own in FOLDER, a line of JSON each, and
at the end what all of them must agree on: a digest of parameters and optimizer state, and how often
each sample was used.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fsdpcore as fc

LEAVES, SAMPLES, WIDTH = 8, 96, 40
BATCH = 20  # so that the last batch of an epoch has fewer rows than the others, and leaves without


@dataclass(frozen=True)
class Training:
    """What is trained, the same on all ranks.

    Attributes:
        steps: until the end.
        strategy: of the engine.
        every: commits from one version in memory to the next.
        saves: commits from one checkpoint on disk to the next; 0 for none.
        pause: seconds that each step takes besides, so that something can happen in it.
        folder: for checkpoints.
    """

    steps: int
    strategy: str = "full_shard"
    every: int = 1
    saves: int = 0
    pause: float = 0.0
    folder: str = ""

    @property
    def checkpoints(self) -> str | None:
        """Where checkpoints are, if there are any."""
        return str(Path(self.folder, "checkpoints")) if self.saves else None

    def run(self, job: fc.elastic.Job, tell: Callable[..., None]) -> dict[str, Any]:
        """Train to the end; return what all ranks must agree on.

        Args:
            job: the elastic job.
            tell: is told where it is: ``begin``, ``step`` before each commit, and ``commit``, with
                the number of commits so far.
        """
        rng = np.random.default_rng(3)
        units = [
            fc.Unit(f"u{at}", {"w": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8})
            for at in range(3)
        ]
        engine = fc.FSDP(
            units,
            job.backend,
            strategy=self.strategy,
            virtual_ranks=LEAVES,
            optimizer=fc.optim.AdamW(lr=1e-2),
        )
        data = np.random.default_rng(5).standard_normal((SAMPLES, WIDTH)).astype(np.float32)
        stream = fc.data.Stream((np.arange(SAMPLES), data), BATCH, leaves=LEAVES, seed=11)
        used, noise = np.zeros(SAMPLES, np.int64), np.random.default_rng(17)
        state = {"model": engine, "stream": stream, "used": used, "noise": noise, "rows": 0}
        state = job.restore(state)
        tell("begin", commits=job.commits)
        while job.commits < self.steps:
            batch = next(stream)
            state["rows"] += batch.size
            self._step(engine, batch, noise.standard_normal(), used, job.backend)
            if self.pause:
                time.sleep(self.pause)
            tell("step", commits=job.commits)
            job.commit()
            if self.saves and job.commits % self.saves == 0:
                fc.checkpoint.save(self.checkpoints, job.state, job.backend, step=job.commits)
            tell("commit", commits=job.commits)
        return {
            "digest": _digest(engine),
            "used": used.tolist(),
            "rows": state["rows"],
            "noise": noise.standard_normal(),
            "epochs": stream.epoch,
        }

    def _step(
        self, engine: fc.FSDP, batch: Any, scale: float, used: Any, backend: fc.Backend
    ) -> None:
        seen = np.zeros_like(used)
        with engine.step(divisor=batch.size) as step:
            for leaf in step.leaves():
                rows, x = batch[leaf]
                seen[rows] += 1
                self._leaf(step, x * np.float32(1 + scale / 4))
            step.update(clip=1.0)
        used += fc.all_reduce(seen, backend)

    def _leaf(self, step: fc.Step, x: Any) -> None:
        names = [f"u{at}" for at in range(3)]
        inputs, y = [], x
        for name in names:
            with step.forward(name) as params:
                inputs.append(y)
                y = np.tanh(y @ params["w"])
        gradient = y - x
        for name, at in zip(reversed(names), reversed(range(3)), strict=True):
            with step.backward(name) as (params, grads):
                after = inputs[at + 1] if at + 1 < len(inputs) else y
                gradient = gradient * (1 - after * after)
                grads["w"] = inputs[at].T @ gradient
                gradient = gradient @ params["w"].T


def _digest(engine: fc.FSDP) -> str:
    """Of all parameters and of the optimizer's state."""
    found = hashlib.sha256()
    for name, array in sorted(dict(engine.state_dict(full=True)).items()):
        found.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


class Diary:
    """What happens to this process, in a file that only it writes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / f"{os.getpid()}.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    def tell(self, what: str, **details: Any) -> None:
        """Write a line."""
        line = {"what": what, "at": time.monotonic(), "pid": os.getpid(), **details}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--strategy", default="full_shard")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--saves", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0)
    given = parser.parse_args()
    training = Training(
        given.steps, given.strategy, given.every, given.saves, given.pause, str(given.folder)
    )
    diary = Diary(given.folder / "diaries")

    @fc.elastic.run(every=training.every, checkpoints=training.checkpoints)
    def train(job: fc.elastic.Job) -> dict[str, Any]:
        here = {
            "host": int(os.environ.get("LAB_HOST", "0")),
            "rank": job.backend.rank,
            "world_size": job.backend.world_size,
            "generation": job.generation,
        }
        try:
            return training.run(job, lambda what, **more: diary.tell(what, **here, **more))
        except BaseException as error:
            diary.tell("unwound", **here, commits=job.commits, why=type(error).__name__)
            raise

    diary.tell("end", **train())


if __name__ == "__main__":
    main()
