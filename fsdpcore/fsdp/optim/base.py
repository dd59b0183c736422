"""What every optimizer is: a frozen policy that updates flat shards in place, block by block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fsdpcore.errors import ArgumentError, ConfigError
from fsdpcore.fsdp.checks import as_finite, as_int

BLOCK_ELEMENTS = 128 * 1024
"""Elements updated at a time, small enough that a block of every array stays in the cache."""

_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


@dataclass(frozen=True)
class Optimizer(ABC):
    """Elementwise update of 1-D shards; holds hyper-parameters only, never arrays.

    The caller owns parameters, gradients and state, so one object serves every shard. The result
    does not depend on where shards or blocks begin: updating an array whole or in any pieces
    gives the same bits. Shards are float32 or float64; for half-precision training keep a float32
    master shard and round it after the update.

    A new optimizer is a frozen dataclass that gives ``state_names`` and ``update_block``. ``lr``
    is the learning rate where ``update`` gets none. Hyper-parameters out of range raise
    ConfigError.
    """

    lr: float

    def __post_init__(self) -> None:
        self._set_finite("lr", minimum=0.0)

    @property
    @abstractmethod
    def state_names(self) -> tuple[str, ...]:
        """Names of the state arrays, each as large as the parameter."""

    @abstractmethod
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
        """Update one block of ``param`` and ``state`` in place.

        All arrays are 1-D, of one size and dtype, and were checked. ``grad`` is already scaled; it
        is either the caller's gradient, never to be written, or ``scratch[0]``. So ``scratch[0]``
        may be written only as the ``out`` of the last operation that reads ``grad``, while
        ``scratch[1]`` is free. Use elementwise operations with ``out=`` and Python float scalars.
        """

    def init_state(self, size: int, dtype: DTypeLike) -> dict[str, NDArray[Any]]:
        """Return new zeroed state arrays of ``size`` elements; the caller owns them.

        Raises ArgumentError if ``size`` is negative or ``dtype`` is not float32 or float64.
        """
        size = as_int(size, "size", minimum=0)
        resolved = np.dtype(dtype)
        _check_dtype(resolved, "optimizer state")
        return {name: np.zeros(size, resolved) for name in self.state_names}

    def update(
        self,
        param: NDArray[Any],
        grad: NDArray[Any],
        state: Mapping[str, NDArray[Any]],
        *,
        step: int,
        lr: float | None = None,
        grad_scale: float = 1.0,
    ) -> None:
        """Take one step: write ``param`` and the ``state`` arrays in place, only read ``grad``.

        ``param``, ``grad`` and each array of ``state`` (from ``init_state``) are contiguous 1-D
        arrays of one size and dtype that share no memory. ``step`` counts from 1. ``lr`` replaces
        the configured learning rate for this step. The gradient counts as ``grad * grad_scale``,
        which is how clipping is applied without another pass. Allocates at most two blocks of
        ``BLOCK_ELEMENTS``. Raises ArgumentError, with nothing written, if an argument is wrong.
        """
        step = as_int(step, "step (which counts from 1)", minimum=1)
        lr = self.lr if lr is None else as_finite(lr, "lr", minimum=0.0)
        grad_scale = as_finite(grad_scale, "grad_scale")
        self._check_arrays(param, grad, state)
        scratch = np.empty((2, min(param.size, BLOCK_ELEMENTS)), param.dtype)
        for start in range(0, param.size, BLOCK_ELEMENTS):
            block = slice(start, min(start + BLOCK_ELEMENTS, param.size))
            size = block.stop - start
            first, second = scratch[0, :size], scratch[1, :size]
            scaled = grad[block]
            if grad_scale != 1.0:
                scaled = np.multiply(scaled, grad_scale, out=first)
            states = {name: state[name][block] for name in self.state_names}
            self.update_block(param[block], scaled, states, (first, second), step=step, lr=lr)

    def _set_finite(self, field: str, *, minimum: float) -> None:
        """Replace a field by its value as a Python float; raise ConfigError if out of range."""
        what = f"{field} of {type(self).__name__}"
        value = as_finite(getattr(self, field), what, minimum=minimum, error=ConfigError)
        object.__setattr__(self, field, value)

    def _check_arrays(
        self, param: NDArray[Any], grad: NDArray[Any], state: Mapping[str, NDArray[Any]]
    ) -> None:
        if set(state) != set(self.state_names):
            raise ArgumentError(
                f"{type(self).__name__} needs the state arrays {sorted(self.state_names)}, got "
                f"{sorted(state)}; make them with init_state(size, dtype) of the same optimizer"
            )
        written = {"param": param} | {f"state[{name!r}]": state[name] for name in self.state_names}
        arrays = {**written, "grad": grad}
        for name, array in arrays.items():
            _check_array(name, array)
            if array.size != param.size or array.dtype != param.dtype:
                raise ArgumentError(
                    f"{name} has {array.size} elements of {array.dtype}, but param has "
                    f"{param.size} of {param.dtype}; all must agree"
                )
        for name, array in written.items():
            if not array.flags.writeable:
                raise ArgumentError(f"{name} is read-only, but update writes it in place")
        _check_no_overlap(arrays)


def _check_array(name: str, array: NDArray[Any]) -> None:
    if not isinstance(array, np.ndarray):
        raise ArgumentError(f"{name} must be a NumPy array, got {type(array).__name__}")
    if array.ndim != 1 or not array.flags.c_contiguous:
        raise ArgumentError(
            f"{name} must be 1-D and contiguous, got shape {array.shape} with strides "
            f"{array.strides}; pass the flat shard"
        )
    _check_dtype(array.dtype, name)


def _check_dtype(dtype: np.dtype[Any], what: str) -> None:
    if dtype not in _DTYPES:
        raise ArgumentError(
            f"{what} must be float32 or float64, got {dtype}; for half precision keep a float32 "
            "master shard and round it after the update"
        )


def _check_no_overlap(arrays: Mapping[str, NDArray[Any]]) -> None:
    """Raise ArgumentError if two arrays share memory; exact, because all are contiguous."""
    names = list(arrays)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            if np.may_share_memory(arrays[first], arrays[second]):
                raise ArgumentError(f"{first} and {second} share memory; each needs its own")
