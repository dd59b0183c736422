"""Norms of rows, whose parameters every rank has; cut along the sequence or not."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.comm.backend import Backend
from fsdpcore.core.array_module import array_module
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_dtype, as_finite, as_int, as_real_array
from fsdpcore.core.errors import ArgumentError
from fsdpcore.parallel import exchange
from fsdpcore.parallel.arrays import column_dot, column_sum, narrow, row_dot, row_sum, wide
from fsdpcore.parallel.splits import as_gradient
from fsdpcore.parallel.weights import gradient


class _Norm:
    """Brings rows to one scale; ``bias`` and the mean are those of ``LayerNorm`` only."""

    _centred: bool

    def __init__(
        self,
        width: int,
        group: Backend | None = None,
        *,
        sequence_parallel: bool = False,
        eps: float = 1e-5,
        dtype: DTypeLike = np.float32,
    ) -> None:
        what = type(self).__name__
        self.width = as_int(width, f"{what}: width", minimum=1)
        self.group = None if group is None else exchange.as_group(group, what)
        if sequence_parallel and group is None:
            raise ArgumentError(
                f"{what}: with sequence_parallel the gradients are summed over the ranks that have "
                "the other parts of the sequence; pass them as group"
            )
        self.sequence_parallel = sequence_parallel
        self.eps = as_finite(eps, f"{what}: eps", minimum=0)
        self.dtype = as_dtype(dtype, f"{what}: a parameter")

    def init(self, rng: np.random.Generator) -> dict[str, Array]:
        """Return the initial parameters; nothing is drawn."""
        params = {"gain": np.ones(self.width, self.dtype)}
        if self._centred:
            params["bias"] = np.zeros(self.width, self.dtype)
        return params

    def forward(self, params: Mapping[str, Array], x: Array) -> tuple[Array, Any]:
        """Map (..., width) to the same shape, in the type of the parameters."""
        x = as_real_array(x, f"{type(self).__name__}: the input")
        if not x.ndim or x.shape[-1] != self.width:
            raise ArgumentError(
                f"{type(self).__name__}: the input has the shape (..., {self.width}), got {x.shape}"
            )
        gain = params["gain"]
        rows = wide(narrow(self._rows(x), gain.dtype))
        if self._centred:
            unit = rows - row_sum(rows, 1.0 / self.width)
            scale = 1.0 / array_module(x).sqrt(row_dot(unit, unit) / self.width + self.eps)
            unit *= scale
        else:
            scale = 1.0 / array_module(x).sqrt(row_dot(rows, rows) / self.width + self.eps)
            unit = rows * scale
        y = unit * wide(gain)
        if self._centred:
            y += wide(params["bias"])
        return narrow(y, gain.dtype).reshape(x.shape), (unit, scale, x.shape)

    def backward(
        self, params: Mapping[str, Array], saved: Any, dy: Array, grads: MutableMapping[str, Array]
    ) -> Array:
        """Write the parameters' gradients, return that of the input.

        With u the normalised row and g = dy * gain: dx = scale * (g - mean(g) - u * mean(g * u)),
        without mean(g) where the mean is not taken off.
        """
        unit, scale, shape = saved
        dy = as_gradient(dy, shape, type(self).__name__)
        gain = params["gain"]
        rows = wide(narrow(self._rows(dy), gain.dtype))
        self._write_gradients(rows, unit, grads)
        dx = rows * wide(gain)
        along = row_dot(dx, unit) / self.width
        if self._centred:
            dx -= row_sum(dx, 1.0 / self.width)
        dx -= unit * along
        dx *= scale
        return narrow(dx, gain.dtype).reshape(dy.shape)

    def _rows(self, x: Array) -> Array:
        return x.reshape(math.prod(x.shape[:-1]), self.width)

    def _write_gradients(self, dy: Array, unit: Array, grads: MutableMapping[str, Array]) -> None:
        found = {name: gradient(grads, name) for name in ("gain", "bias")[: 1 + self._centred]}
        trained = {name: out for name, out in found.items() if out is not None}
        if not trained:
            return
        sums: Array = array_module(dy).empty((len(trained), self.width), dy.dtype)
        for name, row in zip(trained, sums, strict=True):
            if name == "gain":
                column_dot(dy, unit, row)
            else:
                column_sum(dy, row)
        if self.sequence_parallel and self.group is not None:
            label = "parallel norm, gradients"
            sums = exchange.all_reduce(sums, self.group, label=label)
        for out, row in zip(trained.values(), sums, strict=True):
            out[...] = row


class LayerNorm(_Norm):
    """Rows of mean 0 and variance 1, times ``gain``, plus ``bias`` (Ba et al., 2016).

    Parameters: ``gain`` (width,), ones, and ``bias`` (width,), zeros; whole on every rank.
    Statistics are in float32 at least. Without ``sequence_parallel`` all ranks must have the same
    input, and nothing is communicated.

    It is a ``fc.Layer``, which says what the methods take.

    Args:
        width: features, the last axis.
        group: ranks that share a sequence, such as ``mesh["tensor"]``.
        sequence_parallel: the input is this rank's part of the sequence. The parameters' gradients
            are summed over the group: one all_reduce of 2 * width numbers in the backward pass.
        eps: added to the variance.
        dtype: of the parameters.

    Raises:
        ArgumentError: a width below one, or no group with ``sequence_parallel``.
    """

    _centred = True


class RMSNorm(_Norm):
    """Rows of mean square 1, times ``gain`` (Zhang, Sennrich, 2019).

    Parameter: ``gain`` (width,), ones, whole on every rank. All else is as in ``LayerNorm``; with
    ``sequence_parallel`` there is one all_reduce of width numbers in the backward pass.

    It is a ``fc.Layer``, which says what the methods take.

    Args:
        width: features, the last axis.
        group: ranks that share a sequence, such as ``mesh["tensor"]``.
        sequence_parallel: the input is this rank's part of the sequence.
        eps: added to the mean square.
        dtype: of the parameters.

    Raises:
        ArgumentError: a width below one, or no group with ``sequence_parallel``.
    """

    _centred = False
