"""Adam, with decay in the gradient, and AdamW, with decay of its own."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fsdpcore.core.array_module import on_host
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ConfigError
from fsdpcore.fsdp.optim import kernels
from fsdpcore.fsdp.optim.base import Optimizer, Scratch, State, decayed, ema
from fsdpcore.fsdp.optim.formulas import ADAM, AMSGRAD, Update
from fsdpcore.fsdp.optim.schedules import Schedule


@dataclass(frozen=True)
class _TwoMoments(Optimizer):
    """What Adam and AdamW have in common."""

    decoupled: ClassVar[bool]

    lr: float | Schedule = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    fused: bool | Literal["auto"] = False
    amsgrad: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_positive("eps", "a zero gradient would give 0 / 0")
        self._set_finite("weight_decay", minimum=0.0)
        self._set_betas()
        self._set_flag("amsgrad")
        if self.fused != "auto":
            if not isinstance(self.fused, bool):
                raise ConfigError(
                    f"fused of {type(self).__name__} must be True, False or 'auto', got "
                    f"{self.fused!r}"
                )
            if self.fused:
                kernels.require(type(self).__name__)

    @property
    def state_names(self) -> tuple[str, ...]:
        """First and second moment, and with ``amsgrad`` the largest of the second so far."""
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if self.amsgrad else names

    def resolved(self) -> _TwoMoments:
        """Return the same policy with ``fused`` decided: True where numba is installed."""
        if self.fused != "auto":
            return self
        return dataclasses.replace(self, fused=kernels.available())

    def update_block(
        self, param: Array, grad: Array, state: State, scratch: Scratch, *, step: int, lr: float
    ) -> None:
        mean, square, work = state["exp_avg"], state["exp_avg_sq"], scratch[1]
        numbers = self._numbers(step, lr)
        if on_host(param) and (kernels.available() if self.fused == "auto" else self.fused):
            kernel = kernels.amsgrad if self.amsgrad else kernels.adam
            arrays = [state[name] for name in self.state_names]
            kernel()(param, grad, *arrays, *map(param.dtype.type, numbers))
            return
        coupled, beta1, _, beta2, _, eps, size, keep = numbers
        direction = decayed(grad, param, coupled, scratch)
        ema(mean, beta1, direction, work)
        np.multiply(direction, direction, out=work)
        ema(square, beta2, work, work)
        if self.amsgrad:
            square = np.maximum(square, state["max_exp_avg_sq"], out=state["max_exp_avg_sq"])
        np.sqrt(square, out=work)
        np.add(work, eps, out=work)
        np.divide(mean, work, out=work)
        np.multiply(work, size, out=work)
        if keep != 1.0:
            np.multiply(param, keep, out=param)
        np.subtract(param, work, out=param)

    def gpu_update(self, *, step: int, lr: float) -> tuple[Update, tuple[float, ...]]:
        return AMSGRAD if self.amsgrad else ADAM, self._numbers(step, lr)

    def _numbers(self, step: int, lr: float) -> tuple[float, ...]:
        """Return what kernels take: the scalars of ``ADAM``."""
        beta1, beta2 = self.betas
        # The bias corrections are moved into the step size and eps, which saves two passes:
        # lr * (m / c1) / (sqrt(v) / c2 + eps) = (lr * c2 / c1) * m / (sqrt(v) + eps * c2).
        correction1 = 1.0 - beta1**step
        correction2 = math.sqrt(1.0 - beta2**step)
        size, eps = lr * correction2 / correction1, self.eps * correction2
        coupled = 0.0 if self.decoupled else self.weight_decay
        keep = 1.0 - lr * self.weight_decay if self.decoupled else 1.0
        return coupled, beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps, size, keep


@dataclass(frozen=True)
class Adam(_TwoMoments):
    """Kingma & Ba, "Adam: a method for stochastic optimization" (ICLR 2015), algorithm 1.

    With gradient g, first moment m, second moment v, step t::

        g = g + weight_decay * p
        m = beta1 * m + (1 - beta1) * g        v = beta2 * v + (1 - beta2) * g * g
        p = p - lr * m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps)

    The decay is a part of the gradient (L2), as PyTorch documents it for ``torch.optim.Adam``; for
    one that is not, take ``AdamW``. State: ``exp_avg`` (m) and ``exp_avg_sq`` (v), and with
    ``amsgrad`` ``max_exp_avg_sq``.

    Args:
        lr: the learning rate, at least 0, or a ``Schedule`` of it; by default 1e-3.
        betas: beta1 and beta2, both in [0, 1); by default 0.9 and 0.999.
        eps: keeps the divisor from 0; above 0, by default 1e-8.
        weight_decay: how much of p is added to the gradient, at least 0; by default 0.
        fused: True computes all of it in one pass on the host, with a kernel of numba; ``"auto"``
            does so where numba is installed. By default False. ``AdamW`` says what that costs.
        amsgrad: divide by the largest v so far in place of v; by default False.

    Raises:
        ConfigError: a hyperparameter is out of its range.
        MissingDependencyError: ``fused`` is True, but numba is not installed. Where CuPy is, it is
            raised at the first update on the host.
    """

    decoupled: ClassVar[bool] = False


@dataclass(frozen=True)
class AdamW(_TwoMoments):
    """Loshchilov & Hutter, "Decoupled weight decay regularization" (ICLR 2019), algorithm 2.

    With gradient g, first moment m, second moment v, step t::

        m = beta1 * m + (1 - beta1) * g        v = beta2 * v + (1 - beta2) * g * g
        p = p * (1 - lr * weight_decay)
            - lr * m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps)

    The decay is scaled by the learning rate, and both by a schedule, as in PyTorch. State:
    ``exp_avg`` (m) and ``exp_avg_sq`` (v), and with ``amsgrad`` ``max_exp_avg_sq``.

    With ``fused``, numba is imported and the kernel compiled at the first update of each dtype,
    which takes 0.4 s on the machine where this was written; the result is kept in a cache on disk,
    so that later processes wait for the import only, 0.2 s. The kernel holds no GIL. It rounds as
    NumPy does, operation by operation, but nothing promises that of a compiler: all ranks should do
    the same, so compare ``repr(optimizer.resolved())``, which names what was chosen.

    Args:
        lr: the learning rate, at least 0, or a ``Schedule`` of it; by default 1e-3.
        betas: beta1 and beta2, both in [0, 1); by default 0.9 and 0.999.
        eps: keeps the divisor from 0; above 0, by default 1e-8.
        weight_decay: p shrinks by ``lr * weight_decay`` of itself in each step; at least 0, by
            default 0.01.
        fused: True computes all of it in one pass with a kernel that numba compiles (``pip install
            'fsdpcore[numba]'``); ``"auto"`` does so where numba is installed. By default False. It
            is about the host: on a GPU one kernel does all of it in any case, without numba.
        amsgrad: divide by the largest v so far in place of v (Reddi, Kale & Kumar, "On the
            convergence of Adam and beyond", ICLR 2018); of v before its bias correction, as PyTorch
            does. By default False.

    Raises:
        ConfigError: a hyperparameter is out of its range.
        MissingDependencyError: ``fused`` is True, but numba is not installed. Where CuPy is, it is
            raised at the first update on the host.
    """

    decoupled: ClassVar[bool] = True

    weight_decay: float = 0.01
