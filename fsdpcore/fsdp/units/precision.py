"""Which dtypes parameters and gradients have where, and how float16 losses are scaled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.core.checks import as_dtype, as_finite, as_int
from fsdpcore.core.errors import ArgumentError

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
_MASTERS = (np.dtype(np.float32), np.dtype(np.float64))
_COMPUTED = (*_MASTERS, np.dtype(np.float16), BFLOAT16)


@dataclass(frozen=True)
class LossScale:
    """Scaling of the loss, so that small gradients do not vanish in float16.

    The loss is multiplied by ``engine.loss_scale`` before the backward pass. ``step.update``
    divides by it; where gradients are inf or nan on any rank, all of them skip the update.

    Args:
        initial: the scale at the beginning.
        growth: it is multiplied by this after ``interval`` updates in a row; 1 keeps it as it is.
        backoff: it is multiplied by this after a skipped update.
        interval: in updates.
        minimum: it never falls below this.
        maximum: nor rises above this.

    (Micikevicius et al., "Mixed precision training", ICLR 2018.)

    Example::

        fc.Precision(np.float16, loss_scale=fc.LossScale(initial=2.0**12))
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum: float = 1.0
    maximum: float = 2.0**32

    def __post_init__(self) -> None:
        for field in ("initial", "growth", "backoff", "minimum", "maximum"):
            value = as_finite(getattr(self, field), f"{field} of LossScale", minimum=0.0)
            object.__setattr__(self, field, value)
        interval = as_int(self.interval, "interval of LossScale", minimum=1)
        object.__setattr__(self, "interval", interval)
        if not 0.0 < self.minimum <= self.initial <= self.maximum:
            raise ArgumentError(
                f"a LossScale needs 0 < minimum <= initial <= maximum, got {self.minimum:g}, "
                f"{self.initial:g} and {self.maximum:g}"
            )
        if not (self.growth >= 1.0 and 0.0 < self.backoff <= 1.0):
            raise ArgumentError("a LossScale needs growth >= 1 and 0 < backoff <= 1")


class Scaler:
    """The scale of the loss as training goes on; equal on all ranks, as it follows the updates.

    Attributes:
        scale: what the loss is multiplied by now.
        applied: updates since the scale changed, or since one was skipped.
    """

    def __init__(self, policy: LossScale | None) -> None:
        self.policy = policy
        self.scale = 1.0 if policy is None else policy.initial
        self.applied = 0

    def updated(self, *, skipped: bool) -> None:
        """Take note of an update, or of one that was skipped."""
        policy = self.policy
        if policy is None:
            return
        self.applied = 0 if skipped else self.applied + 1
        if skipped:
            self.scale = max(policy.minimum, self.scale * policy.backoff)
        elif self.applied == policy.interval:
            self.scale, self.applied = min(policy.maximum, self.scale * policy.growth), 0


@dataclass(frozen=True)
class Precision:
    """Dtypes of computation and communication; optimizer and master shards keep the unit's own.

    A unit has float32 (or float64) parameters. What the optimizer updates, the *master* shard, has
    that dtype; ranks gather and compute with copies of ``param_dtype``, and reduce gradients in
    ``reduce_dtype``, in which the shard of the reduced gradients stays, too: gradients of several
    backward passes are added up in it, so keep it at float32 for these.

    Args:
        param_dtype: of gathered parameters, and one that assigned gradients may have;
            float16, bfloat16 (``ml_dtypes.bfloat16``), or by default that of the master.
        reduce_dtype: of the reduction of gradients; by default ``param_dtype``. Sums of float16 and
            bfloat16 are made in float32, divided there by the number of ranks (unless the step's
            ``divisor`` is smaller), and rounded once in each group of ranks. So a mean that float16
            can hold is not lost to a sum that it cannot.
        loss_scale: a ``LossScale``, a constant number, or None for no scaling.

    Raises:
        ArgumentError: a dtype that is not floating, or a scale that makes no sense.

    Example::

        fc.FSDP(units, backend, precision=fc.Precision(ml_dtypes.bfloat16, np.float32))
    """

    param_dtype: DTypeLike | None = None
    reduce_dtype: DTypeLike | None = None
    loss_scale: LossScale | float | None = None

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype"):
            if getattr(self, field) is not None:
                dtype = as_dtype(getattr(self, field), field)
                if dtype not in _COMPUTED:
                    raise ArgumentError(
                        f"{field} must be float16, bfloat16, float32 or float64, got {dtype}"
                    )
                object.__setattr__(self, field, dtype)
        if self.loss_scale is not None and not isinstance(self.loss_scale, LossScale):
            scale = as_finite(self.loss_scale, "loss_scale")
            constant = LossScale(scale, 1.0, 1.0, minimum=scale, maximum=scale)
            object.__setattr__(self, "loss_scale", constant)

    @property
    def scaling(self) -> LossScale | None:
        """How losses are scaled."""
        assert not isinstance(self.loss_scale, (int, float))
        return self.loss_scale

    def dtypes(self, master: np.dtype[Any]) -> Dtypes:
        """Return the dtypes for a unit.

        Args:
            master: of its parameters: float32 or float64.

        Returns:
            The dtypes of the master shard, of gathered parameters and of gradients.

        Raises:
            ArgumentError: ``param_dtype`` or ``reduce_dtype`` is wider than ``master``.
        """
        param = master if self.param_dtype is None else np.dtype(self.param_dtype)
        reduced = param if self.reduce_dtype is None else np.dtype(self.reduce_dtype)
        if max(param.itemsize, reduced.itemsize) > master.itemsize:
            raise ArgumentError(
                f"parameters of {master} cannot be computed in {param} or reduced in {reduced}, "
                "which is wider; make the parameters of that dtype"
            )
        return Dtypes(master, param, reduced)


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one unit.

    Attributes:
        master: of the shard that the optimizer updates, and of its state.
        param: of gathered parameters.
        grad: of gradients: full ones, and reduced shards.
        lags: what is gathered follows the master shard by quantised differences.
    """

    master: np.dtype[Any]
    param: np.dtype[Any]
    grad: np.dtype[Any]
    lags: bool = False

    @property
    def mixed(self) -> bool:
        """Whether the master shard is not what is gathered."""
        return self.master != self.param or self.lags
