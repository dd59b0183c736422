"""Shared: the ranks are on one host and use memory that all of them see (``SharedRegion``).

What they move is data (``movements``), which ``interpreter`` carries out with arrays that are
published, or staged. With p ranks and n bytes (per rank for all_reduce, reduce and broadcast, in
total for the others), no messages are sent, and each rank copies

==============  ====================  ====================================================
collective      published             staged
==============  ====================  ====================================================
all_reduce      ((p - 1) / p) n       (2 (p - 1) / p + 1 / p) n
reduce          0                     ((p - 1) / p) n, the root n more
reduce_scatter  0                     ((p - 1) / p) n
all_gather      n                     n / p in, n out
broadcast       n, not on the root    n in on the root, n out on the others
gather          n on the root         n / p in, n out on the root
scatter         n / p                 ((p - 1) / p) n in on the root, n / p out
all_to_all      n                     ((p - 1) / p) n in, n out
==============  ====================  ====================================================

Reductions reduce n/p from p arrays, in the canonical order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from fsdpcore.collectives import movements
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.shared.interpreter import SMALL, bound_movement, move
from fsdpcore.collectives.spec import Layout
from fsdpcore.core.algorithm import Algorithm, CostTerms
from fsdpcore.core.buffers import Array
from fsdpcore.core.policy import Costs
from fsdpcore.core.reductions import Reduction

NAME = "shared"


def all_reduce(context: CollectiveContext, data: Array, reduction: Reduction) -> None:
    """Reduce ``data`` of all ranks into ``data`` of all ranks."""
    all_reduce_into(context, data, data, reduction)


def all_reduce_into(
    context: CollectiveContext, source: Array, out: Array, reduction: Reduction
) -> None:
    """Reduce ``source`` of all ranks into ``out`` (may be ``source``) of all ranks."""
    move(context, movements.all_reduce, Layout(-1, reduction), source, out)


def reduce(
    context: CollectiveContext, source: Array, out: Array | None, root: int, reduction: Reduction
) -> None:
    """Reduce ``source`` of all ranks into ``out`` (may be ``source``) of the root."""
    move(context, movements.reduce, Layout(root, reduction), source, out)


def reduce_scatter(
    context: CollectiveContext,
    source: Array,
    own: Array,
    bounds: Sequence[int],
    reduction: Reduction,
) -> None:
    """Reduce ``source``, of which each rank gets ``[bounds[rank]:bounds[rank + 1]]`` in ``own``.

    ``own`` may be that part of ``source``.
    """
    move(context, movements.reduce_scatter, Layout(-1, reduction, bounds), source, own)


def all_gather(context: CollectiveContext, own: Array, out: Array, bounds: Sequence[int]) -> None:
    """Bring every rank's ``own`` to ``out[bounds[rank]:bounds[rank + 1]]`` of all ranks.

    ``own`` may be that part of ``out``.
    """
    move(context, movements.all_gather, Layout(-1, None, bounds), own, out)


def gather(
    context: CollectiveContext, own: Array, out: Array | None, bounds: Sequence[int], root: int
) -> None:
    """Bring every rank's ``own`` to ``out[bounds[rank]:bounds[rank + 1]]`` of the root."""
    move(context, movements.gather, Layout(root, None, bounds), own, out)


def broadcast(context: CollectiveContext, data: Array, root: int) -> None:
    """Copy ``data`` of the root into ``data`` of all ranks."""
    move(context, movements.broadcast, Layout(root), data, data)


def scatter(
    context: CollectiveContext,
    source: Array | None,
    own: Array,
    bounds: Sequence[int],
    root: int,
) -> None:
    """Bring ``source[bounds[rank]:bounds[rank + 1]]`` of the root to every rank's ``own``."""
    move(context, movements.scatter, Layout(root, None, bounds), source, own)


def all_to_all(
    context: CollectiveContext,
    source: Array,
    send_bounds: Sequence[int],
    out: Array,
    recv_bounds: Sequence[int],
) -> None:
    """Send ``source[send_bounds[r]:send_bounds[r + 1]]`` to each rank r.

    What rank r sends arrives in ``out[recv_bounds[r]:recv_bounds[r + 1]]``; ``out`` and
    ``source`` must not overlap. Where ranks send different sizes, they first find out the largest;
    where not, all ranks have the same ``send_bounds``.
    """
    layout = Layout(-1, None, send_bounds, recv_bounds)
    if context.call.ragged:
        made = bound_movement(context, movements.all_to_all, layout, source, out)
        made.run_unequal(context.call.digest, source, out)
    else:
        move(context, movements.all_to_all, layout, source, out)


# One thread copies about 10 GB/s of what is not in its cache.
_COSTS = Costs(alpha=1e-6, beta=0.1e-9, gamma=0.1e-9)


def _algorithm(steps: int, copies: Callable[[int], float], reduces: float = 0) -> Algorithm:
    def cost(p: int) -> CostTerms:
        return CostTerms(steps, copies(p), reduces)

    return Algorithm(sys.modules[__name__], cost, costs=_COSTS, agrees=True, publishes=SMALL)


# Of arrays that are staged: others do not compete.
ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {NAME: _algorithm(2, lambda p: (2 * p - 1) / p, 1)},
    "reduce": {NAME: _algorithm(2, lambda p: (2 * p - 1) / p, 1)},
    "reduce_scatter": {NAME: _algorithm(1, lambda p: (p - 1) / p, 1)},
    "all_gather": {NAME: _algorithm(1, lambda p: (p + 1) / p)},
    "broadcast": {NAME: _algorithm(1, lambda p: 1)},
    "gather": {NAME: _algorithm(1, lambda p: 1)},
    "scatter": {NAME: _algorithm(1, lambda p: 1)},
    "all_to_all": {NAME: _algorithm(1, lambda p: (2 * p - 1) / p)},
}
