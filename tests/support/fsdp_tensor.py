"""Engines whose parameters are cut over ``tensor`` ranks, and the same training in plain NumPy.

Gradients are drawn, not computed: whole ones for each rank that shards, of which a tensor rank
writes its box, as layers would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import fsdpcore as fc
from fsdpcore.core.geometry.boxes import BoxShard

Array = NDArray[Any]

# Shapes of whole parameters by unit and name, and along which axis they are cut.
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "a": {"w": (6, 7), "b": (7,), "gain": (5,)},
    "b": {"e": (5, 3), "q": (2, 3, 5, 3), "z": (4,), "s": ()},
    "c": {"plain": (3, 4)},
}
AXES = {"a.w": 1, "a.b": 0, "b.e": 0, "b.q": 2}


@dataclass(frozen=True)
class Grid:
    """A mesh, and how an engine is made on it."""

    tensor: int
    shard: int = 1
    replicate: int = 1
    strategy: str = "full_shard"

    @property
    def ranks(self) -> int:
        return self.tensor * self.shard * self.replicate

    @property
    def data(self) -> int:
        """Ranks that have batches of their own."""
        return self.shard * self.replicate


class Model:
    """Whole parameters by ``unit.param``, and where they are cut.

    Args:
        shapes, axes: as ``SHAPES`` and ``AXES``.
        dtype: of all of them.
        seed: of values and gradients.
        bounds: where a name is cut for so many tensor ranks; by default as evenly as possible.
    """

    def __init__(
        self,
        shapes: Mapping[str, Mapping[str, tuple[int, ...]]] = SHAPES,
        axes: Mapping[str, int] = AXES,
        dtype: Any = np.float64,
        seed: int = 0,
        bounds: Callable[[str, int, int], list[int]] | None = None,
    ) -> None:
        self.shapes, self.axes, self.dtype, self.seed = shapes, axes, dtype, seed
        self._bounds = bounds
        self.names = [f"{unit}.{name}" for unit, named in shapes.items() for name in named]
        self.params = self._drawn(0)

    def _drawn(self, *key: int) -> dict[str, Array]:
        rng = np.random.default_rng((self.seed, *key))
        return {
            f"{unit}.{name}": rng.normal(size=shape).astype(self.dtype)
            for unit, named in self.shapes.items()
            for name, shape in named.items()
        }

    def gradients(self, step: int, data_rank: int) -> dict[str, Array]:
        """Whole gradients of one rank's batch."""
        return self._drawn(1, step, data_rank)

    def mean_gradients(self, step: int, data: int) -> dict[str, Array]:
        found = [self.gradients(step, rank) for rank in range(data)]
        return {name: np.mean([each[name] for each in found], axis=0) for name in self.names}

    def slices(self, name: str, tensor: int, rank: int) -> tuple[slice, ...]:
        """Which box a tensor rank has."""
        shape = self.params[name].shape
        found = [slice(0, extent) for extent in shape]
        if name in self.axes:
            axis = self.axes[name]
            if self._bounds is None:
                sizes = [len(part) for part in np.array_split(np.arange(shape[axis]), tensor)]
                cuts = [0, *np.cumsum(sizes).tolist()]
            else:
                cuts = self._bounds(name, shape[axis], tensor)
            found[axis] = slice(cuts[rank], cuts[rank + 1])
        return tuple(found)

    def boxed(self, name: str, value: Array, tensor: int, rank: int) -> Array | BoxShard:
        """What a tensor rank has of a parameter."""
        if name not in self.axes:
            return value
        slices = self.slices(name, tensor, rank)
        return BoxShard(value.shape, tuple(each.start for each in slices), value[slices])

    def units(self, tensor: int = 1, rank: int = 0, **options: Any) -> list[fc.Unit]:
        """The units of a tensor rank."""
        return [
            fc.Unit(
                unit,
                {
                    name: self.boxed(f"{unit}.{name}", self.params[f"{unit}.{name}"], tensor, rank)
                    for name in named
                },
                **options,
            )
            for unit, named in self.shapes.items()
        ]


