"""The table of algorithms: for each collective, its functions and their costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fsdpcore.collectives.algorithms import (
    bruck,
    direct,
    doubling,
    halving,
    hierarchical,
    rabenseifner,
    ring,
    scatter_gather,
    star,
    traffic,
    tree,
)
from fsdpcore.core.policy import Costs


class Terms(NamedTuple):
    """A cost: messages, and bytes moved and reduced as multiples of n, on the busiest rank.

    Messages and bytes are those that a rank sends or those that it receives, whichever are more;
    for ``star``, whose centre first receives and then sends, both together.
    """

    alpha: float
    beta: float
    gamma: float


def _anything(dtype: np.dtype[Any] | None, op: str) -> bool:
    return True


class Algorithm(NamedTuple):
    """An algorithm for one collective.

    Attributes:
        module: has a function named like the collective.
        cost: for p ranks, all on one host as far as that makes a difference.
        canonical: its reductions follow the canonical order.
        supports: whether it can handle a dtype (None where it is not known yet) and reduction.
        costs: what its messages and bytes cost, where those are not the transport's.
        agrees: it is the check that all ranks call the same, too, and needs none before it.
        lends: above so many bytes it uses arrays in place where all ranks can see them; 0 if not.
        besides: seconds that it takes beyond what ``cost`` tells, for so many bytes.
    """

    module: object
    cost: Callable[[int], Terms]
    canonical: bool = True
    supports: Callable[[np.dtype[Any] | None, str], bool] = _anything
    costs: Costs | None = None
    agrees: bool = False
    lends: int = 0
    besides: Callable[[int], float] | None = None


def _depth(p: int) -> int:
    return (p - 1).bit_length()


def _pairwise(p: int) -> Terms:
    return Terms(p - 1, (p - 1) / p, 0)


def _reducing_pairwise(p: int) -> Terms:
    return Terms(p - 1, (p - 1) / p, (p - 1) / p)


def _both_pairwise(p: int) -> Terms:
    return Terms(2 * (p - 1), 2 * (p - 1) / p, (p - 1) / p)


def _doubling(p: int) -> Terms:
    busiest = int(traffic.sends(p).max())
    return Terms(busiest, busiest, _depth(p))


def _doubling_all_gather(p: int) -> Terms:
    chunks = max(p - 1, int(traffic.chunks_spread(p).max()))
    return Terms(int(traffic.sends(p).max()), chunks / p, 0)


def _halving(p: int) -> Terms:
    kept = int(traffic.chunks_kept(p).max())
    return Terms(int(traffic.sends(p).max()), max(p - 1, kept) / p, kept / p)


def _rabenseifner(p: int) -> Terms:
    kept = int(traffic.chunks_kept(p).max())
    return Terms(int((traffic.sends(p) + traffic.receives(p)).max()), (p - 1 + kept) / p, kept / p)


def _bruck_all_to_all(p: int) -> Terms:
    return Terms(_depth(p), sum(bin(distance).count("1") for distance in range(p)) / p, 0)


def _star(p: int) -> Terms:
    return Terms(2 * (p - 1), (p - 1) * (1 + 1 / p), 0)


ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {
        "doubling": Algorithm(doubling, _doubling),
        "direct": Algorithm(direct, _both_pairwise),
        "rabenseifner": Algorithm(rabenseifner, _rabenseifner),
        "hierarchical": Algorithm(hierarchical, _both_pairwise),
        "star": Algorithm(star, lambda p: Terms(2 * (p - 1), 2 * (p - 1), p - 1)),
        "ring": Algorithm(ring, _both_pairwise, False),
    },
    "reduce_scatter": {
        "direct": Algorithm(direct, _reducing_pairwise),
        "halving": Algorithm(halving, _halving),
        "doubling": Algorithm(doubling, _doubling),
        "hierarchical": Algorithm(hierarchical, _reducing_pairwise),
        "star": Algorithm(star, lambda p: _star(p)._replace(gamma=p - 1)),
        "ring": Algorithm(ring, _reducing_pairwise, False),
    },
    "all_gather": {
        "direct": Algorithm(direct, _pairwise),
        "doubling": Algorithm(doubling, _doubling_all_gather),
        "bruck": Algorithm(bruck, lambda p: Terms(_depth(p), (p - 1) / p, 0)),
        "hierarchical": Algorithm(hierarchical, _pairwise),
        "star": Algorithm(star, _star),
        "ring": Algorithm(ring, _pairwise),
    },
    "broadcast": {
        "tree": Algorithm(tree, lambda p: Terms(_depth(p), _depth(p), 0)),
        "scatter_gather": Algorithm(
            scatter_gather, lambda p: Terms(2 * _depth(p), 2 * (p - 1) / p, 0)
        ),
        "hierarchical": Algorithm(hierarchical, lambda p: Terms(2 * (p - 1), 2 * (p - 1) / p, 0)),
        "star": Algorithm(star, lambda p: Terms(p - 1, p - 1, 0)),
    },
    "reduce": {
        "tree": Algorithm(tree, lambda p: Terms(_depth(p), _depth(p), _depth(p))),
        "star": Algorithm(star, lambda p: Terms(p - 1, p - 1, p - 1)),
    },
    "gather": {
        "star": Algorithm(star, lambda p: Terms(p - 1, (p - 1) / p, 0)),
        "tree": Algorithm(tree, lambda p: Terms(_depth(p), 2 * (p - 1) / p, 0)),
    },
    "scatter": {
        "star": Algorithm(star, lambda p: Terms(p - 1, (p - 1) / p, 0)),
        "tree": Algorithm(tree, lambda p: Terms(_depth(p), 2 * (p - 1) / p, 0)),
    },
    "all_to_all": {
        "direct": Algorithm(direct, _pairwise),
        "bruck": Algorithm(bruck, _bruck_all_to_all),
    },
}
