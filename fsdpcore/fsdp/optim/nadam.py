"""NAdam: Adam with Nesterov's momentum."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from fsdpcore.core.buffers import Array
from fsdpcore.fsdp.optim.base import Optimizer, Scratch, State, decayed, ema
from fsdpcore.fsdp.optim.formulas import NADAM, Update
from fsdpcore.fsdp.optim.schedules import Schedule

_NOTHING = 1e-20  # what 1 can be reduced by without any difference


@dataclass(frozen=True)
class NAdam(Optimizer):
    """Dozat, "Incorporating Nesterov momentum into Adam" (ICLR workshop 2016), algorithm 2.

    With the schedule of the momentum that the paper takes for its experiments, and PyTorch for
    ``torch.optim.NAdam``. With gradient g, first moment m, second moment v, step t::

        g = g + weight_decay * p
        m = beta1 * m + (1 - beta1) * g        v = beta2 * v + (1 - beta2) * g * g
        mu(i) = beta1 * (1 - 0.96**(i * momentum_decay) / 2)
        M(i)  = mu(1) * mu(2) * ... * mu(i)
        u = mu(t + 1) * m / (1 - M(t + 1)) + (1 - mu(t)) * g / (1 - M(t))
        p = p - lr * u / (sqrt(v / (1 - beta2**t)) + eps)

    State: ``exp_avg`` (m) and ``exp_avg_sq`` (v).

    Args:
        lr: the learning rate, at least 0, or a ``Schedule`` of it; by default 2e-3.
        betas: beta1 and beta2, both in [0, 1); by default 0.9 and 0.999.
        eps: keeps the divisor from 0; above 0, by default 1e-8.
        weight_decay: how much of p is added to the gradient (L2), at least 0; by default 0.
        momentum_decay: how fast mu rises from about beta1 / 2 to beta1; at least 0, by default
            4e-3.
        decoupled_weight_decay: have the decay of AdamW instead: g stays, and p is first multiplied
            by ``1 - lr * weight_decay``. By default False.

    Raises:
        ConfigError: a hyperparameter is out of its range, or not finite.
    """

    lr: float | Schedule = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_betas()
        self._set_positive("eps", "a zero gradient would give 0 / 0")
        self._set_finite("weight_decay", minimum=0.0)
        self._set_finite("momentum_decay", minimum=0.0)
        self._set_flag("decoupled_weight_decay")

    @property
    def state_names(self) -> tuple[str, ...]:
        """First and second moment."""
        return ("exp_avg", "exp_avg_sq")

    def update_block(
        self, param: Array, grad: Array, state: State, scratch: Scratch, *, step: int, lr: float
    ) -> None:
        mean, square, (first, work) = state["exp_avg"], state["exp_avg_sq"], scratch
        coupled, beta1, _, beta2, _, eps, ahead, size, keep = self._numbers(step, lr)
        direction = decayed(grad, param, coupled, scratch)
        ema(mean, beta1, direction, work)
        np.multiply(direction, direction, out=work)
        ema(square, beta2, work, work)
        change = np.multiply(direction, ahead, out=first)
        np.multiply(mean, size, out=work)
        np.add(change, work, out=change)
        np.sqrt(square, out=work)
        np.add(work, eps, out=work)
        np.divide(change, work, out=change)
        if keep != 1.0:
            np.multiply(param, keep, out=param)
        np.subtract(param, change, out=param)

    def gpu_update(self, *, step: int, lr: float) -> tuple[Update, tuple[float, ...]]:
        return NADAM, self._numbers(step, lr)

    def _numbers(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the scalars of ``NADAM``."""
        beta1, beta2 = self.betas
        # The correction of v is moved out of the root, into the sizes and eps.
        correction = math.sqrt(1.0 - beta2**step)
        here, following = (_momentum(beta1, self.momentum_decay, i) for i in (step, step + 1))
        so_far = _product(beta1, self.momentum_decay, step)
        ahead = lr * correction * (1.0 - here) / (1.0 - so_far)
        size = lr * correction * following / (1.0 - so_far * following)
        decay, decoupled = self.weight_decay, self.decoupled_weight_decay
        return (
            *(0.0 if decoupled else decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2),
            *(self.eps * correction, ahead, size, 1.0 - lr * decay if decoupled else 1.0),
        )


def _momentum(beta1: float, decay: float, step: int) -> float:
    return beta1 * (1.0 - 0.5 * math.pow(0.96, step * decay))


@functools.lru_cache(maxsize=64)
def _product(beta1: float, decay: float, step: int) -> float:
    """Return the product of the momenta of the first steps; 0 where that makes no difference."""
    product = 1.0
    for i in range(1, step + 1):
        product *= _momentum(beta1, decay, i)
        if product < _NOTHING:
            return 0.0
    return product
