"""Adafactor: second moments of a matrix from the means of its rows and columns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from fsdpcore.core.array_module import array_module, on_host
from fsdpcore.core.checks import as_finite, as_int
from fsdpcore.core.errors import ArgumentError, ConfigError
from fsdpcore.fsdp.optim.arrays import check_arrays, check_names, round_into
from fsdpcore.fsdp.optim.base import check_piece
from fsdpcore.fsdp.optim.blocks import Matrices
from fsdpcore.fsdp.optim.exact import Float64, add_squares, note_largest
from fsdpcore.fsdp.optim.moments import Elementwise, Factored, MomentScratch, SecondMoments
from fsdpcore.fsdp.optim.pieces import AnyOrder, Reduce, ShardPiece
from fsdpcore.fsdp.optim.schedules import InverseSqrt, Schedule
from fsdpcore.fsdp.optim.whole import WholeParameterOptimizer

_RELATIVE_STEP = InverseSqrt(1e-2)
_SMALLEST_EPS = 1e-37  # what float32 state still holds without losing digits
_Blocks = Callable[[int], Iterator[Float64]]


@dataclass(frozen=True)
class Adafactor(WholeParameterOptimizer):
    """Shazeer & Stern, "Adafactor: adaptive learning rates with sublinear memory cost" (ICML 2018).

    Algorithms 4 and 5. With gradient g, step t, learning rate rho, for a matrix p of n elements::

        beta2 = 1 - t**-decay_rate
        r = beta2 * r + (1 - beta2) * mean over columns of (g * g + eps[0])      one per row
        c = beta2 * c + (1 - beta2) * mean over rows    of (g * g + eps[0])      one per column
        u = g / sqrt(r * c / mean(r))
        u = u / max(1, rms(u) / clip_threshold)             rms(x) = sqrt(sum(x * x) / n)
        u = max(eps[1], rms(p)) * rho * u                   with scale_parameter, else rho * u
        m = beta1 * m + (1 - beta1) * u                     m = u if beta1 is None
        p = p * (1 - rho * weight_decay) - m

    A parameter with more than two axes is a batch of matrices, with the last two as rows and
    columns; one with fewer has a second moment per element.

    All sums are over the whole parameter, so that the number of ranks matters to rounding only:
    one or two sums over the ranks per call of ``update_pieces``, all parameters together; as often
    the host waits for a GPU, if the arrays are there. With ``virtual_ranks`` these sums are exact,
    for which the ranks tell each other their largest squares first, and the number of ranks changes
    no bit. It computes in float64, whatever the dtype.

    State: ``row_var`` (r) and ``col_var`` (c) on every rank, or ``variance`` sharded; ``exp_avg``
    (m) sharded, with ``beta1``.

    Args:
        lr: rho, at least 0, or a ``Schedule`` of it. By default the paper's relative step,
            ``schedules.InverseSqrt(1e-2)``; a learning rate of your own goes with
            ``scale_parameter=False``.
        eps: two numbers. The first is added to squares of gradients, and is at least 1e-37. The
            second, at least 0, is the least scale of a parameter. By default 1e-30 and 1e-3.
        clip_threshold: the largest root of the mean square that u may have; above 0, by default 1.
            None does not clip.
        decay_rate: how fast beta2 goes to 1; above 0, by default 0.8.
        beta1: how much of m stays from step to step, in [0, 1). By default None, for no m.
        scale_parameter: multiply a step by the root of the parameter's mean square; by default
            True.
        weight_decay: p shrinks by ``rho * weight_decay`` of itself in each step; at least 0, by
            default 0. The paper has none; this is AdamW's.

    Raises:
        ConfigError: a hyperparameter is out of its range, or not finite.
    """

    takes_boxes: ClassVar[bool] = True
    any_order: ClassVar[bool] = True

    lr: float | Schedule = _RELATIVE_STEP
    eps: tuple[float, float] = (1e-30, 1e-3)
    clip_threshold: float | None = 1.0
    decay_rate: float = 0.8
    beta1: float | None = None
    scale_parameter: bool = True
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.eps, (tuple, list)) or len(self.eps) != 2:
            raise ConfigError(f"eps of Adafactor must be two numbers, got {self.eps!r}")
        eps = tuple(
            as_finite(value, f"eps[{i}] of Adafactor", minimum=minimum, error=ConfigError)
            for i, (value, minimum) in enumerate(zip(self.eps, (_SMALLEST_EPS, 0.0), strict=True))
        )
        object.__setattr__(self, "eps", eps)
        self._set_positive("decay_rate", "the second moments would never change")
        self._set_finite("weight_decay", minimum=0.0)
        self._set_flag("scale_parameter")
        if self.clip_threshold is not None:
            self._set_positive("clip_threshold", "nothing would be left; None does not clip")
        if self.beta1 is not None:
            self._set_fraction("beta1")

    @property
    def state_names(self) -> tuple[str, ...]:
        """All that a parameter may have; ``state_shapes`` says which one has."""
        names = ("row_var", "col_var", "variance")
        return names if self.beta1 is None else (*names, "exp_avg")

    def state_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        shape = tuple(shape)
        if _is_factored(shape):
            shapes = {"row_var": shape[:-1], "col_var": (*shape[:-2], shape[-1])}
        else:
            shapes = {"variance": shape}
        return shapes if self.beta1 is None else {**shapes, "exp_avg": shape}

    def update_pieces(
        self,
        pieces: Sequence[ShardPiece],
        *,
        step: int,
        reduce: Reduce,
        lr: float | None = None,
        grad_scale: float = 1.0,
    ) -> None:
        step = as_int(step, "step (which counts from 1)", minimum=1)
        rate = self.learning_rate(step) if lr is None else as_finite(lr, "lr", minimum=0.0)
        grad_scale = as_finite(grad_scale, "grad_scale")
        for piece in pieces:
            self._check(piece)
        scratch = MomentScratch.of(pieces)
        moments = [
            (Factored if _is_factored(piece.shape) else Elementwise)(piece, grad_scale, scratch)
            for piece in pieces
        ]
        scales = self._settle(pieces, moments, 1.0 - step**-self.decay_rate, reduce, scratch)
        divisors = self._divisors(pieces, moments, reduce, scratch)
        for piece, parts, scale, divisor in zip(pieces, moments, scales, divisors, strict=True):
            self._apply(piece, parts, rate, rate * scale / divisor, scratch.second)

    def _settle(
        self,
        pieces: Sequence[ShardPiece],
        moments: Sequence[SecondMoments],
        beta2: float,
        reduce: Reduce,
        scratch: MomentScratch,
    ) -> list[float]:
        """Update the second moments; return by what the rate of each parameter is multiplied."""
        bounds = [0, *itertools.accumulate(parts.sums for parts in moments)]
        # Behind those of the moments are the squares of parameters.
        own = _Squares(pieces if self.scale_parameter else [], scratch)
        largest = None
        if isinstance(reduce, AnyOrder):
            largest = _zeros(pieces, bounds[-1] + own.size // 2)
            for parts, place in zip(moments, itertools.pairwise(bounds), strict=True):
                parts.compare(largest[slice(*place)])
            own.compare(largest[bounds[-1] :], own.params)
            _reduced(largest, reduce.largest)
        sums = _zeros(pieces, bounds[-1] + own.size)
        for parts, place in zip(moments, itertools.pairwise(bounds), strict=True):
            most = None if largest is None else largest[slice(*place)]
            parts.measure(sums[slice(*place)], most)
        most = None if largest is None else largest[bounds[-1] :]
        own.measure(sums[bounds[-1] :], most, own.params)
        totals = _reduced(sums, reduce)[bounds[-1] :]
        for parts, place in zip(moments, itertools.pairwise(bounds), strict=True):
            parts.settle(sums[slice(*place)], beta2, self.eps[0])
        if not self.scale_parameter:
            return [1.0] * len(pieces)
        return [max(self.eps[1], rms) for rms in own.rms(totals)]

    def _divisors(
        self,
        pieces: Sequence[ShardPiece],
        moments: Sequence[SecondMoments],
        reduce: Reduce,
        scratch: MomentScratch,
    ) -> list[float]:
        """Return by what the directions of each parameter are divided to clip them."""
        if self.clip_threshold is None or not pieces:
            return [1.0] * len(pieces)
        squares, largest = _Squares(pieces, scratch), None

        def directions(number: int) -> Iterator[Float64]:
            return (direction for _, direction in moments[number].directions())

        if isinstance(reduce, AnyOrder):
            largest = _zeros(pieces, len(pieces))
            squares.compare(largest, directions)
            _reduced(largest, reduce.largest)
        sums = _zeros(pieces, squares.size)
        squares.measure(sums, largest, directions)
        totals = _reduced(sums, reduce)
        return [max(1.0, rms / self.clip_threshold) for rms in squares.rms(totals)]

    def _apply(
        self,
        piece: ShardPiece,
        moments: SecondMoments,
        rate: float,
        size: float,
        scratch: Float64,
    ) -> None:
        keep = 1.0 - rate * self.weight_decay
        for local, direction in moments.directions():
            change = np.multiply(direction, size, out=direction)
            param = piece.param[local]
            if self.beta1 is not None:
                mean = piece.state["exp_avg"][local]
                np.multiply(change, 1.0 - self.beta1, out=change)
                np.multiply(mean, self.beta1, out=scratch[: change.size])
                np.add(change, scratch[: change.size], out=change)
                np.copyto(mean, change, casting="same_kind")
            if keep != 1.0:
                np.multiply(param, keep, out=param)
            np.subtract(param, change, out=param)
            if piece.out is not None:
                round_into(piece.out[local], param)

    def _check(self, piece: ShardPiece) -> None:
        check_piece(piece)
        shapes = self.state_shapes(piece.shape)
        name = f"Adafactor, for parameter {piece.name!r},"
        check_names(name, piece.state, shapes)
        sizes = {
            name: math.prod(shape) for name, shape in shapes.items() if shape != tuple(piece.shape)
        }
        try:
            check_arrays(piece.param, piece.grad, piece.state, piece.out, sizes=sizes)
        except ArgumentError as exc:
            raise ArgumentError(f"parameter {piece.name!r}: {exc}") from exc


def _is_factored(shape: Sequence[int]) -> bool:
    return len(shape) >= 2 and min(Matrices.of(shape)) > 0


class _Squares:
    """Sums of squares of all elements of a parameter, for some parameters.

    Each is two numbers, whose sum it is, so that it can be exact (see ``exact.add_squares``).

    Attributes:
        size: of all these numbers.
    """

    def __init__(self, pieces: Sequence[ShardPiece], scratch: MomentScratch) -> None:
        self._pieces = pieces
        self._scratch = scratch
        self._counts = [math.prod(piece.shape) for piece in pieces]
        self.size = 2 * len(pieces)

    def params(self, number: int) -> Iterator[Float64]:
        """Yield the blocks of a parameter itself, in scratch memory."""
        piece = self._pieces[number]
        for local in self._scratch.blocks(piece.size):
            values = self._scratch.first[: local.stop - local.start]
            np.copyto(values, piece.param[local])
            yield values

    def compare(self, largest: Float64, blocks: _Blocks) -> None:
        """Find the largest square of each parameter."""
        for number in range(len(self._pieces)):
            for values in blocks(number):
                note_largest(largest[number : number + 1], values)

    def measure(self, sums: Float64, largest: Float64 | None, blocks: _Blocks) -> None:
        """Write this rank's sums to ``sums``, which is zero; exact ones with ``largest``."""
        for number, count in enumerate(self._counts):
            own = sums[2 * number : 2 * number + 2]
            most = None if largest is None else largest[number : number + 1]
            for values in blocks(number):
                add_squares(own, values, most, count, self._scratch.second)

    def rms(self, totals: Float64) -> list[float]:
        """Return the root of the mean square of each parameter, from the sums of all ranks."""
        pairs = totals.reshape(-1, 2).tolist()
        return [
            math.sqrt((coarse + fine) / max(1, count))
            for (coarse, fine), count in zip(pairs, self._counts, strict=True)
        ]


def _zeros(pieces: Sequence[ShardPiece], size: int) -> Float64:
    """Return zeros where the pieces are."""
    zeros: Float64 = (array_module(pieces[0].param) if pieces else np).zeros(size, np.float64)
    return zeros


def _reduced(sums: Any, reduce: Reduce) -> Float64:
    """Have ``sums`` summed over the ranks, and return them on the host; waits for a GPU once."""
    if not sums.size:
        return np.zeros(0)
    if on_host(sums):
        reduce(sums)
        return cast(Float64, sums)
    totals: Float64 = sums.get()
    reduce(totals)
    sums.set(totals)
    return totals
