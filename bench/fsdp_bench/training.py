"""A whole training step, through our engine; and the same without it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gpt_model import Layer, build, cross_entropy

import fsdpcore as fc
from fsdp_bench.cases import Array, Training
from fsdp_bench.job import EngineJob, StepJob
from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.fsdp.step.norm import local_part

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

    def update(self, *arguments: Any, **keywords: Any) -> None:
        with self.watch:
            super().update(*arguments, **keywords)


class OurTraining(EngineJob):
    """What ``examples/train_gpt.py`` does in a step.

    Args:
        case: the model.
        backend: this rank's.
        precision: of parameters and gradients.
        offload: where to keep what nobody uses.
        watched: tell computing apart, for ``split``.
    """

    def __init__(
        self,
        case: Training,
        backend: fc.Backend,
        *,
        precision: fc.Precision | None = None,
        offload: fc.Offload | None = None,
        watched: bool = True,
    ) -> None:
        self._case = case
        self._xp = backend.device.xp
        layers: list[tuple[str, Layer]] = build(case.model, self._xp)
        optimizer = _optimizer(case)
        # Of each layer, and of the loss and AdamW.
        self._watches, self._watch = [Stopwatch() for _ in layers], Stopwatch()
        if watched:
            watches = zip(layers, self._watches, strict=True)
            layers = [(name, _WatchedLayer(layer, watch)) for (name, layer), watch in watches]
            optimizer = _WatchedAdamW(**vars(optimizer), watch=self._watch)
        self._stack = fc.LayerStack(layers)
        compression = fc.Compression.parse(case.compress) if case.compress else None
        mesh = fc.Mesh(backend, {"group": backend.world_size if case.every else 1, "shard": -1})
        engine = fc.FSDP(
            self._stack.units(np.random.default_rng(SEED)),
            mesh["shard"] if case.every else backend,
            optimizer=optimizer,
            strategy=fc.Strategy(case.strategy, shard_group_size=case.group or None),
            precision=precision,
            prefetch=case.prefetch,
            window=offload is None,
            offload=offload,
            virtual_ranks=case.virtual_ranks or None,
            compression=None if case.every else compression,
        )
        self._outer = None
        if case.every:
            self._outer = fc.OuterStep(
                engine, mesh["group"], every=case.every, compression=compression
            )
        super().__init__(backend, engine)
        shares = case.virtual_ranks or backend.world_size
        self._rows = {
            leaf: [self._xp.asarray(part) for part in case.rows(leaf, shares)]
            for leaf in engine.leaves
        }
        if case.every:
            self._rows = {0: [self._xp.asarray(part) for part in case.rows(backend.rank, shares)]}

    def step(self) -> Any:
        """Forward, loss, backward, clipping, AdamW; the loss, the mean over virtual ranks."""
        losses = []
        with self._engine.step() as step:
            for leaf in step.leaves():
                x, y = self._rows[leaf]
                logits, saved = self._stack.forward(step, x)
                with self._watch:
                    loss, dlogits = cross_entropy(logits, y, self._xp)
                self._stack.backward(step, saved, dlogits)
                losses.append(loss)
            step.update(clip=self._case.clip)
        if self._outer is not None:
            self._outer.step()
        return sum(losses) / len(losses)

    def split(self) -> list[float]:
        before = self._computed()
        seconds = self._steps(1)
        times = self._engine.report().times
        assert times is not None, "a step was made"
        return [seconds, self._computed() - before, *(row.waiting for row in times.rows)]

    def planned(self, count: int) -> list[float]:
        """Make steps; the peak in bytes and the seconds of one, each by its plan and measured.

        The plan is told how long the layers compute. It knows nothing of the loss and AdamW.
        """
        before = [watch.seconds for watch in self._watches]
        rest = self._watch.seconds
        taken = self._steps(count) / count
        layers = zip(self._watches, before, strict=True)
        # A backward pass counts for two.
        forward = [(watch.seconds - then) / count / 3 for watch, then in layers]
        plan = self._engine.plan(compute_seconds=forward)
        assert plan.step_seconds is not None, "the times of its units were given"
        planned = plan.step_seconds + (self._watch.seconds - rest) / count
        peak = self._engine.report().measured.peak_bytes
        assert peak is not None, "of the last step"
        return [plan.peak_bytes, peak, planned, taken]

    def _computed(self) -> float:
        return sum(watch.seconds for watch in (*self._watches, self._watch))

    def _steps(self, count: int) -> float:
        """Make steps, beginning with all ranks; their seconds."""
        self.barrier()
        whole = Stopwatch()
        with whole:
            for _ in range(count):
                self.step()
        return whole.seconds


class Alone(StepJob):
    """What a rank computes in such a step, on plain arrays: nobody sends or waits for anything.

    The layers, the loss, the squares of the norm and AdamW are the same functions on arrays of the
    same sizes: the optimizer and the norm on this rank's share of each unit, the rest whole.

    Args:
        case: the model.
        rank, ranks: whose share it is.
        xp: the module of the arrays.
        precision: of parameters and gradients.
    """

    def __init__(
        self,
        case: Training,
        rank: int,
        ranks: int,
        xp: Any = np,
        precision: fc.Precision | None = None,
    ) -> None:
        self._case, self._xp = case, xp
        self._layers = build(case.model, xp)
        self._optimizer = _optimizer(case)
        self._steps = 0
        rng = np.random.default_rng(SEED)
        dtype = (precision or fc.Precision()).param_dtype or np.dtype(np.float32)
        share = (0, 1) if case.every else (rank, ranks)
        self._units = [
            _PlainUnit(layer.init(rng), *share, self._optimizer, xp, dtype)
            for _, layer in self._layers
        ]
        self._x, self._y = (xp.asarray(part) for part in case.rows(rank, ranks))

    def barrier(self) -> None:
        """Nobody is waited for; all ranks get their orders at the same time."""

    def step(self) -> Any:
        """The same step; gradients are this rank's own, so only the first loss is ours."""
        x, saved = self._x, []
        for (_, layer), unit in zip(self._layers, self._units, strict=True):
            x, kept = layer.forward(unit.params, x)
            saved.append(kept)
        loss, dy = cross_entropy(x, self._y, self._xp)
        for (_, layer), unit in zip(reversed(self._layers), reversed(self._units), strict=True):
            unit.flat_grads.fill(0)  # which the contract of a layer asks for
            dy = layer.backward(unit.params, saved.pop(), dy, unit.grads)
        part = local_part([unit.my_grads for unit in self._units], 2.0)
        norm = part.largest * math.sqrt(part.total)
        self._steps += 1
        for unit in self._units:
            self._optimizer.update(
                unit.master,
                unit.my_grads,
                unit.state,
                step=self._steps,
                grad_scale=min(1.0, self._case.clip / norm),
                out=unit.rounded,
            )
        return loss


