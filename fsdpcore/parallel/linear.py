"""Matrix products of which each rank of a group computes a part.

With the columns of the matrix cut, each rank has all inputs and makes some outputs; with the rows
cut, it has some inputs and makes a summand of all outputs. A column-parallel layer and then a
row-parallel one need one all_reduce in each pass (Shoeybi et al., 2019, Megatron-LM). With
``sequence_parallel`` what lies between such pairs is cut along the sequence, and each all_reduce
becomes an all_gather before the first layer and a reduce_scatter after the second (Korthikanti et
al., 2022).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_dtype, as_int, as_real_array
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.boxes import BoxShard
from fsdpcore.fsdp.units.spec import Spec
from fsdpcore.parallel import exchange
from fsdpcore.parallel.arrays import column_sum, matmul, narrow
from fsdpcore.parallel.splits import as_gradient, own_size
from fsdpcore.parallel.weights import Init, checked, cut, gradient, weight


class _ParallelLinear:
    """What the two have in common."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        group: Backend,
        bias: bool,
        sequence_parallel: bool,
        init: Init | None,
        dtype: DTypeLike,
    ) -> None:
        what = type(self).__name__
        self.inputs = as_int(inputs, f"{what}: inputs", minimum=1)
        self.outputs = as_int(outputs, f"{what}: outputs", minimum=1)
        self.group = exchange.as_group(group, what)
        self.bias = bias
        self.sequence_parallel = sequence_parallel
        self.initial = checked(init, 1.0 / math.sqrt(self.inputs), what)
        self.dtype = as_dtype(dtype, f"{what}: a parameter")

    def _checked(self, x: Array, features: int) -> Array:
        x = as_real_array(x, f"{type(self).__name__}: the input")
        least = 2 if self.sequence_parallel else 1
        if x.ndim < least or x.shape[-1] != features:
            axes = "(..., sequence, {})" if self.sequence_parallel else "(..., {})"
            raise ArgumentError(
                f"{type(self).__name__}: the input has the shape {axes.format(features)} on rank "
                f"{self.group.rank} of {self.group.world_size}, got {x.shape}"
            )
        return x


class ColumnParallelLinear(_ParallelLinear):
    """``y = x w + b`` with the outputs cut over the ranks of ``group``.

    Parameters: ``w`` (inputs, outputs), cut along axis 1, normal by default, and ``b``
    (outputs,), cut, zeros. Every rank draws all of ``w``, so that it does not depend on the number
    of ranks. Outputs that do not divide evenly are cut as by ``split``; a rank may have none.

    Every rank must have the same input (..., inputs), and makes its own outputs (..., own outputs).
    The backward pass sums the input's gradient over the group: one all_reduce of its size.

    It is a ``fc.Layer``, which says what the methods take.

    Args:
        inputs: features of the input.
        outputs: features of the whole output.
        group: ranks that share the work, such as ``mesh["tensor"]``.
        bias: whether there is ``b``.
        gather_output: every rank gets all outputs: one more all_gather, in the forward pass. The
            gradient of the output is then the same on all ranks.
        sequence_parallel: the input is this rank's part along the sequence, axis -2, which is
            joined in the forward pass (one all_gather) and kept whole for the backward one. There
            the gradient is summed and cut again (one reduce_scatter instead of the all_reduce).
        init: the standard deviation of the initial ``w``, drawn from the generator; by default
            1 / sqrt(inputs), with which outputs have the variance of inputs (LeCun et al., 1998).
            Or one of ``fsdpcore.initializers``: then ``w`` is a ``Spec``, which no rank ever holds
            whole, and the generator is not used.
        dtype: of the parameters.

    Raises:
        ArgumentError: a size below one, or no group.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        group: Backend,
        *,
        bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        init: Init | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        super().__init__(inputs, outputs, group, bias, sequence_parallel, init, dtype)
        self.gather_output = gather_output

    def init(self, rng: np.random.Generator) -> dict[str, Array | BoxShard | Spec]:
        """Return this rank's columns of ``w``, and its part of ``b``."""
        shape = (self.inputs, self.outputs)
        params = {"w": weight(rng, shape, 1, self.group, self.initial, self.dtype)}
        if self.bias:
            params["b"] = cut(np.zeros(self.outputs, self.dtype), 0, self.group)
        return params

    def forward(self, params: Mapping[str, Array], x: Array) -> tuple[Array, Any]:
        """Return (..., own outputs), or (..., outputs) with ``gather_output``."""
        x = self._checked(x, self.inputs)
        w = params["w"]
        x = narrow(x, w.dtype)
        if self.sequence_parallel:
            x = exchange.all_gather(x, self.group, -2, label="parallel linear, sequence")
        y = _product(x, w)
        if self.bias:
            y += params["b"]
        if self.gather_output:
            y = exchange.all_gather(
                y, self.group, -1, size=self.outputs, label="parallel linear, outputs"
            )
        return y, x

    def backward(
        self, params: Mapping[str, Array], saved: Any, dy: Array, grads: MutableMapping[str, Array]
    ) -> Array:
        """Write the gradients of this rank's parameters, return that of the input.

        It is complete on every rank: (..., inputs), or this rank's part of the sequence.
        """
        x: Array = saved
        w = params["w"]
        outputs = self.outputs if self.gather_output else w.shape[1]
        dy = as_gradient(dy, (*x.shape[:-1], outputs), type(self).__name__)
        if self.gather_output:
            dy = exchange.local_part(dy, self.group, -1)
        dy = narrow(dy, w.dtype)
        dx = _product(dy, w.T)
        _weight_gradient(x, dy, grads)
        if self.bias:
            _bias_gradient(dy, grads)
        if self.sequence_parallel:
            return exchange.reduce_scatter(
                dx, self.group, -2, label="parallel linear, gradient of the sequence"
            )
        return exchange.all_reduce(dx, self.group, label="parallel linear, gradient")


