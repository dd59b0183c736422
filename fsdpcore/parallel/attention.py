"""Multi-head attention whose heads are cut over the ranks of a group."""

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
from fsdpcore.parallel.arrays import column_sum, matmul, narrow
from fsdpcore.parallel.exchange import all_gather, all_reduce, as_group, reduce_scatter
from fsdpcore.parallel.heads import attend, attend_backward
from fsdpcore.parallel.splits import as_gradient
from fsdpcore.parallel.weights import Init, checked, cut, gradient, weight


class ParallelAttention:
    """Multi-head attention and the projections around it: (B, T, width) to (B, T, width).

    Each rank computes the heads that ``split(heads, ranks, rank)`` gives it, from their queries,
    keys and values alone, so that nothing is exchanged before the output projection, whose partial
    results are summed (Shoeybi et al., 2019, Megatron-LM). There is one all_reduce in each pass: of
    the output in the forward pass, of the input's gradient in the backward pass. With
    ``sequence_parallel`` it is an all_gather and a reduce_scatter in each (Korthikanti et al.,
    2022, Reducing Activation Recomputation in Large Transformer Models).

    Parameters, in whole shapes that do not depend on the number of ranks; d is ``width // heads``:

    - ``qkv.w`` (width, 3, heads, d), ``qkv.b`` (3, heads, d): queries, keys, values; cut by heads.
    - ``proj.w`` (heads, d, width): the output projection; cut by heads.
    - ``proj.b`` (width,): whole on every rank, added once.

    It is a ``fc.Layer``, which says what the methods take.

    Args:
        width: features of input and output; a multiple of ``heads``.
        heads: at least as many as the group has ranks.
        group: the ranks that share the heads.
        causal: position t sees positions up to t only.
        sequence_parallel: input and output, and their gradients, are this rank's part of the
            sequence, ``split(T, ranks, rank)``; otherwise they are whole, and must be equal on all
            ranks.
        init: the standard deviation of the initial ``qkv.w``, drawn from the generator; by default
            1 / sqrt(width). Or one of ``fsdpcore.initializers``: then it is a ``Spec``, which no
            rank ever holds whole, and the generator is not used.
        out_init: the same of ``proj.w``, with the same default. Biases begin as zeros.
        dtype: of the initial values.

    Raises:
        ArgumentError: the sizes do not split.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        group: Backend,
        *,
        causal: bool = True,
        sequence_parallel: bool = False,
        init: Init | None = None,
        out_init: Init | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        self.width = as_int(width, "the width of an attention", minimum=1)
        self.heads = as_int(heads, "the heads of an attention", minimum=1)
        self.group = as_group(group, "ParallelAttention")
        self.causal = causal
        self.sequence_parallel = sequence_parallel
        if self.width % self.heads:
            raise ArgumentError(
                f"a width of {width} does not split into {heads} heads; choose a width that is a "
                "multiple of the heads"
            )
        if self.heads < group.world_size:
            raise ArgumentError(
                f"{heads} heads are not enough for the {group.world_size} ranks of the group, "
                "each of which needs one; choose more heads, or fewer tensor-parallel ranks"
            )
        default = 1.0 / math.sqrt(self.width)
        what = "ParallelAttention"
        self.initial = checked(init, default, what)
        self.out_initial = checked(out_init, default, what)
        self.dtype = as_dtype(dtype, f"{what}: a parameter")

    def init(self, rng: np.random.Generator) -> dict[str, Array | BoxShard | Spec]:
        """Return this rank's heads; all ranks draw the whole parameters."""
        size = self.width // self.heads
        qkv, proj = (self.width, 3, self.heads, size), (self.heads, size, self.width)
        return {
            "qkv.w": weight(rng, qkv, 2, self.group, self.initial, self.dtype),
            "qkv.b": cut(np.zeros(qkv[1:], self.dtype), 1, self.group),
            "proj.w": weight(rng, proj, 0, self.group, self.out_initial, self.dtype),
            "proj.b": np.zeros(self.width, self.dtype),
        }

    def forward(self, params: Mapping[str, Array], x: Array) -> tuple[Array, Any]:
        """Map (B, T, width), or this rank's part of the sequence, to the same shape."""
        x = as_real_array(x, "ParallelAttention: the input")
        if x.ndim != 3 or x.shape[-1] != self.width:
            raise ArgumentError(
                f"ParallelAttention maps arrays (B, T, {self.width}), got the shape {x.shape}"
            )
        weight, bias = params["qkv.w"], params["qkv.b"]
        x = narrow(x, weight.dtype)
        if self.sequence_parallel:
            x = all_gather(x, self.group, 1, label="parallel attention, sequence")
        qkv = matmul(x.reshape(-1, self.width), weight.reshape(self.width, -1))
        qkv += bias.reshape(-1)
        attended = attend(qkv.reshape(*x.shape[:2], *bias.shape), causal=self.causal)
        proj = self._proj(params)
        y = matmul(attended.mixed.reshape(len(qkv), len(proj)), proj)
        y = self._summed(y.reshape(x.shape), "output")
        y += params["proj.b"]
        return y, (x, attended)

    def backward(
        self, params: Mapping[str, Array], saved: Any, dy: Array, grads: MutableMapping[str, Array]
    ) -> Array:
        """Write the gradients of this rank's parameters, return that of the input.

        They are complete: no rank has a part of another one's, and those of ``proj.b`` are equal.
        """
        x, attended = saved
        weight = params["qkv.w"]
        along = self.group if self.sequence_parallel else None
        dy = as_gradient(dy, x.shape, "ParallelAttention", along)
        dy = narrow(dy, weight.dtype)
        if self.sequence_parallel:
            size = x.shape[1]
            dy = all_gather(
                dy, self.group, 1, size=size, label="parallel attention, output gradient"
            )
        dy = dy.reshape(-1, self.width)
        proj = self._proj(params)
        _write(grads, "proj", attended.mixed.reshape(len(dy), len(proj)), dy)
        dmixed = matmul(dy, proj.T)

        dqkv = attend_backward(attended, dmixed.reshape(attended.mixed.shape))
        dqkv = dqkv.reshape(len(dy), 3 * len(proj))
        _write(grads, "qkv", x.reshape(-1, self.width), dqkv)
        dx = matmul(dqkv, weight.reshape(self.width, -1).T)
        return self._summed(dx.reshape(x.shape), "input gradient")

    def _proj(self, params: Mapping[str, Array]) -> Array:
        return params["proj.w"].reshape(-1, self.width)

    def _summed(self, x: Array, what: str) -> Array:
        """Sum over the ranks, each of which has it from its own heads."""
        label = f"parallel attention, {what}"
        if self.sequence_parallel:
            return reduce_scatter(x, self.group, 1, label=label)
        return all_reduce(x, self.group, label=label)


def _write(grads: MutableMapping[str, Array], name: str, x: Array, dy: Array) -> None:
    """Write the gradients of a matrix and its bias, whatever axes they have, from rows."""
    weight, bias = gradient(grads, f"{name}.w"), gradient(grads, f"{name}.b")
    if weight is not None:
        matmul(x.T, dy, out=weight.reshape(x.shape[1], dy.shape[1]))
    if bias is not None:
        column_sum(dy, bias.reshape(-1))
