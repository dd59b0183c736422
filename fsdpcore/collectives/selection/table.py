"""The table of algorithms: for each collective, its functions and their costs."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpcore.collectives.algorithms import (
    bruck,
    direct,
    doubling,
    halving,
    rabenseifner,
    ring,
    scatter_gather,
    star,
    traffic,
    tree,
)
from fsdpcore.collectives.hierarchy import hierarchical
from fsdpcore.core.algorithm import Algorithm, CostTerms
from fsdpcore.core.reductions import ReduceOp


def _commutes(dtype: np.dtype[Any] | None, op: str) -> bool:
    """Whether the order of the ranks does not matter: a user's own function may depend on it."""
    return not op or op in {known.value for known in ReduceOp}


def _depth(p: int) -> int:
    return (p - 1).bit_length()


def _pairwise(p: int) -> CostTerms:
    return CostTerms(p - 1, (p - 1) / p, 0)


def _reducing_pairwise(p: int) -> CostTerms:
    return CostTerms(p - 1, (p - 1) / p, (p - 1) / p)


def _both_pairwise(p: int) -> CostTerms:
    return CostTerms(2 * (p - 1), 2 * (p - 1) / p, (p - 1) / p)


def _doubling(p: int) -> CostTerms:
    busiest = int(traffic.sends(p).max())
    return CostTerms(busiest, busiest, _depth(p))


def _doubling_scan(p: int) -> CostTerms:
    left = [bin(rank).count("1") for rank in range(p)]
    reduced = int((traffic.receives(p) + left).max()) - 1
    return _doubling(p)._replace(gamma=max(0, reduced))


def _doubling_exscan(p: int) -> CostTerms:
    left = [bin(rank).count("1") - (rank > 0) for rank in range(p)]
    reduced = int((traffic.receives(p) + left).max()) - 1
    return _doubling(p)._replace(gamma=max(0, reduced))


def _doubling_all_gather(p: int) -> CostTerms:
    chunks = max(p - 1, int(traffic.chunks_spread(p).max()))
    return CostTerms(int(traffic.sends(p).max()), chunks / p, 0)


def _halving(p: int) -> CostTerms:
    kept = int(traffic.chunks_kept(p).max())
    return CostTerms(int(traffic.sends(p).max()), max(p - 1, kept) / p, kept / p)


def _rabenseifner(p: int) -> CostTerms:
    kept = int(traffic.chunks_kept(p).max())
    return CostTerms(
        int((traffic.sends(p) + traffic.receives(p)).max()), (p - 1 + kept) / p, kept / p
    )


def _bruck_all_to_all(p: int) -> CostTerms:
    return CostTerms(_depth(p), sum(bin(distance).count("1") for distance in range(p)) / p, 0)


def _star(p: int) -> CostTerms:
    return CostTerms(2 * (p - 1), (p - 1) * (1 + 1 / p), 0)


ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {
        "doubling": Algorithm(doubling, _doubling),
        "direct": Algorithm(direct, _both_pairwise),
        "rabenseifner": Algorithm(rabenseifner, _rabenseifner),
        "hierarchical": Algorithm(hierarchical, _both_pairwise),
        "star": Algorithm(star, lambda p: CostTerms(2 * (p - 1), 2 * (p - 1), p - 1)),
        "ring": Algorithm(ring, _both_pairwise, False, _commutes),
    },
    "reduce_scatter": {
        "direct": Algorithm(direct, _reducing_pairwise),
        "halving": Algorithm(halving, _halving),
        "doubling": Algorithm(doubling, _doubling),
        "hierarchical": Algorithm(hierarchical, _reducing_pairwise),
        "star": Algorithm(star, lambda p: _star(p)._replace(gamma=p - 1)),
        "ring": Algorithm(ring, _reducing_pairwise, False, _commutes),
    },
    "scan": {"doubling": Algorithm(doubling, _doubling_scan)},
    "exscan": {"doubling": Algorithm(doubling, _doubling_exscan)},
    "all_gather": {
        "direct": Algorithm(direct, _pairwise),
        "doubling": Algorithm(doubling, _doubling_all_gather),
        "bruck": Algorithm(bruck, lambda p: CostTerms(_depth(p), (p - 1) / p, 0)),
        "hierarchical": Algorithm(hierarchical, _pairwise),
        "star": Algorithm(star, _star),
        "ring": Algorithm(ring, _pairwise),
    },
    "broadcast": {
        "tree": Algorithm(tree, lambda p: CostTerms(_depth(p), _depth(p), 0)),
        "scatter_gather": Algorithm(
            scatter_gather, lambda p: CostTerms(2 * _depth(p), 2 * (p - 1) / p, 0)
        ),
        "hierarchical": Algorithm(
            hierarchical, lambda p: CostTerms(2 * (p - 1), 2 * (p - 1) / p, 0)
        ),
        "star": Algorithm(star, lambda p: CostTerms(p - 1, p - 1, 0)),
    },
    "reduce": {
        "tree": Algorithm(tree, lambda p: CostTerms(_depth(p), _depth(p), _depth(p))),
        "star": Algorithm(star, lambda p: CostTerms(p - 1, p - 1, p - 1)),
    },
    "gather": {
        "star": Algorithm(star, lambda p: CostTerms(p - 1, (p - 1) / p, 0)),
        "tree": Algorithm(tree, lambda p: CostTerms(_depth(p), 2 * (p - 1) / p, 0)),
    },
    "scatter": {
        "star": Algorithm(star, lambda p: CostTerms(p - 1, (p - 1) / p, 0)),
        "tree": Algorithm(tree, lambda p: CostTerms(_depth(p), 2 * (p - 1) / p, 0)),
    },
    "all_to_all": {
        "direct": Algorithm(direct, _pairwise),
        "bruck": Algorithm(bruck, _bruck_all_to_all),
    },
}
