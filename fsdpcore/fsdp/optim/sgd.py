"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ConfigError
from fsdpcore.fsdp.optim import formulas
from fsdpcore.fsdp.optim.base import Optimizer, Scratch, State, decayed


@dataclass(frozen=True)
class SGD(Optimizer):
    """SGD with the semantics that PyTorch documents for ``torch.optim.SGD``, without dampening.

    With gradient g and momentum buffer b::

        g = g + weight_decay * p
        b = momentum * b + g                   (b starts at zero, so the first step has b = g)
        p = p - lr * (g + momentum * b)        with nesterov
        p = p - lr * b                         without

    State: ``momentum_buffer`` (b), or nothing if ``momentum`` is 0.

    Args:
        lr: the learning rate, at least 0, or a ``Schedule`` of it.
        momentum: how much of b stays from step to step, at least 0; by default 0, for none.
        nesterov: look ahead by the momentum; by default False. It needs a ``momentum`` above 0.
        weight_decay: how much of p is added to the gradient (L2), at least 0; by default 0.

    Raises:
        ConfigError: a number is negative or not finite, or there is ``nesterov`` without momentum.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_finite("momentum", minimum=0.0)
        self._set_finite("weight_decay", minimum=0.0)
        self._set_flag("nesterov")
        if self.nesterov and self.momentum == 0.0:
            raise ConfigError("nesterov of SGD needs a momentum above 0, for instance 0.9")

    @property
    def state_names(self) -> tuple[str, ...]:
        """The momentum buffer, if there is momentum."""
        return ("momentum_buffer",) if self.momentum != 0.0 else ()

    def update_block(
        self, param: Array, grad: Array, state: State, scratch: Scratch, *, step: int, lr: float
    ) -> None:
        work = scratch[1]
        direction = decayed(grad, param, self.weight_decay, scratch)
        if self.momentum != 0.0:
            buffer = state["momentum_buffer"]
            np.multiply(buffer, self.momentum, out=buffer)
            np.add(buffer, direction, out=buffer)
            if self.nesterov:
                np.multiply(buffer, self.momentum, out=work)
                direction = np.add(direction, work, out=work)
            else:
                direction = buffer
        np.multiply(direction, lr, out=work)
        np.subtract(param, work, out=param)

    def gpu_update(self, *, step: int, lr: float) -> tuple[formulas.Update, tuple[float, ...]]:
        if self.momentum == 0.0:
            return formulas.SGD, (lr, self.weight_decay)
        update = formulas.SGD_NESTEROV if self.nesterov else formulas.SGD_MOMENTUM
        return update, (lr, self.weight_decay, self.momentum)
