"""RMSprop: gradients divided by the root of a moving mean of their squares."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fsdpcore.core.buffers import Array
from fsdpcore.fsdp.optim.base import Optimizer, Scratch, State, decayed, ema
from fsdpcore.fsdp.optim.formulas import Update, rmsprop
from fsdpcore.fsdp.optim.schedules import Schedule


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSprop with the semantics that PyTorch documents for ``torch.optim.RMSprop``.

    (Tieleman & Hinton, lecture 6.5 of "Neural networks for machine learning", 2012; centered:
    Graves, "Generating sequences with recurrent neural networks", 2013, equations 38 to 45.) With
    gradient g, moving mean of squares v, of gradients a, momentum buffer b::

        g = g + weight_decay * p
        v = alpha * v + (1 - alpha) * g * g
        a = alpha * a + (1 - alpha) * g        with centered
        d = g / (sqrt(v - a * a) + eps)        a = 0 without centered; below 0 by rounding: 0
        b = momentum * b + d                   b = d without momentum
        p = p - lr * b

    State: ``square_avg`` (v); ``grad_avg`` (a) if centered; ``momentum_buffer`` (b) with momentum.

    Args:
        lr: the learning rate, at least 0, or a ``Schedule`` of it; by default 1e-2.
        alpha: how much of v, and of a, stays from step to step, in [0, 1); by default 0.99.
        eps: keeps the divisor from 0; above 0, by default 1e-8.
        weight_decay: how much of p is added to the gradient (L2), at least 0; by default 0.
        momentum: how much of b stays from step to step, at least 0; by default 0, for no b.
        centered: divide by the root of the variance, not of the mean square; by default False.

    Raises:
        ConfigError: a hyperparameter is out of its range, or not finite.
    """

    lr: float | Schedule = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_fraction("alpha")
        self._set_positive("eps", "a zero gradient would give 0 / 0")
        self._set_finite("weight_decay", minimum=0.0)
        self._set_finite("momentum", minimum=0.0)
        self._set_flag("centered")

    @property
    def state_names(self) -> tuple[str, ...]:
        """The moving means, and the momentum buffer if there is momentum."""
        names = ["square_avg"]
        if self.centered:
            names.append("grad_avg")
        if self.momentum != 0.0:
            names.append("momentum_buffer")
        return tuple(names)

    def update_block(
        self, param: Array, grad: Array, state: State, scratch: Scratch, *, step: int, lr: float
    ) -> None:
        square, work = state["square_avg"], scratch[1]
        direction = decayed(grad, param, self.weight_decay, scratch)
        np.multiply(direction, direction, out=work)
        ema(square, self.alpha, work, work)
        if self.centered:
            mean = state["grad_avg"]
            ema(mean, self.alpha, direction, work)
            np.multiply(mean, mean, out=work)
            np.subtract(square, work, out=work)
            np.maximum(work, 0.0, out=work)
            np.sqrt(work, out=work)
        else:
            np.sqrt(square, out=work)
        np.add(work, self.eps, out=work)
        np.divide(direction, work, out=work)
        if self.momentum != 0.0:
            buffer = state["momentum_buffer"]
            np.multiply(buffer, self.momentum, out=buffer)
            np.add(buffer, work, out=buffer)
            np.multiply(buffer, lr, out=work)
        else:
            np.multiply(work, lr, out=work)
        np.subtract(param, work, out=param)

    def gpu_update(self, *, step: int, lr: float) -> tuple[Update, tuple[float, ...]]:
        numbers = (lr, self.weight_decay, self.alpha, 1.0 - self.alpha, self.eps)
        update = rmsprop(centered=self.centered, momentum=self.momentum != 0.0)
        return update, numbers if self.momentum == 0.0 else (*numbers, self.momentum)
