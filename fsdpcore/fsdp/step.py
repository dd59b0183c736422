"""``Step``: one training step, as contexts around the forward and backward pass of each unit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from fsdpcore.errors import ArgumentError, NonFiniteGradientError, StateError
from fsdpcore.fsdp.norm import global_l2_norm
from fsdpcore.fsdp.unit import GradState, Unit, check_divisor
from fsdpcore.fsdp.views import Gradients, Params

if TYPE_CHECKING:
    from fsdpcore.fsdp.engine import FSDP


class BackwardUnit(NamedTuple):
    """What a backward pass gets of a unit."""

    params: Params
    grads: Gradients


class Step:
    """Made by ``engine.step()`` (or ``engine.evaluation()``) and used in a ``with`` statement.

    Every rank must go through the same units in the same order. A unit's parameters are there
    inside its context only. Several forward passes of a unit need as many backward passes; the
    gradients of all of them are added up until ``update``.
    """

    def __init__(self, engine: FSDP, divisor: float | None, training: bool) -> None:
        check_divisor(divisor)
        self._engine = engine
        self._divisor = divisor
        self._training = training
        self._forwards: Counter[str] = Counter()
        self._open: str | None = None
        self._reduced = False
        self._updated = False
        self._active = False

    def __enter__(self) -> Step:
        self._engine.begin(self)
        self._active = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._active = False
        unfinished = self._reduced and not self._updated
        self._engine.end()
        if error is None and unfinished:
            raise StateError(
                "the step ended with gradients that were never applied; call step.update() "
                "before the end of the with block"
            )

    @contextmanager
    def forward(self, unit: Unit | str) -> Iterator[Params]:
        """Gather a unit for its forward pass; the body gets its parameters."""
        member = self._enter(unit, "forward")
        self._forwards[member.name] += 1
        try:
            self._engine.gather(member, towards=+1)
            yield member.params
        finally:
            self._open = None
            member.reshard()

    @contextmanager
    def backward(self, unit: Unit | str) -> Iterator[BackwardUnit]:
        """Gather a unit for its backward pass; the body gets parameters and zeroed gradients.

        At the end of the body the gradients are summed over the ranks and divided.
        """
        if not self._training:
            raise StateError("an evaluation has no backward pass; use engine.step()")
        member = self._enter(unit, "backward")
        if not self._forwards[member.name]:
            self._open = None
            raise StateError(
                f"backward of unit {member.name!r} without a forward pass in this step; call "
                "step.forward(unit) first, once for each backward"
            )
        self._forwards[member.name] -= 1
        try:
            self._engine.gather(member, towards=-1)
            yield BackwardUnit(member.params, member.begin_gradients())
            member.reshard()  # before the reduction, which needs the room, and ends all reading
            member.reduce_gradients(divisor=self._divisor)
            self._reduced = True
        finally:
            self._open = None
            member.reshard()
            member.drop_local_gradients()

    def update(self, *, clip: float | None = None, lr: float | None = None) -> float | None:
        """Apply the optimizer to every unit, once per step.

        Args:
            clip: scale the gradients down to this global L2 norm if theirs is larger.
            lr: learning rate of this step, if not the optimizer's own.

        Returns:
            The global L2 norm of the gradients before clipping, if ``clip`` was given.

        Raises:
            StateError: there is nothing to apply, or it was applied already.
            NonFiniteGradientError: the norm is inf or nan; on all ranks, and nothing was changed.
        """
        self._check_update(clip)
        units = self._engine.units
        norm, scale = None, 1.0
        if clip is not None:
            shards = [u.grad_shard[: u.valid_size] for u in units if u.grad_shard is not None]
            norm = global_l2_norm(
                shards,
                self._engine.backend,
                algorithm=self._engine.algorithm,
                label=f"gradient norm, clip {clip}, lr {lr}",
            )
            if not math.isfinite(norm):
                self._reduced = False  # nothing is left to apply: leaving the step is right
                raise NonFiniteGradientError(
                    f"the gradients' global norm is {norm}; no parameter was changed. Leave the "
                    "step without update, or lower the learning rate"
                )
            scale = clip / norm if norm > clip else 1.0
        for unit in units:
            unit.update(step=self._engine.steps + 1, lr=lr, grad_scale=scale)
        self._engine.steps += 1
        self._updated = True
        return norm

    def _check_update(self, clip: float | None) -> None:
        if self._updated:
            raise StateError("update() was called already in this step; begin a new step")
        if self._open is not None:
            raise StateError(f"update() inside the context of unit {self._open!r}; leave it first")
        if not self._active or not self._reduced:
            raise StateError(
                "update() without gradients; run step.forward and step.backward of the units first"
            )
        if clip is not None and not clip > 0:
            raise ArgumentError(f"clip must be a positive norm, got {clip}")
        left = [name for name, count in self._forwards.items() if count]
        if left:
            raise StateError(
                f"units {left} had a forward pass without its backward; run it before update()"
            )

    def _enter(self, unit: Unit | str, what: str) -> Unit:
        member = self._engine[unit]
        if not self._active:
            raise StateError(f"{what} outside of the step; use it inside 'with engine.step()'")
        if self._updated:
            raise StateError(f"{what} after update(); begin a new step")
        if self._open is not None:
            raise StateError(
                f"{what} of unit {member.name!r} inside the context of unit {self._open!r}; leave "
                "that one first"
            )
        if member.grad_state is GradState.LOCAL:
            raise StateError(f"unit {member.name!r} has gradients that were not reduced")
        self._open = member.name
        return member
