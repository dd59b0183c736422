"""What every optimizer is: a frozen policy that updates flat shards in place, block by block."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.core.array_module import array_module
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_finite, as_int
from fsdpcore.core.errors import ArgumentError, ConfigError
from fsdpcore.fsdp.optim.arrays import check_dtype
from fsdpcore.fsdp.optim.bound import BoundUpdate
from fsdpcore.fsdp.optim.formulas import Update
from fsdpcore.fsdp.optim.pieces import PieceSpec, Reduce, ShardPiece
from fsdpcore.fsdp.optim.schedules import Schedule

State = Mapping[str, Array]
"""State arrays by name."""

Scratch = tuple[Array, Array]
"""Two arrays as large as a block, for what ``update_block`` computes on its way."""


@dataclass(frozen=True)
class Optimizer(ABC):
    """Elementwise update of 1-D shards; holds hyper-parameters only, never arrays.

    The caller owns parameters, gradients and state, so one object serves every shard. The result
    does not depend on where shards or blocks begin: updating an array whole or in any pieces
    gives the same bits. Shards are float32 or float64; for half-precision training keep a float32
    master shard, which ``update`` can round into another array on its way.

    A new optimizer is a frozen dataclass that gives ``state_names`` and ``update_block``. One that
    cannot be elementwise derives from ``WholeParameterOptimizer``. Ranks compare the ``repr`` of
    ``resolved()``.

    Arrays are NumPy's, or CuPy's on a GPU. There ``update_block`` works by CuPy's functions, which
    NumPy's call; with ``gpu_update`` an optimizer has all of it done in one kernel. The result is
    that of the host but for the last bits.

    Args:
        lr: the learning rate, a finite number of at least 0, or a ``Schedule`` of it. It counts
            where ``update`` gets no ``lr``.

    Raises:
        ConfigError: a hyper-parameter is out of range, or ``lr`` is a callable that is no
            ``Schedule``.
    """

    elementwise: ClassVar[bool] = True
    """Whether ``update`` may be given any range of the shard, across parameters."""

    takes_boxes: ClassVar[bool] = False
    """Whether ``update_pieces`` understands pieces of a box; does not matter if elementwise."""

    has_owners: ClassVar[bool] = False
    """Whether ``reduce`` of ``update_pieces`` has to be a ``Ranks``; not if elementwise."""

    any_order: ClassVar[bool] = False
    """Whether no bit that ``update_pieces`` makes depends on how parameters are cut, where
    ``reduce`` is an ``AnyOrder``; does not matter if elementwise, or with owners."""

    takes_lr: ClassVar[bool] = True
    """Whether ``lr`` of an update may replace its learning rate."""

    lr: float | Schedule

    def __post_init__(self) -> None:
        if not isinstance(self.lr, Schedule):
            if callable(self.lr):
                raise ConfigError(
                    f"lr of {type(self).__name__} must be a number or a fc.optim.Schedule, whose "
                    f"repr is the same on every rank; got {self.lr!r}: derive from Schedule"
                )
            self._set_finite("lr", minimum=0.0)

    @property
    @abstractmethod
    def state_names(self) -> tuple[str, ...]:
        """Names of the state arrays, each as large as the parameter."""

    @abstractmethod
    def update_block(
        self, param: Array, grad: Array, state: State, scratch: Scratch, *, step: int, lr: float
    ) -> None:
        """Update one block of ``param`` and ``state`` in place.

        ``update`` calls it, and has checked the arguments. All arrays are 1-D, of one size and
        dtype. Use elementwise operations with ``out=`` and Python float scalars.

        Args:
            param: the block of the parameter, float32 or float64; written.
            grad: its gradient, already scaled. It is either the caller's array, which is never to
                be written, or ``scratch[0]``.
            state: the blocks of the state arrays, by the names in ``state_names``; written.
            scratch: two arrays to compute in. ``scratch[0]`` may be written only as the ``out`` of
                the last operation that reads ``grad``; ``scratch[1]`` is free.
            step: the number of this step, from 1.
            lr: the learning rate of this step.
        """

    def gpu_update(self, *, step: int, lr: float) -> tuple[Update, tuple[float, ...]] | None:
        """Return the same step in C, and its numbers, or None to have ``update_block`` called.

        It counts only where it was written for the ``update_block`` in use: what overrides that
        one alone has its own called on a GPU, too.

        Args:
            step: the number of this step, from 1.
            lr: the learning rate of this step.

        Returns:
            The formula in C, and the values of its scalars in their order. None, as here, has
            ``update_block`` called on the arrays of the GPU.
        """
        return None

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, if ``update`` gets none.

        Args:
            step: the number of the step, from 1.

        Raises:
            ArgumentError: ``step`` is no integer of at least 1.
            ConfigError: a ``Schedule`` gives a rate that is negative or not finite.
        """
        if isinstance(self.lr, Schedule):
            return self.lr(step)
        as_int(step, "step (which counts from 1)", minimum=1)
        return self.lr

    def resolved(self) -> Optimizer:
        """Return the same policy with everything decided that depends on what is installed."""
        return self

    def state_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the shape of each state array of a whole parameter.

        Args:
            shape: of the whole parameter.

        Returns:
            The shapes by the names of the state arrays. An array of the parameter's own shape is
            sharded as the parameter is. Any other is smaller, and every rank holds all of it.
        """
        return dict.fromkeys(self.state_names, tuple(shape))

    def check_parameter(self, name: str, shape: Sequence[int]) -> None:  # noqa: B027 - most take all
        """Refuse a parameter that this optimizer cannot update; the engine asks when it is made.

        Args:
            name: of the parameter, ``unit.parameter``.
            shape: of the whole parameter.

        Raises:
            ArgumentError: the optimizer cannot update it. As it stands it can update all.
        """

    def initial_state(self, name: str) -> float:
        """Return the value that a state array begins with: 0, as it stands.

        Args:
            name: of the state array, one of ``state_names``.
        """
        return 0.0

    def init_state(self, size: int, dtype: DTypeLike) -> dict[str, Array]:
        """Return new state arrays, by name, on the host; the caller owns them.

        Args:
            size: elements of each array.
            dtype: of each array, float32 or float64, as the parameter's.

        Raises:
            ArgumentError: ``size`` is negative, or ``dtype`` is not one of these two.
        """
        size = as_int(size, "size", minimum=0)
        resolved = np.dtype(dtype)
        check_dtype(resolved, "optimizer state")
        return {name: self._new_state(name, size, resolved) for name in self.state_names}

    def init_pieces(
        self, specs: Sequence[PieceSpec], dtype: DTypeLike
    ) -> dict[str, dict[str, Array]]:
        """Return new state arrays, flat, by parameter and name; does not communicate.

        They are on the host, and the caller owns them.

        Args:
            specs: the pieces of parameters that this rank updates.
            dtype: of all arrays, float32 or float64.

        Raises:
            ArgumentError: ``dtype`` is not one of these two.
        """
        resolved = np.dtype(dtype)
        check_dtype(resolved, "optimizer state")
        states: dict[str, dict[str, Array]] = {}
        for spec in specs:
            states[spec.name] = {
                name: self._new_state(
                    name, spec.size if shape == spec.shape else math.prod(shape), resolved
                )
                for name, shape in self.state_shapes(spec.shape).items()
            }
        return states

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
        """Take one step: write ``param`` and the ``state`` arrays in place, only read ``grad``.

        The arrays are contiguous, 1-D and of one size. No two of them share memory. All of them are
        on the host, or on the GPU that is the current device. There the work is enqueued on the
        current stream, as one kernel that reads and writes every element once (for the optimizers
        that have a ``gpu_update``), and the host does not wait for it. It allocates at most two
        blocks of ``BLOCK_ELEMENTS``, on a GPU of ``GPU_BLOCK_ELEMENTS`` or, with that kernel,
        nothing.

        Args:
            param: the parameters, float32 or float64; written.
            grad: their gradients, of that or a narrower floating dtype (float16, bfloat16). Blocks
                of it are made as wide as ``param`` before anything is computed.
            state: the arrays from ``init_state``, of the dtype of ``param``; written.
            step: the number of this step, from 1.
            lr: replaces the configured learning rate for this step; None keeps that.
            grad_scale: the gradient counts as ``grad * grad_scale``, which is how clipping and the
                loss scale are applied without another pass.
            out: if given, it gets the new ``param``, rounded to its own floating dtype, which is no
                wider than that of ``param``. What is too large for it becomes inf.

        Raises:
            ArgumentError: an argument is wrong; nothing was written.
        """
        step = as_int(step, "step (which counts from 1)", minimum=1)
        rate = self.learning_rate(step) if lr is None else as_finite(lr, "lr", minimum=0.0)
        grad_scale = as_finite(grad_scale, "grad_scale")
        BoundUpdate(self, param, grad, state, out)(step=step, lr=rate, grad_scale=grad_scale)

    def update_pieces(
        self,
        pieces: Sequence[ShardPiece],
        *,
        step: int,
        reduce: Reduce,
        lr: float | None = None,
        grad_scale: float = 1.0,
    ) -> None:
        """Take one step on parts of parameters, of which the ranks hold the rest.

        A collective, through ``reduce``, unless the optimizer is ``elementwise``.

        Args:
            pieces: one for every parameter that this optimizer updates in a unit, in the same
                order on all ranks, also where this rank holds nothing of it.
            step: the number of this step, from 1.
            reduce: sums over the ranks; called only where the optimizer is not ``elementwise``.
                A ``Ranks``, which can do more, where it ``has_owners``.
            lr: replaces the configured learning rate for this step; None keeps that.
            grad_scale: the gradients count as ``grad * grad_scale``.

        Raises:
            ArgumentError: an argument is wrong. Other ranks then wait for this one in ``reduce``.
        """
        for piece in pieces:
            check_piece(piece)
            self.update(
                piece.param,
                piece.grad,
                piece.state,
                step=step,
                lr=lr,
                grad_scale=grad_scale,
                out=piece.out,
            )

    def _new_state(self, name: str, size: int, dtype: np.dtype[Any]) -> Array:
        value = self.initial_state(name)
        # Zeroed memory is given out by the system page by page, when it is first written.
        return np.full(size, value, dtype) if value else np.zeros(size, dtype)

    def _set_finite(self, field: str, *, minimum: float) -> None:
        """Replace a field by its value as a Python float; raise ConfigError if out of range."""
        what = f"{field} of {type(self).__name__}"
        value = as_finite(getattr(self, field), what, minimum=minimum, error=ConfigError)
        object.__setattr__(self, field, value)

    def _set_positive(self, field: str, why: str) -> None:
        """The same for a field that may not be 0 either; ``why`` ends the message."""
        self._set_finite(field, minimum=0.0)
        if getattr(self, field) == 0.0:
            raise ConfigError(f"{field} of {type(self).__name__} must be above 0: {why}")

    def _set_fraction(self, field: str) -> None:
        """The same for a field in [0, 1)."""
        self._set_finite(field, minimum=0.0)
        value = getattr(self, field)
        if not value < 1.0:
            raise ConfigError(f"{field} of {type(self).__name__} must be below 1, got {value:g}")

    def _set_flag(self, field: str) -> None:
        value, name = getattr(self, field), type(self).__name__
        if not isinstance(value, bool):
            raise ConfigError(f"{field} of {name} must be True or False, got {value!r}")

    def _set_betas(self) -> None:
        """Replace ``betas`` by a tuple of two Python floats in [0, 1)."""
        betas, name = self.__dict__["betas"], type(self).__name__
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ConfigError(f"betas of {name} must be two numbers, got {betas!r}")
        values = tuple(
            as_finite(beta, f"betas[{i}] of {name}", minimum=0.0, error=ConfigError)
            for i, beta in enumerate(betas)
        )
        if not max(values) < 1.0:
            raise ConfigError(f"betas of {name} must be below 1, got {values}")
        object.__setattr__(self, "betas", values)


def check_piece(piece: ShardPiece) -> None:
    """Raise ArgumentError unless the piece is a part of its parameter and has its size."""
    total = math.prod(piece.shape) if piece.box is None else piece.box.size
    if not 0 <= piece.start <= piece.stop <= total:
        raise ArgumentError(
            f"the piece of {piece.name!r} is [{piece.start}, {piece.stop}), but a parameter of "
            f"shape {piece.shape if piece.box is None else piece.box.shape} has {total} elements"
        )
    if array_module(piece.param) is None or piece.param.size != piece.size:
        raise ArgumentError(
            f"the piece of {piece.name!r} needs the {piece.size} elements of "
            f"[{piece.start}, {piece.stop}) as param, got {np.shape(piece.param)}"
        )


def ema(average: Array, beta: float, values: Array, work: Array) -> None:
    """Compute ``average = beta * average + (1 - beta) * values`` in place.

    ``work`` is as large and gets overwritten; it may be ``values``.
    """
    np.multiply(average, beta, out=average)
    np.multiply(values, 1.0 - beta, out=work)
    np.add(average, work, out=average)


def decayed(
    grad: Array,
    param: Array,
    weight_decay: float,
    scratch: Scratch,
) -> Array:
    """Return ``grad + weight_decay * param``, in ``scratch[0]`` unless there is no decay."""
    if weight_decay == 0.0:
        return grad
    result, work = scratch
    np.multiply(param, weight_decay, out=work)
    np.add(grad, work, out=result)
    return result
