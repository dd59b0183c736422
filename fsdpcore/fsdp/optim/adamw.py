"""AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.errors import ConfigError
from fsdpcore.fsdp.checks import as_finite
from fsdpcore.fsdp.optim.base import Optimizer


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Loshchilov & Hutter, "Decoupled weight decay regularization" (ICLR 2019), algorithm 2.

    With gradient g, first moment m, second moment v, step t::

        m = beta1 * m + (1 - beta1) * g        v = beta2 * v + (1 - beta2) * g * g
        p = p * (1 - lr * weight_decay)
            - lr * m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps)

    The decay is scaled by the learning rate, and both by a schedule, as in PyTorch. State:
    ``exp_avg`` (m) and ``exp_avg_sq`` (v). Raises ConfigError unless all are finite,
    ``lr`` and ``weight_decay`` not negative, ``eps`` above 0 and both betas in [0, 1).
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_finite("eps", minimum=0.0)
        if self.eps == 0.0:
            raise ConfigError("eps of AdamW must be above 0: a zero gradient would give 0 / 0")
        self._set_finite("weight_decay", minimum=0.0)
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise ConfigError(f"betas of AdamW must be two numbers, got {self.betas!r}")
        betas = tuple(
            as_finite(beta, f"betas[{i}] of AdamW", minimum=0.0, error=ConfigError)
            for i, beta in enumerate(self.betas)
        )
        if not max(betas) < 1.0:
            raise ConfigError(f"betas of AdamW must be below 1, got {betas}")
        object.__setattr__(self, "betas", betas)

    @property
    def state_names(self) -> tuple[str, ...]:
        """First and second moment."""
        return ("exp_avg", "exp_avg_sq")

    def update_block(
        self,
        param: NDArray[Any],
        grad: NDArray[Any],
        state: Mapping[str, NDArray[Any]],
        scratch: tuple[NDArray[Any], NDArray[Any]],
        *,
        step: int,
        lr: float,
    ) -> None:
        """Update one block; see ``Optimizer.update_block``."""
        beta1, beta2 = self.betas
        mean, square, work = state["exp_avg"], state["exp_avg_sq"], scratch[1]

        np.multiply(mean, beta1, out=mean)
        np.multiply(grad, 1.0 - beta1, out=work)
        np.add(mean, work, out=mean)

        np.multiply(square, beta2, out=square)
        np.multiply(grad, grad, out=work)
        np.multiply(work, 1.0 - beta2, out=work)
        np.add(square, work, out=square)

        # The bias corrections are moved into the step size and eps, which saves two passes:
        # lr * (m / c1) / (sqrt(v) / c2 + eps) = (lr * c2 / c1) * m / (sqrt(v) + eps * c2).
        correction1 = 1.0 - beta1**step
        correction2 = math.sqrt(1.0 - beta2**step)
        np.sqrt(square, out=work)
        np.add(work, self.eps * correction2, out=work)
        np.divide(mean, work, out=work)
        np.multiply(work, lr * correction2 / correction1, out=work)
        if self.weight_decay != 0.0:
            np.multiply(param, 1.0 - lr * self.weight_decay, out=param)
        np.subtract(param, work, out=param)
