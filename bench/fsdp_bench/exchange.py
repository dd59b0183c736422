"""The exchange of one step, through our engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import fsdpcore as fc
from fsdp_bench.cases import Array, Exchange
from fsdp_bench.job import EngineJob


@dataclass(frozen=True)
class Pattern(fc.initializers.Initializer):
    """The known values of a unit's parameter."""

    case: Exchange
    unit: int

    def fill(self, out: Array, start: int, *, seed: int, name: str) -> None:
        """Write them; see ``Initializer.fill``."""
        out[...] = self.case.weights(self.unit, start, start + out.size)


@dataclass(frozen=True)
class Still(fc.optim.Optimizer):
    """Changes nothing: the engine's update, with all its waiting, without the arithmetic."""

    lr: float = 0.0

    @property
    def state_names(self) -> tuple[str, ...]:
        """None."""
        return ()

    def update(self, *arguments: Any, **keywords: Any) -> None:
        """Do nothing."""

    def update_block(self, *arrays: Any, step: int, lr: float) -> None:
        """Never called."""


class OurExchange(EngineJob):
    """A training step of the engine in which nobody computes."""

    def __init__(self, case: Exchange, backend: fc.Backend) -> None:
        self._case = case
        shape = (case.rows, case.columns)
        engine = fc.FSDP(
            [
                fc.Unit(f"unit{i}", {"weight": fc.Spec(shape, init=Pattern(case, i))})
                for i in range(case.units)
            ],
            backend,
            optimizer=Still(),
            prefetch=case.prefetch,
        )
        super().__init__(backend, engine)

    def step(self) -> None:
        """Gather and free each unit; gather it again, free it, and reduce its gradients."""
        units = self._engine.units
        with self._engine.step() as step:
            for unit in units:
                with step.forward(unit):
                    pass
            for unit in reversed(units):
                with step.backward(unit) as (_, grads):
                    grads.empty("weight")  # computes nothing, as the peer: what is there counts
            step.update()

    def check(self) -> int:
        """Make the same step with gradients of known values, and look at everything."""
        case, size = self._case, self._case.rows * self._case.columns
        rank, ranks, wrong = self._backend.rank, self._backend.world_size, 0
        units = self._engine.units
        with self._engine.step() as step:
            for number, unit in enumerate(units):
                with step.forward(unit) as params:
                    wrong += _differing(params["weight"], case.weights(number, 0, size))
            for number, unit in reversed(list(enumerate(units))):
                with step.backward(unit) as (params, grads):
                    wrong += _differing(params["weight"], case.weights(number, 0, size))
                    values = case.gradients(number, rank, 0, size)
                    grads["weight"] = values.reshape(case.rows, case.columns)
            for number, unit in enumerate(units):
                shard = unit.grad_shard
                for piece in unit.layout.pieces(rank):
                    right = case.mean_gradients(number, ranks, piece.param_start, piece.param_stop)
                    found = None if shard is None else shard[piece.shard_start : piece.shard_stop]
                    wrong += right.size if found is None else _differing(found, right)
            step.update()
        return wrong


def _differing(found: Array, right: Array) -> int:
    return int(np.count_nonzero(found.reshape(-1) != right))
