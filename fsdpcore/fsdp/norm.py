"""The global norm of sharded gradients, as if they were not sharded."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fsdpcore.backend import Backend
from fsdpcore.buffers import Array
from fsdpcore.collectives import all_reduce

_BLOCK = 128 * 1024


def global_l2_norm(
    shards: Iterable[Array], backend: Backend, *, algorithm: str, label: str
) -> float:
    """Return the square root of the sum of squares over all shards of all ranks.

    Every element must lie in one shard of one rank only. Squares are summed in float64, so
    neither overflow nor the number of ranks matters at float32 precision. A collective.
    """
    scratch = np.empty(_BLOCK, np.float64)
    local = sum(_sum_of_squares(shard, scratch) for shard in shards)
    total = all_reduce(np.array(local, np.float64), backend, algorithm=algorithm, label=label)
    return float(np.sqrt(total))


def _sum_of_squares(array: Array, scratch: Array) -> float:
    total = 0.0
    for start in range(0, array.size, _BLOCK):
        values = array[start : start + _BLOCK]
        block = scratch[: values.size]
        np.copyto(block, values)
        total += float(np.dot(block, block))
    return total
