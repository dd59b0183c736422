"""Optimizers of PyTorch, on tensors that share the memory of shards."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ConfigError, MissingDependencyError
from fsdpcore.fsdp.optim.foreign import Foreign
from fsdpcore.fsdp.optim.probe import Rule
from fsdpcore.fsdp.optim.schedules import Schedule


@dataclass(frozen=True, eq=False, init=False)
class Torch(Foreign):
    """An optimizer of PyTorch over shards: ``fc.optim.Torch(torch.optim.AdamW, lr=1e-3)``.

    It must be elementwise, which is tried out when this is made, and needs no closure. Parameters,
    gradients and state are NumPy's arrays, which its tensors share. State arrays have PyTorch's
    names, such as ``exp_avg``; counts and other numbers follow from ``engine.steps``. Computed on
    the host, by PyTorch's threads.

    Args:
        optimizer: a class, such as ``torch.optim.AdamW``.
        lr: a number, or a ``fc.optim.Schedule`` in place of PyTorch's schedulers; by default that
            of the class. ``step.update(lr=...)`` replaces it.
        **options: as of the class: ``weight_decay=0.01``.

    Raises:
        ConfigError: it is no such class, or not elementwise; it says what differed.
        MissingDependencyError: PyTorch is not installed.

    Example::

        rate = fc.optim.schedules.Cosine(3e-4, warmup=100, total=1000)
        engine = fc.FSDP(units, backend, optimizer=fc.optim.Torch(torch.optim.AdamW, lr=rate))
    """

    optimizer: type
    options: tuple[tuple[str, Any], ...]

    def __init__(
        self, optimizer: type, *, lr: float | Schedule | None = None, **options: Any
    ) -> None:
        if not (isinstance(optimizer, type) and callable(getattr(optimizer, "step", None))):
            raise ConfigError(
                "Torch takes a class of PyTorch and its options: "
                f"fc.optim.Torch(torch.optim.AdamW, lr=1e-3); got {optimizer!r:.80}"
            )
        parameter = inspect.signature(optimizer).parameters.get("lr")
        default = None if parameter is None else parameter.default
        if lr is None and not isinstance(default, (int, float)):
            raise ConfigError(f"{optimizer.__name__} has no learning rate of its own; give lr=...")
        object.__setattr__(self, "lr", default if lr is None else lr)
        object.__setattr__(self, "optimizer", optimizer)
        object.__setattr__(self, "options", tuple(sorted(options.items())))
        self.__post_init__()
        self._settle(_TorchRule(optimizer, options), f"{optimizer.__name__} of PyTorch")

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.optimizer, self.lr, dict(self.options))

    def __repr__(self) -> str:
        kind = f"{self.optimizer.__module__}.{self.optimizer.__qualname__}"
        options = "".join(f", {name}={value!r}" for name, value in self.options)
        return f"Torch({kind}, lr={self.lr!r}{options})"


def _made(optimizer: type, lr: float | Schedule, options: dict[str, Any]) -> Torch:
    """Make one again, in another process."""
    return Torch(optimizer, lr=lr, **options)


class _TorchRule(Rule):
    def __init__(self, optimizer: type, options: dict[str, Any]) -> None:
        try:
            import torch
        except ImportError as error:
            raise MissingDependencyError(
                "fc.optim.Torch needs PyTorch: pip install torch", "pip install torch"
            ) from error
        self._torch: Any = torch
        self._optimizer: Any = optimizer
        self._options = options
        self._keys: list[str] | None = None

    def paths(self) -> Sequence[tuple[Any, ...]]:
        return [(key,) for key in self._keys or ()]

    def advance(
        self, param: Array, grad: Array, leaves: Sequence[Any] | None, lr: float
    ) -> tuple[Array | None, Sequence[Any]]:
        torch = self._torch
        tensor = torch.from_numpy(param)
        tensor.grad = torch.from_numpy(grad)
        optimizer = self._optimizer([tensor], lr=lr, **self._options)
        if leaves is not None:
            optimizer.state[tensor] = {
                key: torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else _own(leaf)
                for key, leaf in zip(self._keys or (), leaves, strict=True)
            }
        optimizer.step()
        state = {key: leaf for key, leaf in optimizer.state[tensor].items() if leaf is not None}
        if self._keys is None:
            self._keys = list(state)
        return None, [_leaf(state[key]) for key in self._keys]


def _own(leaf: Any) -> Any:
    """Return a number of the state as a tensor, or a number, of its own."""
    return leaf.clone() if hasattr(leaf, "clone") else leaf


def _leaf(value: Any) -> Any:
    """Return an array of the state as NumPy's, which shares its memory; numbers as they are."""
    return value.numpy() if hasattr(value, "numpy") and value.dim() else value
