"""Muon: momentum made orthogonal, matrix by matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fsdpcore.core.array_module import array_module, on_host
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_finite, as_int
from fsdpcore.core.errors import ArgumentError, ConfigError
from fsdpcore.fsdp.optim.arrays import check_arrays, check_names, round_into, scaled_into
from fsdpcore.fsdp.optim.base import check_piece
from fsdpcore.fsdp.optim.bound import BLOCK_ELEMENTS, GPU_BLOCK_ELEMENTS
from fsdpcore.fsdp.optim.pieces import Alone, Ranks, Reduce, ShardPiece
from fsdpcore.fsdp.optim.schedules import Schedule
from fsdpcore.fsdp.optim.whole import WholeParameterOptimizer

_ADJUSTMENTS = ("original", "match_rms_adamw")


@dataclass(frozen=True)
class Muon(WholeParameterOptimizer):
    """Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).

    As PyTorch documents it for ``torch.optim.Muon``. With gradient g of a matrix p of R rows and C
    columns::

        b = momentum * b + (1 - momentum) * g
        u = momentum * b + (1 - momentum) * g     with nesterov, else u = b
        p = p * (1 - lr * weight_decay) - lr * s * orthogonal(u)
        s = sqrt(max(1, R / C))                   "original"
        s = 0.2 * sqrt(max(R, C))                 "match_rms_adamw": Liu et al., "Muon is scalable
                                                  for LLM training" (2025)

    R are outputs where weights are (outputs, inputs), as PyTorch's are. ``orthogonal`` is the
    Newton-Schulz iteration: ``x = u / max(norm(u), eps)``, then ``ns_steps`` times ``x = a * x + (b
    * y + c * y @ y) @ x`` with ``y = x @ x.T`` and ``ns_coefficients`` (a, b, c), which brings the
    singular values near 1. It is computed in the dtype of the parameters, float32 as a rule, where
    PyTorch's is in bfloat16.

    Only of matrices, the weights of hidden layers; all else, embeddings and the last layer too,
    is for another optimizer: ``{"*.w": Muon(lr=0.02), "*": AdamW(lr=3e-4)}``. ArgumentError for
    a parameter that is no matrix, or of which tensor-parallel ranks have boxes.

    An iteration needs the whole matrix. The matrices are dealt out over the n ranks that share
    them, unit by unit, the costliest first, each to the rank that has least to do. Each rank sends
    the parts of u to the owners, and they send back what they have made of them: two
    ``all_to_all_v`` per unit, in which a rank sends ``2 * N / n * (n - 1) / n`` elements on
    average, of the N that the unit's matrices have. Having all of them everywhere would be n / 2
    times as much, and the same iterations on every rank. That is done with n units together, so
    that no rank waits for the owner of a single matrix. Meanwhile a rank has its parts of u, the
    matrices that it owns and the work of one of them. Where every rank has all parameters
    (``no_shard``), each one computes all of it. The result has the same bits with every strategy,
    as far as a matrix product has: with the same BLAS, on as many threads, on CPUs of one kind.

    State: ``momentum_buffer`` (b), sharded.

    Args:
        lr: the learning rate, at least 0, or a ``Schedule`` of it; by default 1e-3.
        weight_decay: p shrinks by ``lr * weight_decay`` of itself in each step; at least 0, by
            default 0.1.
        momentum: how much of b stays from step to step, in [0, 1); by default 0.95.
        nesterov: look ahead by the momentum; by default True.
        ns_coefficients: three finite numbers, a, b and c of the iteration; by default 3.4445,
            -4.7750 and 2.0315.
        eps: the least norm that u is divided by; above 0, by default 1e-7.
        ns_steps: iterations, from 1 to 99; by default 5.
        adjust_lr_fn: which s: ``"original"``, the default, or ``"match_rms_adamw"``. Where weights
            are (inputs, outputs), as for ``x @ w``, take the second, to which that does not matter.

    Raises:
        ConfigError: a hyperparameter is out of its range, or not finite.
    """

    has_owners: ClassVar[bool] = True

    lr: float | Schedule = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str = "original"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_finite("weight_decay", minimum=0.0)
        self._set_fraction("momentum")
        self._set_flag("nesterov")
        self._set_positive("eps", "a zero gradient would give 0 / 0")
        given = self.ns_coefficients
        if not isinstance(given, (tuple, list)) or len(given) != 3:
            raise ConfigError(f"ns_coefficients of Muon must be three numbers, got {given!r}")
        numbers = [as_finite(each, "ns_coefficients of Muon", error=ConfigError) for each in given]
        object.__setattr__(self, "ns_coefficients", tuple(numbers))
        if isinstance(self.ns_steps, bool) or self.ns_steps not in range(1, 100):
            raise ConfigError(f"ns_steps of Muon must be from 1 to 99, got {self.ns_steps!r}")
        if self.adjust_lr_fn not in _ADJUSTMENTS:
            raise ConfigError(
                f"adjust_lr_fn of Muon must be one of {', '.join(map(repr, _ADJUSTMENTS))}, got "
                f"{self.adjust_lr_fn!r}"
            )

    @property
    def state_names(self) -> tuple[str, ...]:
        """The moving mean of gradients."""
        return ("momentum_buffer",)

    def state_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        return {"momentum_buffer": tuple(shape)}

    def check_parameter(self, name: str, shape: Sequence[int]) -> None:
        """Raise ArgumentError for a parameter that is no matrix."""
        if len(shape) != 2:
            raise ArgumentError(
                f"Muon updates matrices, but {name} has the shape {tuple(shape)}; have it updated "
                "by another optimizer, with patterns of names: "
                'optimizer={"*.w": Muon(lr=0.02), "*": AdamW(lr=3e-4)}'
            )

    def update_pieces(
        self,
        pieces: Sequence[ShardPiece],
        *,
        step: int,
        reduce: Reduce,
        lr: float | None = None,
        grad_scale: float = 1.0,
    ) -> None:
        """Take one step, as ``Optimizer.update_pieces`` says.

        With a ``reduce`` that is no ``Ranks``, all pieces are whole.
        """
        step = as_int(step, "step (which counts from 1)", minimum=1)
        rate = self.learning_rate(step) if lr is None else as_finite(lr, "lr", minimum=0.0)
        grad_scale = as_finite(grad_scale, "grad_scale")
        for piece in pieces:
            self._check(piece)
        ranks = reduce if isinstance(reduce, Ranks) else Alone(reduce)
        ranks.by_owners(
            pieces,
            give=lambda piece, out: self._direction(piece, out, grad_scale),
            make=self._orthogonalise,
            take=lambda piece, direction: self._apply(piece, direction, rate),
        )

    def _direction(self, piece: ShardPiece, out: Array, grad_scale: float) -> None:
        """Update the momentum, and write what is to be made orthogonal."""
        mean = piece.state["momentum_buffer"]
        for block, work in _blocks(out):
            grad = scaled_into(out[block], piece.grad[block], grad_scale)
            average = np.multiply(mean[block], self.momentum, out=mean[block])
            np.multiply(grad, 1.0 - self.momentum, out=work)
            np.add(average, work, out=average)
            if self.nesterov:
                np.multiply(average, self.momentum, out=out[block])
                np.add(out[block], work, out=out[block])
            else:
                out[block] = average

    def _orthogonalise(self, matrix: Array) -> None:
        """Replace a matrix by one with the same singular vectors and singular values near 1."""
        if not matrix.size:
            return
        module: Any = array_module(matrix)
        a, b, c = self.ns_coefficients
        wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        x = module.empty(wide.shape, matrix.dtype)
        change = np.multiply(wide, wide, out=module.empty(wide.shape, matrix.dtype))
        norm = np.maximum(np.sqrt(change.sum(dtype=np.float64)), self.eps)
        np.divide(wide, norm.astype(matrix.dtype), out=x)
        gram, square = (module.empty((len(x), len(x)), matrix.dtype) for _ in range(2))
        for _ in range(self.ns_steps):
            np.matmul(x, x.T, out=gram)
            np.matmul(gram, gram, out=square)
            np.multiply(square, c, out=square)
            np.multiply(gram, b, out=gram)
            np.add(square, gram, out=square)
            np.matmul(square, x, out=change)
            np.multiply(x, a, out=x)
            np.add(x, change, out=x)
        matrix[...] = x if wide is matrix else x.T

    def _apply(self, piece: ShardPiece, direction: Array, rate: float) -> None:
        rows, columns = piece.shape
        if self.adjust_lr_fn == "original":
            ratio = math.sqrt(max(1.0, rows / columns)) if columns else 1.0
        else:
            ratio = 0.2 * math.sqrt(max(rows, columns))
        keep = 1.0 - rate * self.weight_decay
        for block, work in _blocks(direction):
            param = piece.param[block]
            np.multiply(direction[block], rate * ratio, out=work)
            if keep != 1.0:
                np.multiply(param, keep, out=param)
            np.subtract(param, work, out=param)
            if piece.out is not None:
                round_into(piece.out[block], param)

    def _check(self, piece: ShardPiece) -> None:
        check_piece(piece)
        self.check_parameter(piece.name, piece.shape)
        check_names(f"Muon, for parameter {piece.name!r},", piece.state, self.state_names)
        try:
            check_arrays(piece.param, piece.grad, piece.state, piece.out)
        except ArgumentError as exc:
            raise ArgumentError(f"parameter {piece.name!r}: {exc}") from exc


def _blocks(array: Array) -> Iterator[tuple[slice, Array]]:
    """Give ranges of a flat array, each with scratch memory of its size."""
    most = BLOCK_ELEMENTS if on_host(array) else GPU_BLOCK_ELEMENTS
    module: Any = array_module(array)
    scratch = module.empty(min(most, array.size), array.dtype)
    for start in range(0, array.size, most):
        stop = min(start + most, array.size)
        yield slice(start, stop), scratch[: stop - start]