class _PlainUnit:
    """Parameters and gradients of a layer, flat and as views by name; the share of one rank.

    Attributes:
        params, grads: by name.
        flat_grads: all of them.
        my_grads, master, state: this rank's share.
        rounded: the share of the parameters that are computed with, where that is not ``master``.
    """

    def __init__(
        self,
        initial: dict[str, Array],
        rank: int,
        ranks: int,
        optimizer: fc.optim.Optimizer,
        xp: Any,
        dtype: Any,
    ) -> None:
        shapes = {name: value.shape for name, value in initial.items()}
        layout = FlatLayout.build(shapes, np.dtype(np.float32), ranks)
        flat = np.zeros(layout.padded_size, np.float32)
        for param in layout.params:
            flat[param.offset : param.stop] = initial[param.name].reshape(-1)
        values = xp.asarray(flat).astype(dtype)
        self.flat_grads = xp.zeros(layout.padded_size, dtype)
        self.params: dict[str, Array] = {}
        self.grads: dict[str, Array] = {}
        for param in layout.params:
            part = slice(param.offset, param.stop)
            self.params[param.name] = values[part].reshape(param.shape)
            self.grads[param.name] = self.flat_grads[part].reshape(param.shape)
        start = rank * layout.shard_size
        share = slice(start, start + layout.valid_size(rank))
        self.my_grads = self.flat_grads[share]
        same = dtype == np.float32
        self.master = values[share] if same else xp.asarray(flat[share])
        self.rounded = None if same else values[share]
        names = optimizer.state_names
        self.state = {name: xp.zeros(self.master.size, np.float32) for name in names}


def _optimizer(case: Training) -> fc.optim.AdamW:
    return fc.optim.AdamW(lr=case.lr, betas=case.betas, weight_decay=case.weight_decay)
