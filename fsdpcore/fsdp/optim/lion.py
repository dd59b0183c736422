"""Lion: steps of one size, in the direction of the sign of a momentum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fsdpcore.core.buffers import Array
from fsdpcore.fsdp.optim.base import Optimizer, Scratch, State, ema
from fsdpcore.fsdp.optim.formulas import LION, Update
from fsdpcore.fsdp.optim.schedules import Schedule


@dataclass(frozen=True)
class Lion(Optimizer):
    """Chen et al., "Symbolic discovery of optimization algorithms" (NeurIPS 2023), algorithm 2.

    With gradient g and momentum m::

        p = p * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g

    The sign of 0 is 0. The paper takes a learning rate 3 to 10 times smaller than AdamW's, and a
    decay as many times larger. State: ``exp_avg`` (m).

    Args:
        lr: the learning rate, at least 0, or a ``Schedule`` of it; by default 1e-4.
        betas: beta1, of the direction, and beta2, of the momentum, both in [0, 1); by default 0.9
            and 0.99.
        weight_decay: p shrinks by ``lr * weight_decay`` of itself in each step; at least 0, by
            default 0.

    Raises:
        ConfigError: a hyperparameter is out of its range, or not finite.
    """

    lr: float | Schedule = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_betas()
        self._set_finite("weight_decay", minimum=0.0)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The momentum."""
        return ("exp_avg",)

    def update_block(
        self, param: Array, grad: Array, state: State, scratch: Scratch, *, step: int, lr: float
    ) -> None:
        mean, work = state["exp_avg"], scratch[1]
        beta1, beta2 = self.betas
        # Only the sign counts, so both terms are divided by 1 - beta1: one pass less.
        np.multiply(mean, beta1 / (1.0 - beta1), out=work)
        np.add(work, grad, out=work)
        np.sign(work, out=work)
        np.multiply(work, lr, out=work)
        if self.weight_decay != 0.0:
            np.multiply(param, 1.0 - lr * self.weight_decay, out=param)
        np.subtract(param, work, out=param)
        ema(mean, beta2, grad, work)

    def gpu_update(self, *, step: int, lr: float) -> tuple[Update, tuple[float, ...]]:
        beta1, beta2 = self.betas
        keep = 1.0 - lr * self.weight_decay
        return LION, (lr, keep, beta1 / (1.0 - beta1), beta2, 1.0 - beta2)
