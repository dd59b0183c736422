"""A table of vectors whose rows are cut over the ranks (Shoeybi et al., 2019, Megatron-LM)."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.comm.backend import Backend
from fsdpcore.core.array_module import array_module
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_dtype, as_indices, as_int
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.boxes import BoxShard
from fsdpcore.fsdp.units.spec import Spec
from fsdpcore.parallel import exchange
from fsdpcore.parallel.arrays import narrow, sum_by_index
from fsdpcore.parallel.splits import as_gradient, localised, outside
from fsdpcore.parallel.weights import Init, checked, gradient, weight


class VocabParallelEmbedding:
    """Integers (..., T) to rows of a table (..., T, width), which is cut over the ranks.

    Parameter: ``w`` (vocab, width), cut along axis 0, normal by default. Every rank draws all of
    it, so that it does not depend on the number of ranks. A vocabulary that does not divide evenly
    is cut as by ``split``; a rank may have no rows.

    All ranks of the group must have the same integers. Each looks up those that are its own, and
    the sum over the ranks, one all_reduce, is the result. The backward pass needs no communication.
    Whether they are the same is not checked, as that would take another exchange, up to a quarter
    of the time of this one where that has 2 MB; ``cross_entropy`` notices targets that differ.

    It is a ``fc.Layer``, which says what the methods take.

    Args:
        vocab: rows of the table.
        width: features.
        group: ranks that share the table, such as ``mesh["tensor"]``.
        sequence_parallel: the result is this rank's part along the sequence, (..., own T, width):
            one reduce_scatter instead, and an all_gather in the backward pass.
        init: the standard deviation of the initial ``w``, drawn from the generator; by default
            1 / sqrt(width). Or one of ``fsdpcore.initializers``: then ``w`` is a ``Spec``, which no
            rank ever holds whole, and the generator is not used.
        dtype: of the parameter.

    Raises:
        ArgumentError: a size below one, or no group.
    """

    def __init__(
        self,
        vocab: int,
        width: int,
        group: Backend,
        *,
        sequence_parallel: bool = False,
        init: Init | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        what = type(self).__name__
        self.vocab = as_int(vocab, f"{what}: vocab", minimum=1)
        self.width = as_int(width, f"{what}: width", minimum=1)
        self.group = exchange.as_group(group, what)
        self.sequence_parallel = sequence_parallel
        self.initial = checked(init, 1.0 / math.sqrt(self.width), what)
        self.dtype = as_dtype(dtype, f"{what}: a parameter")

    def init(self, rng: np.random.Generator) -> dict[str, Array | BoxShard | Spec]:
        """Return this rank's rows of ``w``."""
        shape = (self.vocab, self.width)
        return {"w": weight(rng, shape, 0, self.group, self.initial, self.dtype)}

    def forward(self, params: Mapping[str, Array], x: Array) -> tuple[Array, Any]:
        """Return (..., T, width), or this rank's part of the sequence: the rows that ``x`` names.

        Raises:
            ArgumentError: ``x`` is no array of integers in [0, vocab). On a GPU, where a look at
                them would wait for it, rows of others are NaN instead.
        """
        what = "VocabParallelEmbedding: indices"
        x = as_indices(x, self.vocab, what)
        if self.sequence_parallel and x.ndim < 1:
            raise ArgumentError(f"{what} are (..., sequence), got a single one")
        y = self._own_rows(params["w"], x)
        if self.sequence_parallel:
            y = exchange.reduce_scatter(y, self.group, -2, label="parallel embedding, sequence")
        else:
            y = exchange.all_reduce(y, self.group, label="parallel embedding")
        return y, x

    def _own_rows(self, table: Array, x: Array) -> Array:
        """Return (..., width): the rows that are this rank's, and zeros for others."""
        xp = array_module(table)
        if not len(table):
            y: Array = xp.zeros((*x.shape, self.width), table.dtype)
        else:
            local, mine = localised(x, self.vocab, self.group)
            y = table[xp.where(mine, local, 0)]
            if self.group.world_size > 1:
                y[~mine] = 0
        lost = outside(x, self.vocab)
        if lost is not None:
            y[lost] = math.nan
        return y

    def backward(
        self, params: Mapping[str, Array], saved: Any, dy: Array, grads: MutableMapping[str, Array]
    ) -> Array:
        """Write the gradient of this rank's rows; that of the integers, no variables, is zero."""
        x: Array = saved
        along = self.group if self.sequence_parallel else None
        dy = as_gradient(dy, (*x.shape, self.width), type(self).__name__, along)
        dx: Array = array_module(dy).zeros(x.shape, dy.dtype)
        if self.sequence_parallel:
            dy = exchange.all_gather(
                narrow(dy, params["w"].dtype),
                self.group,
                -2,
                size=x.shape[-1],
                label="parallel embedding, gradient",
            )
        out = gradient(grads, "w")
        if out is not None:
            local, _ = localised(x, self.vocab, self.group)
            sum_by_index(local.reshape(-1), dy.reshape(x.size, self.width), out)
        return dx
