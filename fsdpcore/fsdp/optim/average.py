"""Averages of the weights, kept beside an optimizer's state in the shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdpcore.core.array_module import array_module, on_host
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_finite, as_int
from fsdpcore.core.errors import ConfigError
from fsdpcore.fsdp.optim.arrays import check_names
from fsdpcore.fsdp.optim.base import Optimizer, Scratch, State
from fsdpcore.fsdp.optim.bound import BLOCK_ELEMENTS, GPU_BLOCK_ELEMENTS
from fsdpcore.fsdp.optim.from_optax import Optax, is_transformation
from fsdpcore.fsdp.optim.pieces import Reduce, ShardPiece
from fsdpcore.fsdp.optim.schedules import Schedule

AVERAGES = {"ema": "weights_ema", "mean": "weights_mean"}
"""The state array of each kind of average."""


@dataclass(frozen=True)
class Average(Optimizer):
    """An optimizer, and averages of the weights after each of its updates.

    Each rank averages its shard, so nothing is sent. ``with engine.averaged():`` evaluates with the
    average; training goes on with the weights themselves. Averages are state of the optimizer: as
    large as the parameters, sharded like them, saved in checkpoints, of full precision.

    With weights w after update t::

        ema = decay * ema + (1 - decay) * w           with ema=decay
        mean = mean + (w - mean) / (t - start + 1)    with mean=True

    Both begin as the weights after update ``start``; before that they are the weights. Where an
    average is missing in a checkpoint that is loaded with ``strict=False``, it begins anew.

    Args:
        optimizer: one of ``fc.optim``, or a transformation of optax.
        ema: the decay, in [0, 1), such as 0.999; None for no such average.
        mean: keep the mean, too.
        start: number of the first update that counts.

    Raises:
        ConfigError: neither ``ema`` nor ``mean`` is asked for; ``optimizer`` keeps one of the same
            kind; or a value is out of range.

    Example::

        optimizer = fc.optim.Average(fc.optim.AdamW(lr=3e-4), ema=0.999)
        engine = fc.FSDP(units, backend, optimizer=optimizer)
        ...
        with engine.averaged(), engine.evaluation() as step:
            ...
    """

    optimizer: Any
    ema: float | None = field(default=None, kw_only=True)
    mean: bool = field(default=False, kw_only=True)
    start: int = field(default=1, kw_only=True)
    lr: float | Schedule = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        inner = self.optimizer
        if is_transformation(inner):
            inner = Optax(inner)
        if not isinstance(inner, Optimizer):
            raise ConfigError(f"Average takes an optimizer of fc.optim, got {inner!r:.80}")
        if set(self._averages) & set(inner.state_names):
            raise ConfigError(
                "Average keeps one average of each kind, and the Average in it keeps the same one"
            )
        if inner.has_owners:
            raise ConfigError(
                f"Average cannot follow {type(inner).__name__}, which writes a parameter after the "
                "update of a rank has ended; average the others, by patterns of their names"
            )
        self._set_flag("mean")
        if self.ema is None and not self.mean:
            raise ConfigError("Average keeps no average: give ema=0.999, mean=True, or both")
        if self.ema is not None:
            ema = as_finite(self.ema, "ema of Average", minimum=0.0, error=ConfigError)
            if not ema < 1.0:
                raise ConfigError(f"ema of Average must be below 1, got {ema:g}")
            object.__setattr__(self, "ema", ema)
        as_int(self.start, "start of Average (an update, from 1)", minimum=1, error=ConfigError)
        object.__setattr__(self, "optimizer", inner)
        object.__setattr__(self, "lr", inner.lr)
        for name in ("elementwise", "takes_boxes", "takes_lr", "any_order"):
            object.__setattr__(self, name, getattr(inner, name))

    @property
    def state_names(self) -> tuple[str, ...]:
        """Those of the optimizer, then ``weights_ema`` and ``weights_mean``."""
        return (*self.optimizer.state_names, *self._averages)

    @property
    def _averages(self) -> tuple[str, ...]:
        wanted = {"ema": self.ema is not None, "mean": self.mean}
        return tuple(name for kind, name in AVERAGES.items() if wanted[kind])

    def state_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        own: dict[str, tuple[int, ...]] = self.optimizer.state_shapes(shape)
        return {**own, **dict.fromkeys(self._averages, tuple(shape))}

    def check_parameter(self, name: str, shape: Sequence[int]) -> None:
        self.optimizer.check_parameter(name, shape)

    def initial_state(self, name: str) -> float:
        """Return what the optimizer's state of this ``name`` begins with; nan for an average."""
        if name in self._averages:
            return float("nan")
        value: float = self.optimizer.initial_state(name)
        return value

    def learning_rate(self, step: int) -> float:
        rate: float = self.optimizer.learning_rate(step)
        return rate

    def resolved(self) -> Average:
        inner = self.optimizer.resolved()
        return Average(inner, ema=self.ema, mean=self.mean, start=self.start)

    def update(
        self,
        param: Array,
        grad: Array,
        state: State,
        *,
        step: int,
        lr: float | None = None,
        grad_scale: float = 1.0,
        out: Array | None = None,
    ) -> None:
        check_names("Average", state, self.state_names)
        own = {name: state[name] for name in self.optimizer.state_names}
        self.optimizer.update(param, grad, own, step=step, lr=lr, grad_scale=grad_scale, out=out)
        self._follow(param, state, step)

    def update_pieces(
        self,
        pieces: Sequence[ShardPiece],
        *,
        step: int,
        reduce: Reduce,
        lr: float | None = None,
        grad_scale: float = 1.0,
    ) -> None:
        inner = []
        for piece in pieces:
            own = {name: array for name, array in piece.state.items() if name not in self._averages}
            inner.append(replace(piece, state=own))
        self.optimizer.update_pieces(inner, step=step, reduce=reduce, lr=lr, grad_scale=grad_scale)
        for piece in pieces:
            self._follow(piece.param, piece.state, step)

    def update_block(
        self, param: Array, grad: Array, state: State, scratch: Scratch, *, step: int, lr: float
    ) -> None:
        """Update one block, without the averages; ``update`` has these follow."""
        self.optimizer.update_block(param, grad, state, scratch, step=step, lr=lr)

    def _follow(self, param: Array, state: State, step: int) -> None:
        """Have the averages follow the weights."""
        xp = array_module(param)
        most = BLOCK_ELEMENTS if on_host(param) else GPU_BLOCK_ELEMENTS
        work = xp.empty(min(param.size, most), param.dtype)
        count = step - self.start + 1
        weights = {"weights_mean": 1.0 / max(count, 1)}
        if self.ema is not None:
            weights["weights_ema"] = 1.0 if count <= 1 else 1.0 - self.ema
        for name in self._averages:
            for start in range(0, param.size, most):
                values, average = param[start : start + most], state[name][start : start + most]
                if weights[name] == 1.0:
                    average[...] = values
                    continue
                change = work[: values.size]
                xp.subtract(values, average, out=change)
                xp.multiply(change, weights[name], out=change)
                xp.add(average, change, out=average)
                xp.copyto(average, values, where=xp.isnan(average))