def engine_on(grid: Grid, backend: fc.Backend, model: Model, **options: Any) -> fc.FSDP:
    """An engine of this rank of the grid."""
    axes = {"replicate": grid.replicate, "shard": grid.shard, "tensor": grid.tensor}
    mesh = fc.Mesh(backend, axes)
    tensor = mesh["tensor"]
    size = grid.shard if grid.strategy == "hybrid_shard" else None
    strategy = fc.Strategy(grid.strategy, shard_group_size=size)
    options.setdefault("optimizer", fc.optim.AdamW(lr=0.05))
    return fc.FSDP(
        options.pop("units", None) or model.units(grid.tensor, tensor.rank),
        mesh["replicate", "shard"],
        strategy=strategy,
        tensor=tensor,
        **options,
    )


def gradients_into(grads: Any, unit: str, whole: Mapping[str, Array], engine: fc.FSDP) -> None:
    """Write what this rank has of whole gradients."""
    boxes = engine[unit].boxes
    for name in grads:
        value = whole[f"{unit}.{name}"]
        grads[name] = value[boxes[name].slices] if name in boxes else value


def step_on(engine: fc.FSDP, whole: Mapping[str, Array], **update: Any) -> tuple[Any, Any]:
    """Take a step with these gradients; returns it, and the norm."""
    with engine.step() as step:
        for unit in engine.units:
            with step.forward(unit):
                pass
        for unit in reversed(engine.units):
            with step.backward(unit) as (_, grads):
                gradients_into(grads, unit.name, whole, engine)
        norm = step.update(**update)
    return step, norm


def train(engine: fc.FSDP, model: Model, steps: range, **update: Any) -> list[float | None]:
    """Take steps; returns the norms."""
    rank = engine.backend.rank
    return [step_on(engine, model.gradients(step, rank), **update)[1] for step in steps]


# In plain NumPy.


def norm_of(grads: Mapping[str, Array], p: float = 2.0) -> float:
    """The global norm, in float64."""
    every = np.concatenate(
        [np.abs(array.astype(np.float64)).reshape(-1) for array in grads.values()]
    )
    return float(every.max()) if math.isinf(p) else float((every**p).sum() ** (1 / p))


class PlainAdamW:
    """Whole parameters and AdamW, from the formulas of its paper."""

    def __init__(self, params: Mapping[str, Array], lr: float = 0.05) -> None:
        self.params = {name: array.astype(np.float64) for name, array in params.items()}
        self.first = {name: np.zeros(array.shape) for name, array in params.items()}
        self.second = {name: np.zeros(array.shape) for name, array in params.items()}
        self.steps, self.lr = 0, lr

    def step(self, grads: Mapping[str, Array], clip: float | None = None) -> float:
        norm = norm_of(grads)
        factor = 1.0 if clip is None or norm <= clip else clip / norm
        self.steps += 1
        for name, p in self.params.items():
            g = grads[name] * factor
            m = self.first[name] = 0.9 * self.first[name] + 0.1 * g
            v = self.second[name] = 0.999 * self.second[name] + 0.001 * g * g
            root = np.sqrt(v / (1 - 0.999**self.steps)) + 1e-8
            change = self.lr * (m / (1 - 0.9**self.steps)) / root
            self.params[name] = p - self.lr * 0.01 * p - change
        return norm

    def state(self) -> dict[str, Array]:
        """Under the names that an engine gives them."""
        found = dict(self.params)
        found |= {f"optimizer/exp_avg/{name}": array for name, array in self.first.items()}
        return found | {f"optimizer/exp_avg_sq/{name}": a for name, a in self.second.items()}


def assert_state(found: Mapping[str, Any], expected: Mapping[str, Array], tolerance: float) -> None:
    assert set(found) == set(expected)
    for name, array in found.items():
        assert array.shape == expected[name].shape, name
        np.testing.assert_allclose(array, expected[name], tolerance, tolerance, err_msg=name)


# Errors.


def errors(body: Callable[[fc.Backend], Any], ranks: int) -> list[tuple[type, str]]:
    """What each rank raises; ranks wait for each other before they leave by it."""

    def caught(backend: fc.Backend) -> tuple[type, str]:
        with pytest.raises(fc.FsdpcoreError) as raised:
            body(backend)
        backend.barrier()
        return type(raised.value), str(raised.value)

    return fc.launch(caught, world_size=ranks, transport="sim", timeout=30)


def raised_alike(body: Callable[[fc.Backend], Any], ranks: int) -> tuple[type, str]:
    """What all ranks raise."""
    found = errors(body, ranks)
    assert len(set(found)) == 1, found
    return found[0]
