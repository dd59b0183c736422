"""Our contestants of a training step on a GPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from fsdp_bench.cases import Array
from fsdp_bench.job import Job
from fsdp_bench.training import SEED
from gpt_model import build, cross_entropy

import fsdpcore as fc
from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.fsdp.step.norm import local_part
from gpu_bench.cases import PRECISIONS, Step


def _optimizer(case: Step) -> fc.optim.AdamW:
    return fc.optim.AdamW(lr=case.lr, betas=case.betas, weight_decay=case.weight_decay)


class OurStep(Job):
    """Through our engine.

    Args:
        case: the model.
        backend: this rank's.
        prefetch: units that are gathered ahead.
        offload: keep in the host's memory what nobody uses.
    """

    def __init__(
        self, case: Step, backend: fc.Backend, *, prefetch: int, offload: bool = False
    ) -> None:
        self._case, self._backend = case, backend
        self._xp = backend.device.xp
        self._stack = fc.LayerStack(build(case.model, self._xp))
        self._engine = fc.FSDP(
            self._stack.units(np.random.default_rng(SEED)),
            backend,
            optimizer=_optimizer(case),
            precision=PRECISIONS[case.precision],
            prefetch=prefetch,
            window=not offload,
            offload=fc.Offload() if offload else None,
        )
        rows = case.rows(backend.rank, backend.world_size)
        self._x, self._y = (self._xp.asarray(part) for part in rows)

    def barrier(self) -> None:
        """Block until all ranks are here, and their GPUs have done what they were given."""
        self._backend.device.synchronize()
        self._backend.barrier()

    def step(self) -> None:
        """Forward, loss, backward, clipping, AdamW."""
        self._train()

    def losses(self, count: int) -> list[float]:
        """Make steps; their losses on this rank's sequences."""
        return [float(self._train()) for _ in range(count)]

    def _train(self) -> Any:
        with self._engine.step() as step:
            logits, saved = self._stack.forward(step, self._x)
            loss, dlogits = cross_entropy(logits, self._y, self._xp)
            self._stack.backward(step, saved, dlogits)
            step.update(clip=self._case.clip)
        return loss


class PlainStep(Job):
    """The same layers, norm and optimizer on plain arrays, without engine and other ranks.

    The optimizer and the norm get this rank's share of each unit, as in our engine.
    """

    def __init__(self, case: Step, backend: fc.Backend) -> None:
        self._case, self._backend = case, backend
        self._xp = backend.device.xp
        self._layers = build(case.model, self._xp)
        self._optimizer = _optimizer(case)
        rng = np.random.default_rng(SEED)
        self._units = [
            _Plain(layer.init(rng), case, backend, self._optimizer) for _, layer in self._layers
        ]
        rows = case.rows(backend.rank, backend.world_size)
        self._x, self._y = (self._xp.asarray(part) for part in rows)
        self._steps = 0

    def barrier(self) -> None:
        """As in ``OurStep``."""
        self._backend.device.synchronize()
        self._backend.barrier()

    def step(self) -> None:
        """Forward, loss, backward, clipping, AdamW."""
        self._train()

    def losses(self, count: int) -> list[float]:
        """Make steps; their losses. Gradients are this rank's own, so only the first is ours."""
        return [float(self._train()) for _ in range(count)]

    def _train(self) -> Any:
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


class _Plain:
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
        case: Step,
        backend: fc.Backend,
        optimizer: fc.optim.Optimizer,
    ) -> None:
        xp = backend.device.xp
        shapes = {name: value.shape for name, value in initial.items()}
        dtype = PRECISIONS[case.precision].param_dtype or np.dtype(np.float32)
        layout = FlatLayout.build(shapes, np.dtype(np.float32), backend.world_size)
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
        start = backend.rank * layout.shard_size
        share = slice(start, start + layout.valid_size(backend.rank))
        self.my_grads = self.flat_grads[share]
        same = dtype == np.float32
        self.master = values[share] if same else xp.asarray(flat[share])
        self.rounded = None if same else values[share]
        names = optimizer.state_names
        self.state = {name: xp.zeros(self.master.size, np.float32) for name in names}
