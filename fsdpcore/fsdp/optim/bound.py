"""``BoundUpdate``: an optimizer's update of certain arrays, checked once and made step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, TypeAlias

from fsdpcore.core.array_module import array_module, on_host
from fsdpcore.core.buffers import Array
from fsdpcore.fsdp.gpu.kernel import run_pass
from fsdpcore.fsdp.optim.arrays import check_arrays, check_names, round_into, scaled_into
from fsdpcore.fsdp.optim.formulas import Update, formula

BLOCK_ELEMENTS = 128 * 1024
"""Elements updated at a time, small enough that a block of every array stays in the cache."""

GPU_BLOCK_ELEMENTS = 16 * 2**20
"""The same on a GPU, for ``update_block``: many, as each operation is a launch of its own."""

_Block: TypeAlias = "tuple[Array, Array, Mapping[str, Array], Array | None]"


class BlockOptimizer(Protocol):
    """What an update asks of an optimizer; ``Optimizer`` says what it means."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state arrays."""

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step."""

    def gpu_update(self, *, step: int, lr: float) -> tuple[Update, tuple[float, ...]] | None:
        """Return the same step in C, and its numbers."""

    def update_block(
        self,
        param: Array,
        grad: Array,
        state: Mapping[str, Array],
        scratch: tuple[Array, Array],
        *,
        step: int,
        lr: float,
    ) -> None:
        """Update one block."""


class BoundUpdate:
    """Updates the arrays that it was made with; their values may change in between, they may not.

    Args:
        optimizer: which update.
        param, grad, state, out: as of ``Optimizer.update``.

    Raises:
        ArgumentError: an array is wrong.
    """

    def __init__(
        self,
        optimizer: BlockOptimizer,
        param: Array,
        grad: Array,
        state: Mapping[str, Array],
        out: Array | None,
    ) -> None:
        check_names(type(optimizer).__name__, state, optimizer.state_names)
        check_arrays(param, grad, state, out)
        self._optimizer = optimizer
        self._whole: _Block = param, grad, state, out
        host = on_host(param)
        self._fused = not host and _has_gpu_update(type(optimizer))
        self._most = min(param.size, BLOCK_ELEMENTS if host else GPU_BLOCK_ELEMENTS)
        self._same = grad.dtype == param.dtype

    def __call__(self, *, step: int, lr: float | None, grad_scale: float) -> None:
        """Take a step; the arguments are those of ``Optimizer.update``, and right."""
        optimizer, param = self._optimizer, self._whole[0]
        rate = optimizer.learning_rate(step) if lr is None else lr
        if self._fused and self._in_one_pass(step, rate, grad_scale):
            return
        scratch = array_module(param).empty((2, self._most), param.dtype)
        for values, grad, state, out in self._blocks():
            size = values.size
            first, second = scratch if size == self._most else scratch[:, :size]
            scaled = grad
            if grad_scale != 1.0 or not self._same:
                scaled = scaled_into(first, grad, grad_scale)
            optimizer.update_block(values, scaled, state, (first, second), step=step, lr=rate)
            if out is not None:
                round_into(out, values)

    def _in_one_pass(self, step: int, rate: float, grad_scale: float) -> bool:
        """Have a kernel do all of it, if the optimizer has one."""
        fused = self._optimizer.gpu_update(step=step, lr=rate)
        if fused is None:
            return False
        param, grad, state, out = self._whole
        arrays = {"param": param, "grad": grad, **state}
        if out is not None:
            arrays["out"] = out
        kernel = formula(fused[0], rounded=out is not None)
        run_pass(kernel, arrays, (grad_scale, *fused[1]), param.dtype)
        return True

    def _blocks(self) -> Iterator[_Block]:
        param, grad, state, out = self._whole
        if param.size == self._most:
            if param.size:
                yield self._whole
            return
        for start in range(0, param.size, self._most):
            block = slice(start, start + self._most)
            states = {name: array[block] for name, array in state.items()}
            yield param[block], grad[block], states, None if out is None else out[block]


def _has_gpu_update(kind: type[BlockOptimizer]) -> bool:
    """Whether ``gpu_update`` is of the class that gave ``update_block``, or of one below it."""
    for each in kind.__mro__:
        if "gpu_update" in vars(each):
            return True
        if "update_block" in vars(each):
            return False
    return False
