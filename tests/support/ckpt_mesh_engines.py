"""A small language model on meshes of tensor and data ranks: it trains, is saved and loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

import fsdpcore as fc
from fsdpcore import parallel

VOCAB, WIDTH, HIDDEN, LENGTH, BATCH = 11, 6, 7, 3, 12  # BATCH divides by all numbers of ranks
STEPS, MORE = 3, 3
FULL = fc.Strategy("full_shard")
HYBRID = fc.Strategy("hybrid_shard", shard_group_size=2)


@dataclass(frozen=True)
class Way:
    """How engines are made: ``data`` x ``tensor`` ranks; without a mesh if ``tensor`` is 0."""

    data: int
    tensor: int
    strategy: fc.Strategy = FULL
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.data * max(self.tensor, 1)

    def __str__(self) -> str:
        mesh = f"{self.data}x{self.tensor}" if self.tensor else f"{self.data}"
        return f"{mesh}-{self.strategy.name}"


class Training:
    """An engine on a mesh, and steps that do not depend on how the model is spread."""

    def __init__(self, backend: fc.Backend, way: Way, dtype: Any, seed: int = 1) -> None:
        if way.tensor:
            mesh = fc.Mesh(backend, {"data": way.data, "tensor": way.tensor})
            data, tensor = mesh["data"], mesh["tensor"]
            extra: dict[str, Any] = {"tensor": tensor}
        else:
            data, tensor, extra = backend, backend.sub([backend.rank]), {}
        self.tensor = tensor
        self.stack = fc.LayerStack(_layers(tensor, dtype))
        self.engine = fc.FSDP(
            self.stack.units(np.random.default_rng(seed)),
            data,
            strategy=way.strategy,
            optimizer=fc.optim.AdamW(lr=0.01, weight_decay=0.1),
            **extra,
            **way.options,
        )

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            data = self.engine.backend
            text = np.random.default_rng(100 + self.engine.steps).integers(
                VOCAB, size=(2, BATCH, LENGTH)
            )
            x, y = np.split(text, data.world_size, axis=1)[data.rank]
            with self.engine.step() as step:
                out, saved = self.stack.forward(step, x)
                loss, d = parallel.cross_entropy(out, y, self.tensor, vocab=VOCAB)
                self.stack.backward(step, saved, d)
                step.update(clip=0.5)
            losses.append(float(fc.all_reduce(np.array(loss), data)) / data.world_size)
        return losses


def _layers(group: fc.Backend, dtype: Any) -> list[tuple[str, Any]]:
    def block() -> fc.Chain:
        return fc.Chain(
            [
                ("norm", parallel.LayerNorm(WIDTH, group, dtype=dtype)),
                ("up", parallel.ColumnParallelLinear(WIDTH, HIDDEN, group, dtype=dtype)),
                ("down", parallel.RowParallelLinear(HIDDEN, WIDTH, group, dtype=dtype)),
            ]
        )

    head = ("out", parallel.ColumnParallelLinear(WIDTH, VOCAB, group, dtype=dtype))
    return [
        ("embed", parallel.VocabParallelEmbedding(VOCAB, WIDTH, group, dtype=dtype)),
        ("block0", block()),
        ("block1", block()),
        ("head", fc.Chain([("norm", parallel.RMSNorm(WIDTH, group, dtype=dtype)), head])),
    ]


def everything(engine: fc.FSDP) -> dict[str, Any]:
    """All that an engine holds, as whole arrays; a collective without checkpoints in it."""
    return dict(engine.state_dict(full=True).arrays)


def uninterrupted(backend: fc.Backend, way: Way, dtype: Any) -> tuple[list[float], dict[str, Any]]:
    training = Training(backend, way, dtype)
    return training.train(STEPS + MORE), everything(training.engine)


def save(backend: fc.Backend, way: Way, dtype: Any, path: Any) -> dict[str, Any]:
    training = Training(backend, way, dtype)
    training.train(STEPS)
    fc.checkpoint.save(path, training.engine, backend)
    return everything(training.engine)


def save_in_background(backend: fc.Backend, way: Way, dtype: Any, path: Any) -> dict[str, Any]:
    training = Training(backend, way, dtype)
    training.train(STEPS)
    then = everything(training.engine)
    with fc.checkpoint.AsyncCheckpointer(path, backend) as checkpointer:
        future = checkpointer.save(training.engine)
        training.train(1)
        assert future.wait().step == STEPS
    return then


def go_on(
    backend: fc.Backend, way: Way, dtype: Any, path: Any
) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    """Load into another model; return what was loaded, losses from there on, and the end."""
    training = Training(backend, way, dtype, seed=2)
    training.train(1)  # so that there is something to overwrite
    loaded = fc.checkpoint.load(path, training.engine, backend)
    assert (loaded.missing, loaded.unexpected, loaded.uncovered) == ((), (), ())
    assert (training.engine.steps, training.engine.partially_updated) == (STEPS, False)
    found = everything(training.engine)
    return found, training.train(MORE), everything(training.engine)
