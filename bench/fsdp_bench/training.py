"""A whole training step, through our engine; and the same without it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gpt_model import Layer, build, cross_entropy, keep_freed_memory

import fsdpcore as fc
from fsdp_bench.cases import Array, Training
from fsdp_bench.job import Job
from fsdpcore.core.geometry.layout import FlatLayout

SEED = 1


class Stopwatch:
    """Adds up the time that is spent inside its ``with`` blocks.

    Attributes:
        seconds: so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self._started


class _WatchedLayer:
    def __init__(self, layer: Layer, watch: Stopwatch) -> None:
        self._layer = layer
        self._watch = watch
        self.init = layer.init

    def forward(self, params: Mapping[str, Array], x: Array) -> tuple[Array, Any]:
        with self._watch:
            return self._layer.forward(params, x)

    def backward(
        self,
        params: Mapping[str, Array],
        saved: Any,
        dy: Array,
        grads: MutableMapping[str, Array],
    ) -> Array:
        with self._watch:
            return self._layer.backward(params, saved, dy, grads)


@dataclass(frozen=True)
class _WatchedAdamW(fc.optim.AdamW):
    watch: Stopwatch = field(default_factory=Stopwatch, repr=False)

    def update(
        self,
        param: Array,
        grad: Array,
        state: Mapping[str, Array],
        *,
        step: int,
        lr: float | None = None,
        grad_scale: float = 1.0,
        out: Array | None = None,
    ) -> None:
        with self.watch:
            super().update(param, grad, state, step=step, lr=lr, grad_scale=grad_scale, out=out)


class OurTraining(Job):
    """What ``examples/train_gpt.py`` does in a step."""

    def __init__(self, case: Training, backend: fc.Backend) -> None:
        keep_freed_memory()  # as the example does
        self._case = case
        self._backend = backend
        self._watch = Stopwatch()
        self._stack = fc.LayerStack(
            [(name, _WatchedLayer(layer, self._watch)) for name, layer in build(case.model)]
        )
        self._engine = fc.FSDP(
            self._stack.units(np.random.default_rng(SEED)),
            backend,
            optimizer=_WatchedAdamW(**_hyperparameters(case), watch=self._watch),
            prefetch=case.prefetch,
        )
        self._x, self._y = case.rows(backend.rank, backend.world_size)

    def barrier(self) -> None:
        """Block until all ranks are here."""
        self._backend.barrier()

    def step(self) -> None:
        """Forward, loss, backward, clipping, AdamW."""
        self._train()

    def losses(self, count: int) -> list[float]:
        """Make steps; their losses on this rank's sequences."""
        return [self._train() for _ in range(count)]

    def split(self, count: int) -> list[float]:
        """Make steps; their seconds, and those inside layers, loss and AdamW."""
        self.barrier()
        whole, before = Stopwatch(), self._watch.seconds
        with whole:
            for _ in range(count):
                self._train()
        return [whole.seconds, self._watch.seconds - before]

    def _train(self) -> float:
        with self._engine.step() as step:
            logits, saved = self._stack.forward(step, self._x)
            with self._watch:
                loss, dlogits = cross_entropy(logits, self._y)
            self._stack.backward(step, saved, dlogits)
            step.update(clip=self._case.clip)
        return float(loss)


class Alone(Job):
    """What a rank computes in such a step, on plain arrays: nobody sends or waits for anything.

    The layers, the loss, the squares of the norm and AdamW are the same functions on arrays of the
    same sizes: the optimizer and the norm on this rank's share of each unit, the rest whole.
    """

    def __init__(self, case: Training, rank: int, ranks: int) -> None:
        keep_freed_memory()
        self._case = case
        self._layers = build(case.model)
        self._optimizer = fc.optim.AdamW(**_hyperparameters(case))
        self._steps = 0
        rng = np.random.default_rng(SEED)
        self._units = [
            _PlainUnit(layer.init(rng), rank, ranks, self._optimizer) for _, layer in self._layers
        ]
        self._x, self._y = case.rows(rank, ranks)

    def barrier(self) -> None:
        """Nobody is waited for; all ranks get their orders at the same time."""

    def step(self) -> None:
        """Forward, loss, backward, clipping, AdamW."""
        self._train()

    def losses(self, count: int) -> list[float]:
        """Make steps; their losses. Gradients are this rank's own, so only the first is ours."""
        return [self._train() for _ in range(count)]

    def _train(self) -> float:
        x, saved = self._x, []
        for (_, layer), unit in zip(self._layers, self._units, strict=True):
            x, kept = layer.forward(unit.params, x)
            saved.append(kept)
        loss, dy = cross_entropy(x, self._y)
        for (_, layer), unit in zip(reversed(self._layers), reversed(self._units), strict=True):
            unit.flat_grads[:] = 0  # which the contract of a layer asks for
            dy = layer.backward(unit.params, saved.pop(), dy, unit.grads)
        norm = math.sqrt(sum(_squares(unit.my_grads) for unit in self._units))
        scale = self._case.clip / norm if norm > self._case.clip else 1.0
        self._steps += 1
        for unit in self._units:
            self._optimizer.update(
                unit.mine, unit.my_grads, unit.state, step=self._steps, grad_scale=scale
            )
        return float(loss)


class _PlainUnit:
    """Parameters and gradients of a layer, flat and as views by name; the share of one rank."""

    def __init__(
        self, initial: dict[str, Array], rank: int, ranks: int, optimizer: fc.optim.Optimizer
    ) -> None:
        shapes = {name: value.shape for name, value in initial.items()}
        layout = FlatLayout.build(shapes, np.dtype(np.float32), ranks)
        flat = np.zeros(layout.padded_size, np.float32)
        self.flat_grads = np.zeros(layout.padded_size, np.float32)
        self.params: dict[str, Array] = {}
        self.grads: dict[str, Array] = {}
        for param in layout.params:
            part = slice(param.offset, param.stop)
            self.params[param.name] = flat[part].reshape(param.shape)
            self.params[param.name][...] = initial[param.name]
            self.grads[param.name] = self.flat_grads[part].reshape(param.shape)
        start = rank * layout.shard_size
        share = slice(start, start + layout.valid_size(rank))
        self.mine, self.my_grads = flat[share], self.flat_grads[share]
        self.state = optimizer.init_state(self.mine.size, np.float32)


def _hyperparameters(case: Training) -> dict[str, Any]:
    return {"lr": case.lr, "betas": case.betas, "weight_decay": case.weight_decay}


def _squares(array: Array, block: int = 128 * 1024) -> float:
    """Their sum in float64, block by block as the engine adds them up."""
    total = 0.0
    for start in range(0, array.size, block):
        part = array[start : start + block].astype(np.float64)
        total += float(np.dot(part, part))
    return total
