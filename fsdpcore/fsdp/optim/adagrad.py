"""Adagrad: each element's step shrinks with the squares of its gradients so far."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fsdpcore.core.buffers import Array
from fsdpcore.fsdp.optim.base import Optimizer, Scratch, State, decayed
from fsdpcore.fsdp.optim.formulas import ADAGRAD, Update
from fsdpcore.fsdp.optim.schedules import Schedule


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Duchi, Hazan & Singer, "Adaptive subgradient methods" (JMLR 2011), diagonal form.

    With gradient g, sum of squares s, step t, as PyTorch documents it for ``torch.optim.Adagrad``::

        g = g + weight_decay * p
        s = s + g * g                          (s starts at initial_accumulator_value)
        p = p - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)

    State: ``sum`` (s).

    Args:
        lr: the learning rate, at least 0, or a ``Schedule`` of it; by default 1e-2.
        lr_decay: by how much the divisor of ``lr`` grows in each step, at least 0; by default 0.
        weight_decay: how much of p is added to the gradient (L2), at least 0; by default 0.
        initial_accumulator_value: what s begins with, at least 0; by default 0.
        eps: keeps the divisor from 0; above 0, by default 1e-10.

    Raises:
        ConfigError: a hyperparameter is out of its range, or not finite.
    """

    lr: float | Schedule = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("lr_decay", "weight_decay", "initial_accumulator_value"):
            self._set_finite(field, minimum=0.0)
        self._set_positive("eps", "a zero gradient would give 0 / 0")

    @property
    def state_names(self) -> tuple[str, ...]:
        """The sum of squares."""
        return ("sum",)

    def initial_state(self, name: str) -> float:
        """Return ``initial_accumulator_value``, whatever the ``name``: ``sum`` is the only one."""
        return self.initial_accumulator_value

    def update_block(
        self, param: Array, grad: Array, state: State, scratch: Scratch, *, step: int, lr: float
    ) -> None:
        total, work = state["sum"], scratch[1]
        direction = decayed(grad, param, self.weight_decay, scratch)
        np.multiply(direction, direction, out=work)
        np.add(total, work, out=total)
        np.sqrt(total, out=work)
        np.add(work, self.eps, out=work)
        np.divide(direction, work, out=work)
        np.multiply(work, self._rate(step, lr), out=work)
        np.subtract(param, work, out=param)

    def gpu_update(self, *, step: int, lr: float) -> tuple[Update, tuple[float, ...]]:
        return ADAGRAD, (self._rate(step, lr), self.weight_decay, self.eps)

    def _rate(self, step: int, lr: float) -> float:
        return lr / (1.0 + (step - 1) * self.lr_decay)
