"""A transformer block, tensor parallel."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_finite, as_int
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.boxes import BoxShard
from fsdpcore.fsdp.units.spec import Spec
from fsdpcore.parallel.attention import ParallelAttention
from fsdpcore.parallel.mlp import ParallelMLP
from fsdpcore.parallel.norm import LayerNorm
from fsdpcore.parallel.scope import Scope, prefixed
from fsdpcore.parallel.traffic import BlockTraffic, PassTraffic
from fsdpcore.parallel.weights import Init


class ParallelBlock:
    """``x + attention(norm1(x))``, then ``x + mlp(norm2(x))``: (B, T, width) to the same shape.

    The pre-norm block of GPT-2 (Radford et al., 2019), with heads and hidden features cut over the
    ranks of a group. ``traffic`` tells what they exchange.

    Parameters: those of its parts, ``norm1.gain``, ``attention.qkv.w``, ``norm2.gain``,
    ``mlp.up.w`` and so on; see ``LayerNorm``, ``ParallelAttention``, ``ParallelMLP``.

    It is a ``fc.Layer``, which says what the methods take.

    Args:
        width: features of input and output; a multiple of ``heads``.
        heads: at least as many as the group has ranks.
        hidden: features between the matrices of the MLP.
        group: the ranks that share the work.
        causal: position t sees positions up to t only.
        activation: of the MLP.
        sequence_parallel: input and output, and their gradients, are this rank's part of the
            sequence, ``split(T, ranks, rank)``, and so are norms and residuals, which are otherwise
            computed by every rank, and input and output gradient must be equal on all ranks. It
            takes the same bytes, and less memory.
        residual_scale: what the default of ``out_init`` is multiplied by. With
            1 / sqrt(2 * blocks) the variance of the residual stream does not grow with the depth.
        init: of ``attention.qkv.w`` and ``mlp.up.w``, as these layers take it: the standard
            deviation, by default 1 / sqrt(width), or one of ``fsdpcore.initializers``.
        out_init: the same of ``attention.proj.w`` and ``mlp.down.w``, which end in the residual
            stream; by default 1 / sqrt(width) and 1 / sqrt(hidden).
        dtype: of the parameters.

    Attributes:
        norm1, attention, norm2, mlp: the parts.

    Raises:
        ArgumentError: sizes that do not split, an unknown activation, or both ``residual_scale``
            and ``out_init``.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        group: Backend,
        *,
        causal: bool = True,
        activation: str = "gelu",
        sequence_parallel: bool = False,
        residual_scale: float = 1.0,
        init: Init | None = None,
        out_init: Init | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        width = as_int(width, "the width of a block", minimum=1)
        hidden = as_int(hidden, "the hidden features of a block", minimum=1)
        scale = as_finite(residual_scale, "residual_scale", minimum=0)
        self.group = group
        self.sequence_parallel = sequence_parallel
        if scale != 1.0 and out_init is not None:
            raise ArgumentError(
                "ParallelBlock: residual_scale is that of the default out_init; scale out_init "
                "yourself"
            )

        def out(inputs: int) -> Init:
            return scale / math.sqrt(inputs) if out_init is None else out_init

        self.attention = ParallelAttention(
            width,
            heads,
            group,
            causal=causal,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            init=init,
            out_init=out(width),
        )
        self.mlp = ParallelMLP(
            width,
            hidden,
            group,
            activation=activation,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            init=init,
            out_init=out(hidden),
        )
        self.norm1, self.norm2 = (
            LayerNorm(width, group, sequence_parallel=sequence_parallel, dtype=dtype)
            for _ in range(2)
        )

    def init(self, rng: np.random.Generator) -> dict[str, Array | BoxShard | Spec]:
        """Return this rank's parameters; all ranks draw the whole ones."""
        return {
            **prefixed("norm1.", self.norm1.init(rng)),
            **prefixed("attention.", self.attention.init(rng)),
            **prefixed("norm2.", self.norm2.init(rng)),
            **prefixed("mlp.", self.mlp.init(rng)),
        }

    def forward(self, params: Mapping[str, Array], x: Array) -> tuple[Array, Any]:
        """Map (B, T, width), or this rank's part of the sequence, to the same shape."""
        normed, norm1 = self.norm1.forward(Scope(params, "norm1."), x)
        middle, attention = self.attention.forward(Scope(params, "attention."), normed)
        middle += x
        normed, norm2 = self.norm2.forward(Scope(params, "norm2."), middle)
        y, mlp = self.mlp.forward(Scope(params, "mlp."), normed)
        y += middle
        return y, (norm1, attention, norm2, mlp)

    def backward(
        self, params: Mapping[str, Array], saved: Any, dy: Array, grads: MutableMapping[str, Array]
    ) -> Array:
        """Write the gradients of this rank's parameters, return that of the input."""

        def back(name: str, layer: Any, kept: Any, gradient: Array) -> Array:
            found: Array = layer.backward(Scope(params, name), kept, gradient, Scope(grads, name))
            return found

        norm1, attention, norm2, mlp = saved
        dnormed = back("mlp.", self.mlp, mlp, dy)
        dmiddle = back("norm2.", self.norm2, norm2, dnormed)
        dmiddle += dy
        dnormed = back("attention.", self.attention, attention, dmiddle)
        dx = back("norm1.", self.norm1, norm1, dnormed)
        dx += dmiddle
        return dx

    def traffic(self, batch: int, length: int) -> BlockTraffic:
        """Return what both passes exchange for an input (batch, length, width) of the group.

        With n = batch * length * width, p ranks and s bytes per element:

        - 2 all_reduces of n elements in each pass: p ranks send 8 (p - 1) n s bytes in all;
        - with ``sequence_parallel`` 2 all_gathers and 2 reduce_scatters of n elements in each pass,
          the same bytes; and in the backward pass, for gain and bias of both norms, of which each
          rank has seen its part of the sequence only, 2 all_reduces of 2 width elements more.

        That is with all of it trained: of a norm's frozen gain or bias there is nothing to sum, and
        without both no all_reduce. Not in it are the 8 bytes of each rank by which, before either
        all_gather of the forward pass, the ranks tell each other their parts of the sequence. A
        group of one exchanges nothing.

        Args:
            batch: sequences of one call.
            length: positions of a whole sequence, of all ranks together.

        Raises:
            ArgumentError: a number below zero.
        """
        sizes = [as_int(size, "an extent of the input", minimum=0) for size in (batch, length)]
        width = self.attention.width
        both = (math.prod(sizes) * width,) * 2
        if self.group.world_size == 1:
            return BlockTraffic(PassTraffic(), PassTraffic())
        norms = (2 * width,) * 2
        if not self.sequence_parallel:
            return BlockTraffic(PassTraffic(all_reduce=both), PassTraffic(all_reduce=both))
        return BlockTraffic(
            PassTraffic(all_gather=both, reduce_scatter=both),
            PassTraffic(all_reduce=norms, all_gather=both, reduce_scatter=both),
        )
