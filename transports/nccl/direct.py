"""Reductions in the canonical order: sends and receives by NCCL, arithmetic by CuPy.

Algorithms named ``direct``, of every dtype and op. They give the bits that reductions of the host's
arrays give, on any number of GPUs; but for float32 numbers below 1.2e-38, which CuPy has all its
kernels take for zero. Each rank sends each other one the part that it is to reduce.

==============  ========================================
reduce_scatter  sends and receives (p - 1) / p of the array, needs room for it; for float16 and
                bfloat16, for twice the array
all_reduce      reduce_scatter and all_gather
reduce          reduce_scatter and gather
==============  ========================================
"""

from __future__ import annotations

from collections.abc import Sequence

import cupy

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.core.buffers import Array, bounds_of, split_sizes
from fsdpcore.core.reductions import Reduction

from .calls import NcclCollectives, copy, pieces


class DirectCollectives(NcclCollectives):
    """Canonical reductions of one group."""

    def reduce_scatter(
        self,
        context: CollectiveContext,
        source: Array,
        own: Array,
        bounds: Sequence[int],
        reduction: Reduction,
    ) -> None:
        """Reduce ``source``, of which each rank gets ``[bounds[rank]:bounds[rank + 1]]``.

        ``own`` may be that part of ``source``.
        """
        me, p = context.rank, context.size
        chunks = pieces(source, bounds)
        if p == 1:
            copy(source, own)
            return
        size = chunks[me].size
        rooms = cupy.empty((p - 1, size), source.dtype)
        parts = [*rooms[:me], chunks[me], *rooms[me:]]
        others = [rank for rank in range(p) if rank != me]
        self.exchange(
            context,
            [(rank, chunks[rank]) for rank in others],
            [(rank, parts[rank]) for rank in others],
        )
        reduction.reduce_at_once(parts, own, cupy.empty)

    def all_reduce(
        self, context: CollectiveContext, source: Array, out: Array, reduction: Reduction
    ) -> None:
        """Reduce ``source`` of all ranks into ``out`` (may be ``source``) of all ranks."""
        bounds = bounds_of(split_sizes(source.size, context.size))
        own = out[bounds[context.rank] : bounds[context.rank + 1]]
        self.reduce_scatter(context, source, own, bounds, reduction)
        self.all_gather(context, own, out, bounds)

    def reduce(
        self,
        context: CollectiveContext,
        source: Array,
        out: Array | None,
        root: int,
        reduction: Reduction,
    ) -> None:
        """Reduce ``source`` of all ranks into ``out`` (may be ``source``) of the root."""
        bounds = bounds_of(split_sizes(source.size, context.size))
        own = cupy.empty(bounds[context.rank + 1] - bounds[context.rank], source.dtype)
        self.reduce_scatter(context, source, own, bounds, reduction)
        self.gather(context, own, out, bounds, root)
