"""RAdam: Adam whose first steps are not scaled before their variance is known."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fsdpcore.core.buffers import Array
from fsdpcore.fsdp.optim.base import Optimizer, Scratch, State, decayed, ema
from fsdpcore.fsdp.optim.formulas import ADAM, RADAM_WARMUP, Update
from fsdpcore.fsdp.optim.schedules import Schedule


@dataclass(frozen=True)
class RAdam(Optimizer):
    """Liu et al., "On the variance of the adaptive learning rate and beyond" (ICLR 2020).

    Algorithm 2, with the place of eps that PyTorch has for ``torch.optim.RAdam``. With gradient g,
    first moment m, second moment v, step t::

        g = g + weight_decay * p
        m = beta1 * m + (1 - beta1) * g        v = beta2 * v + (1 - beta2) * g * g
        k = 2 / (1 - beta2) - 1                r = k - 2 * t * beta2**t / (1 - beta2**t)
        s = sqrt((r - 4) * (r - 2) * k / ((k - 4) * (k - 2) * r))
        u = m / (1 - beta1**t)
        u = u * s * sqrt(1 - beta2**t) / (sqrt(v) + eps)          where r > 5
        p = p - lr * u

    State: ``exp_avg`` (m) and ``exp_avg_sq`` (v).

    Args:
        lr: the learning rate, at least 0, or a ``Schedule`` of it; by default 1e-3.
        betas: beta1 and beta2, both in [0, 1); by default 0.9 and 0.999.
        eps: keeps the divisor from 0; above 0, by default 1e-8.
        weight_decay: how much of p is added to the gradient (L2), at least 0; by default 0.
        decoupled_weight_decay: have the decay of AdamW instead: g stays, and p is first multiplied
            by ``1 - lr * weight_decay``. By default False.

    Raises:
        ConfigError: a hyperparameter is out of its range, or not finite.
    """

    lr: float | Schedule = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_betas()
        self._set_positive("eps", "a zero gradient would give 0 / 0")
        self._set_finite("weight_decay", minimum=0.0)
        self._set_flag("decoupled_weight_decay")

    @property
    def state_names(self) -> tuple[str, ...]:
        """First and second moment."""
        return ("exp_avg", "exp_avg_sq")

    def update_block(
        self, param: Array, grad: Array, state: State, scratch: Scratch, *, step: int, lr: float
    ) -> None:
        mean, square, work = state["exp_avg"], state["exp_avg_sq"], scratch[1]
        coupled, beta1, beta2, keep = self._decay_and_betas(lr)
        direction = decayed(grad, param, coupled, scratch)
        ema(mean, beta1, direction, work)
        np.multiply(direction, direction, out=work)
        ema(square, beta2, work, work)
        size = lr / (1.0 - beta1**step)
        rectified = self._rectified(step)
        if rectified is None:
            np.multiply(mean, size, out=work)
        else:
            np.sqrt(square, out=work)
            np.add(work, self.eps, out=work)
            np.divide(mean, work, out=work)
            np.multiply(work, size * rectified, out=work)
        if keep != 1.0:
            np.multiply(param, keep, out=param)
        np.subtract(param, work, out=param)

    def gpu_update(self, *, step: int, lr: float) -> tuple[Update, tuple[float, ...]]:
        coupled, beta1, beta2, keep = self._decay_and_betas(lr)
        moments = (coupled, beta1, 1.0 - beta1, beta2, 1.0 - beta2)
        size = lr / (1.0 - beta1**step)
        rectified = self._rectified(step)
        if rectified is None:
            return RADAM_WARMUP, (*moments, size, keep)
        return ADAM, (*moments, self.eps, size * rectified, keep)  # with other numbers

    def _decay_and_betas(self, lr: float) -> tuple[float, float, float, float]:
        """Return the decay in the gradient, both betas, and what is kept of the parameter."""
        if self.decoupled_weight_decay:
            return 0.0, *self.betas, 1.0 - lr * self.weight_decay
        return self.weight_decay, *self.betas, 1.0

    def _rectified(self, step: int) -> float | None:
        """Return what ``m / (sqrt(v) + eps)`` is multiplied by; None while v says too little."""
        rest = self.betas[1] ** step
        most = 2.0 / (1.0 - self.betas[1]) - 1.0
        length = most - 2.0 * step * rest / (1.0 - rest)
        if length <= 5.0:
            return None
        share = (length - 4.0) * (length - 2.0) * most / ((most - 4.0) * (most - 2.0) * length)
        return math.sqrt(share * (1.0 - rest))
