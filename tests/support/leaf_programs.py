"""Training by virtual ranks whose gradients are known, and the same without a library."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import fsdpcore as fc

Arrays = dict[str, Any]

KINDS: dict[str, tuple[Any, Any]] = {
    "fp32": (np.float32, np.float32),
    "fp64": (np.float64, np.float64),
    "bf16": (ml_dtypes.bfloat16, np.float32),
    "fp16": (np.float16, np.float32),
}
"""Dtypes of gradients that passes write, and of their sum."""

SCALE = 1024.0
"""Of the loss in float16, to begin with."""


@dataclass(frozen=True)
class LeafProgram:
    """What all ranks do, whatever their number.

    Attributes:
        leaves: how many virtual ranks there are.
        sizes: of the parameter of each unit, or their shapes.
        passes: of each leaf in each step, how many microbatches it has.
        absent: ``(leaf, unit)`` whose gradients are never written.
        whole: steps take all units at once.
        tied: the last unit uses the parameter of the first one, too.
        kind: what is computed in; of 16 bits, beside parameters in float32.
        clip: of the update.
        optimizer: of the parameters.
        overflows: the step in which a leaf has a gradient that is inf.
    """

    leaves: int
    sizes: tuple[int | tuple[int, ...], ...]
    passes: int
    absent: frozenset[tuple[int, int]]
    whole: bool
    tied: bool
    kind: str
    clip: float | None
    optimizer: Any
    steps: int = 2
    divisor: float | None = None
    overflows: int | None = None

    @property
    def names(self) -> list[str]:
        """Of the units."""
        return [f"u{number}" for number in range(len(self.sizes))]

    def initial(self) -> Arrays:
        """The parameters to begin with."""
        rng = np.random.default_rng(7)
        return {
            name: rng.standard_normal(size).astype(KINDS[self.kind][1])
            for name, size in zip(self.names, self.sizes, strict=True)
        }

    def gradient(
        self,
        step: int,
        leaf: int,
        number: int,
        unit: str,
        *,
        tie: bool = False,
        scale: float = SCALE,
    ) -> Any:
        """Of a pass; values of very different sizes, so that the order of a sum tells."""
        seed = [step, leaf, number, int(unit[1:]), int(tie)]
        rng = np.random.default_rng(seed)
        size = self.sizes[0 if tie else int(unit[1:])]
        values = rng.standard_normal(size) * 10.0 ** rng.uniform(-4, 4, size)
        if self.kind == "fp16":
            values *= scale * 1e-4
        if step == self.overflows and leaf == 1:
            values[0] = np.inf
        return values.astype(KINDS[self.kind][0])

    def written(self, leaf: int, unit: str) -> bool:
        """Whether a leaf has gradients of a unit."""
        return (leaf, int(unit[1:])) not in self.absent

    def train(self, backend: fc.Backend, **options: Any) -> Arrays:
        """Train on the ranks of a job; return the whole state, with norms."""
        units = []
        for name, values in self.initial().items():
            params: Arrays = {"w": values}
            if self.tied and name == self.names[-1] and len(self.names) > 1:
                params["t"] = fc.Tied("u0", "w")
            units.append(fc.Unit(name, params))
        dtype, master = KINDS[self.kind]
        scaling = fc.LossScale(SCALE, interval=1) if self.kind == "fp16" else None
        precision = fc.Precision(dtype, master, scaling)
        engine = fc.FSDP(
            units,
            backend,
            virtual_ranks=self.leaves,
            optimizer=self.optimizer,
            precision=precision,
            **options,
        )
        norms = []
        for number in range(self.steps):
            with engine.step(divisor=self.divisor) as step:
                scale = engine.loss_scale
                for leaf in step.leaves():
                    self._leaf(step, number, leaf, scale)
                norms.append(step.update(clip=self.clip))
        state: Arrays = dict(engine.state_dict(full=True))
        return {**state, "norms": np.array([norm or 0.0 for norm in norms])}

    def _leaf(self, step: fc.Step, number: int, leaf: int, scale: float) -> None:
        for at in range(self.passes):
            last = at == self.passes - 1
            with contextlib.nullcontext() if last else step.no_sync():
                if self.whole:
                    with step.whole() as (_, grads):
                        for name in self.names:
                            self._write(grads[name], number, leaf, at, name, scale)
                    continue
                for name in self.names:
                    with step.forward(name):
                        pass
                for name in reversed(self.names):
                    with step.backward(name) as (_, into):
                        self._write(into, number, leaf, at, name, scale)

    def _write(self, into: Any, number: int, leaf: int, at: int, unit: str, scale: float) -> None:
        if self.written(leaf, unit):
            into["w"] = self.gradient(number, leaf, at, unit, scale=scale)
            if "t" in into:
                into["t"] = self.gradient(number, leaf, at, unit, tie=True, scale=scale)

    # Without a library.

    def sums(self) -> Arrays:
        """The gradients of the first step, scaled: of each leaf all passes, then along the tree."""
        return {
            unit: self._tree([self._of_leaf(leaf, unit) for leaf in range(self.leaves)])
            for unit in self.names
        }

    def _of_leaf(self, leaf: int, unit: str) -> Any:
        total = np.zeros(self.sizes[int(unit[1:])], np.float32)
        ties = np.zeros_like(total)
        for at in range(self.passes):
            if self.written(leaf, unit):
                total = total + self.gradient(0, leaf, at, unit).astype(np.float32)
            last = self.names[-1]
            if self.tied and unit == "u0" != last and self.written(leaf, last):
                tied = self.gradient(0, leaf, at, last, tie=True)
                ties = ties + tied.astype(np.float32)
        return total + ties

    @staticmethod
    def _tree(values: list[Any]) -> Any:
        while len(values) > 1:
            odd = values[-1:] if len(values) % 2 else []
            values = [
                left + right for left, right in zip(values[::2], values[1::2], strict=False)
            ] + odd
        return values[0]
