"""A multilayer perceptron whose hidden features are cut over the ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.geometry.boxes import BoxShard
from fsdpcore.fsdp.units.spec import Spec
from fsdpcore.parallel.activations import activation as activation_of
from fsdpcore.parallel.linear import ColumnParallelLinear, RowParallelLinear
from fsdpcore.parallel.scope import Scope, prefixed
from fsdpcore.parallel.weights import Init


class ParallelMLP:
    """``down(activation(up(x)))``: (..., width) to (..., width) by way of (..., hidden).

    Each rank computes its hidden features: ``up`` is a ``ColumnParallelLinear``, ``down`` a
    ``RowParallelLinear``. There is one all_reduce in each pass, of the output and of the input's
    gradient; with ``sequence_parallel`` an all_gather and a reduce_scatter in each.

    Parameters: ``up.w`` (width, hidden) and ``up.b`` (hidden,), cut by hidden features; ``down.w``
    (hidden, width), cut likewise, and ``down.b`` (width,), whole on every rank.

    It is a ``fc.Layer``, which says what the methods take.

    Args:
        width: features of input and output.
        hidden: features between; as ``split`` cuts them, a rank may have none.
        group: the ranks that share them.
        activation: ``"gelu"`` (in its tanh form), ``"relu"`` or ``"silu"``.
        sequence_parallel: input and output, and their gradients, are this rank's part along axis
            -2; otherwise they are whole, and must be equal on all ranks.
        init: the standard deviation of the initial ``up.w``, drawn from the generator; by default
            1 / sqrt(width). Or one of ``fsdpcore.initializers``: then it is a ``Spec``, which no
            rank ever holds whole, and the generator is not used.
        out_init: the same of ``down.w``, by default 1 / sqrt(hidden). Biases begin as zeros.
        dtype: of the parameters.

    Raises:
        ArgumentError: a size below one, or an unknown activation.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        group: Backend,
        *,
        activation: str = "gelu",
        sequence_parallel: bool = False,
        init: Init | None = None,
        out_init: Init | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        self._activation = activation_of(activation)
        self.up = ColumnParallelLinear(
            width,
            hidden,
            group,
            sequence_parallel=sequence_parallel,
            init=init,
            dtype=dtype,
        )
        self.down = RowParallelLinear(
            hidden,
            width,
            group,
            sequence_parallel=sequence_parallel,
            init=out_init,
            dtype=dtype,
        )

    def init(self, rng: np.random.Generator) -> dict[str, Array | BoxShard | Spec]:
        """Return this rank's hidden features; all ranks draw the whole parameters."""
        return {**prefixed("up.", self.up.init(rng)), **prefixed("down.", self.down.init(rng))}

    def forward(self, params: Mapping[str, Array], x: Array) -> tuple[Array, Any]:
        """Map (..., width), or this rank's part of the sequence, to the same shape."""
        hidden, up = self.up.forward(Scope(params, "up."), x)
        active, between = self._activation.forward(hidden)
        y, down = self.down.forward(Scope(params, "down."), active)
        return y, (up, between, down)

    def backward(
        self, params: Mapping[str, Array], saved: Any, dy: Array, grads: MutableMapping[str, Array]
    ) -> Array:
        """Write the gradients of this rank's parameters, return that of the input."""
        up, between, down = saved
        dactive = self.down.backward(Scope(params, "down."), down, dy, Scope(grads, "down."))
        dhidden = self._activation.backward(between, dactive)
        return self.up.backward(Scope(params, "up."), up, dhidden, Scope(grads, "up."))
