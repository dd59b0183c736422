"""Learned positions, added to a sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_dtype, as_int, as_real_array
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.boxes import BoxShard
from fsdpcore.fsdp.units.spec import Spec
from fsdpcore.parallel.arrays import column_sum, narrow, wide
from fsdpcore.parallel.splits import as_gradient
from fsdpcore.parallel.weights import Init, checked, gradient, weight


class PositionEmbedding:
    """``x + w[:T]``: (B, T, width) to the same shape, with T at most ``context``.

    Parameter: ``w`` (context, width), normal by default, whole on every rank: nothing is
    communicated, all ranks of a group must have the same input. To go on in parts of the sequence,
    put ``ScatterSequence`` behind it.

    It is a ``fc.Layer``, which says what the methods take.

    Args:
        context: positions that there are.
        width: features.
        init: the standard deviation of the initial ``w``, drawn from the generator; by default
            1 / sqrt(width). Or one of ``fsdpcore.initializers``: then ``w`` is a ``Spec``, and the
            generator is not used.
        dtype: of the parameter.

    Raises:
        ArgumentError: a size below one.
    """

    def __init__(
        self,
        context: int,
        width: int,
        *,
        init: Init | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        self.context = as_int(context, "PositionEmbedding: context", minimum=1)
        self.width = as_int(width, "PositionEmbedding: width", minimum=1)
        default = 1.0 / math.sqrt(self.width)
        self.initial = checked(init, default, "PositionEmbedding")
        self.dtype = as_dtype(dtype, "PositionEmbedding: a parameter")

    def init(self, rng: np.random.Generator) -> dict[str, Array | BoxShard | Spec]:
        """Return ``w``."""
        shape = (self.context, self.width)
        return {"w": weight(rng, shape, 0, None, self.initial, self.dtype)}

    def forward(self, params: Mapping[str, Array], x: Array) -> tuple[Array, Any]:
        """Return (B, T, width): the input with the positions added.

        Raises:
            ArgumentError: a sequence is longer than the context, or another shape.
        """
        x = as_real_array(x, "PositionEmbedding: the input")
        if x.ndim != 3 or x.shape[-1] != self.width or x.shape[1] > self.context:
            raise ArgumentError(
                f"PositionEmbedding: positions are added to (B, T, {self.width}) with T at most "
                f"{self.context}, got the shape {x.shape}; cut the sequence, or choose a longer "
                "context"
            )
        table = params["w"]
        return narrow(x, table.dtype) + table[: x.shape[1]], x.shape

    def backward(
        self, params: Mapping[str, Array], saved: Any, dy: Array, grads: MutableMapping[str, Array]
    ) -> Array:
        """Write the gradient of the positions; that of the input is ``dy`` itself."""
        dy = as_gradient(dy, saved, "PositionEmbedding")
        out = gradient(grads, "w")
        if out is not None:
            column_sum(wide(dy), out[: saved[1]])
            out[saved[1] :] = 0
        return dy