class RowParallelLinear(_ParallelLinear):
    """``y = x w + b`` with the inputs cut over the ranks of ``group``.

    Parameters: ``w`` (inputs, outputs), cut along axis 0, normal by default, and ``b``
    (outputs,), whole on every rank, zeros. Every rank draws all of ``w``, so that it does not
    depend on the number of ranks. Inputs that do not divide evenly are cut as by ``split``; a rank
    may have none.

    Every rank has its own features of one input, as a column-parallel layer makes them, and gets
    the sum over all ranks (..., outputs): one all_reduce of its size. ``b`` is added to that, so
    its gradient is the same on all ranks. The backward pass needs no communication.

    It is a ``fc.Layer``, which says what the methods take.

    Args:
        inputs: features of the whole input.
        outputs: features of the output.
        group: ranks that share the work, such as ``mesh["tensor"]``.
        bias: whether there is ``b``.
        input_is_split: False if every rank has all inputs (..., inputs), the same: each takes its
            own, and the backward pass joins the gradient (one all_gather).
        sequence_parallel: the output is this rank's part along the sequence, axis -2 (one
            reduce_scatter instead of the all_reduce), and its gradient is joined in the backward
            pass (one all_gather).
        init, dtype: as in ``ColumnParallelLinear``.

    Raises:
        ArgumentError: a size below one, or no group.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        group: Backend,
        *,
        bias: bool = True,
        input_is_split: bool = True,
        sequence_parallel: bool = False,
        init: Init | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        super().__init__(inputs, outputs, group, bias, sequence_parallel, init, dtype)
        self.input_is_split = input_is_split

    def init(self, rng: np.random.Generator) -> dict[str, Array | BoxShard | Spec]:
        """Return this rank's rows of ``w``, and all of ``b``."""
        shape = (self.inputs, self.outputs)
        params = {"w": weight(rng, shape, 0, self.group, self.initial, self.dtype)}
        if self.bias:
            params["b"] = np.zeros(self.outputs, self.dtype)
        return params

    def forward(self, params: Mapping[str, Array], x: Array) -> tuple[Array, Any]:
        """Return (..., outputs), or this rank's part of the sequence."""
        own = own_size(self.inputs, self.group)
        x = self._checked(x, own if self.input_is_split else self.inputs)
        w = params["w"]
        if not self.input_is_split:
            x = exchange.local_part(x, self.group, -1)
        x = narrow(x, w.dtype)
        y = _product(x, w)
        if self.sequence_parallel:
            y = exchange.reduce_scatter(y, self.group, -2, label="parallel linear, sequence")
        else:
            y = exchange.all_reduce(y, self.group, label="parallel linear, outputs")
        if self.bias:
            y += params["b"]
        return y, x

    def backward(
        self, params: Mapping[str, Array], saved: Any, dy: Array, grads: MutableMapping[str, Array]
    ) -> Array:
        """Write the gradients of this rank's parameters, return that of the input.

        It is that of this rank's features, or of all of them without ``input_is_split``.
        """
        x: Array = saved
        w = params["w"]
        along = self.group if self.sequence_parallel else None
        dy = as_gradient(dy, (*x.shape[:-1], self.outputs), type(self).__name__, along)
        dy = narrow(dy, w.dtype)
        if self.sequence_parallel:
            dy = exchange.all_gather(
                dy, self.group, -2, size=x.shape[-2], label="parallel linear, gradient"
            )
        dx = _product(dy, w.T)
        _weight_gradient(x, dy, grads)
        if self.bias:
            _bias_gradient(dy, grads)
        if self.input_is_split:
            return dx
        return exchange.all_gather(
            dx, self.group, -1, size=self.inputs, label="parallel linear, gradient of the input"
        )


def _rows(x: Array) -> Array:
    """Return (N, features): one matrix product instead of one for every leading index."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _product(x: Array, w: Array) -> Array:
    """Return ``x @ w``, a new array."""
    y = matmul(_rows(x), w)
    return y.reshape(*x.shape[:-1], w.shape[1])


def _weight_gradient(x: Array, dy: Array, grads: MutableMapping[str, Array]) -> None:
    out = gradient(grads, "w")
    if out is not None:
        matmul(_rows(x).T, _rows(dy), out=out)


def _bias_gradient(dy: Array, grads: MutableMapping[str, Array]) -> None:
    out = gradient(grads, "b")
    if out is not None:
        column_sum(_rows(dy), out)
