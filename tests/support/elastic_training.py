"""A small training whose bits no number of ranks changes, for elastic jobs."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

import fsdpcore as fc

LEAVES = 8
ROWS = 40


class Training:
    """What all ranks do.

    Args:
        steps: of the training.
        strategy: of the engine.

    Attributes:
        used: of each step, by which row indices it was made; a step that is made again has to
            use the same.
        calls: the generations in which the program was called, one for each call.
        restored: of each generation, how many commits it began with.
        reached: of each generation, the last step that it began.
        checkpoint: where rank 0 and all others save after each step; empty for nowhere.
    """

    def __init__(self, steps: int = 6, strategy: str = "full_shard") -> None:
        self.steps, self.strategy = steps, strategy
        self.used: dict[int, set[tuple[int, ...]]] = {}
        self.calls: list[int] = []
        self.restored: dict[int, int] = {}
        self.reached: dict[int, int] = {}
        self.hook: Any = None
        self.checkpoint = ""
        self._lock = threading.Lock()
        rng = np.random.default_rng(3)
        self.rows = rng.standard_normal((ROWS, 37)).astype(np.float32)

    def __call__(self, job: fc.elastic.Job) -> Any:
        with self._lock:
            self.calls.append(job.generation)
        rng = np.random.default_rng(11)
        units = [
            fc.Unit(f"u{n}", {"w": rng.standard_normal((13, 37)).astype(np.float32)})
            for n in range(2)
        ]
        engine = fc.FSDP(
            units,
            job.backend,
            strategy=self.strategy,
            optimizer=fc.optim.AdamW(lr=0.05),
            virtual_ranks=LEAVES,
        )
        stream = fc.data.Stream(self.rows, 16, leaves=LEAVES, seed=5)
        noise = np.random.default_rng(17)
        mean = np.zeros(7)
        state = {"model": engine, "data": stream, "rng": noise, "mean": mean, "seen": 0}
        state = job.restore(state)
        self.restored[job.generation] = job.commits
        for number in range(job.commits, self.steps):
            batch = next(stream)
            self._note(number, batch)
            self.reached[job.generation] = number
            scale = noise.standard_normal()
            with engine.step(divisor=batch.size) as step:
                for leaf in step.leaves():
                    x = batch[leaf].sum(axis=0) if len(batch.indices(leaf)) else np.zeros(37)
                    grads = []
                    for unit in engine.units:
                        with step.forward(unit) as params:
                            value = np.tanh(params["w"] * scale)
                        grads.append((value * x).astype(np.float32))
                    for unit, grad in reversed(list(zip(engine.units, grads, strict=True))):
                        with step.backward(unit) as backward:
                            backward.grads["w"] = grad
                step.update(clip=1.0)
            mean += scale
            state["seen"] += batch.size
            if self.hook is not None:
                self.hook(job, number)
            job.commit()
            if self.checkpoint:
                fc.checkpoint.save(self.checkpoint, job.state, job.backend, step=job.commits)
        with engine.full_params() as params:
            whole = {name: np.array(values) for name, values in params.items()}
        return whole, mean, state["seen"], noise.standard_normal(), stream.state_dict()

    def _note(self, number: int, batch: Any) -> None:
        rows = tuple(np.concatenate([batch.indices(leaf) for leaf in range(LEAVES)]).tolist())
        with self._lock:
            self.used.setdefault(number, set()).add(rows)


def same(found: Any, wanted: Any) -> None:
    """Compare what the training returns, bit for bit."""
    params, *rest = found
    for name, values in wanted[0].items():
        assert values.tobytes() == params[name].tobytes(), name
    assert rest[0].tobytes() == wanted[1].tobytes()
    assert rest[1:] == list(wanted[2:])
