"""The table of algorithms: for each collective, its functions and their costs."""

from __future__ import annotations

import math
from collections.abc import Callable
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


def _tree_depth(p: int) -> int:
    """From the root of a binomial tree to the rank that is farthest: the most bits of a number."""
    return p.bit_length() - 1


def _pairwise(p: int) -> CostTerms:
    return CostTerms(p - 1, (p - 1) / p, 0, 1)


def _reducing_pairwise(p: int) -> CostTerms:
    return CostTerms(p - 1, (p - 1) / p, (p - 1) / p, 1)


def _both_pairwise(p: int) -> CostTerms:
    return CostTerms(2 * (p - 1), 2 * (p - 1) / p, (p - 1) / p, 2)


def _around(of: Callable[[int], CostTerms]) -> Callable[[int], CostTerms]:
    """The same messages one after the other, as in a ring."""
    return lambda p: of(p)._replace(latency=of(p).alpha)


def _doubling(p: int) -> CostTerms:
    busiest = traffic.sent(p)
    return CostTerms(busiest, busiest, _depth(p), _depth(p))


def _doubling_scan(p: int) -> CostTerms:
    # The last rank of the largest perfect tree has the most bits, and no fewer merges than others.
    combined = _tree_depth(p) + _depth(p) - 1
    return _doubling(p)._replace(gamma=max(0, combined))


def _doubling_exscan(p: int) -> CostTerms:
    scan = _doubling_scan(p)
    return scan._replace(gamma=max(0, scan.gamma - 1))


def _doubling_all_gather(p: int) -> CostTerms:
    return CostTerms(traffic.sent(p), max(p - 1, traffic.chunks_spread(p)) / p, 0, _depth(p))


def _halving(p: int) -> CostTerms:
    kept = traffic.chunks_kept(p)
    return CostTerms(traffic.sent(p), max(p - 1, kept) / p, kept / p, _depth(p))


def _rabenseifner(p: int) -> CostTerms:
    kept = traffic.chunks_kept(p)
    return CostTerms(traffic.sent_and_received(p), (p - 1 + kept) / p, kept / p, 2 * _depth(p))


def _bruck_all_to_all(p: int) -> CostTerms:
    return CostTerms(_depth(p), traffic.bits_set(p) / p, 0, _depth(p))


def _tree(p: int) -> CostTerms:
    return CostTerms(_depth(p), _depth(p), 0, _tree_depth(p))


def _star(p: int) -> CostTerms:
    return CostTerms(p - 1, p - 1, 0, 1)


def _both_star(p: int) -> CostTerms:
    return CostTerms(2 * (p - 1), (p - 1) * (1 + 1 / p), 0, 2)


def _spread_by_star(p: int) -> CostTerms:
    return CostTerms(p - 1, (p - 1) / p, 0, 1)


def _spread_directly(p: int) -> CostTerms:
    return _both_pairwise(p)._replace(gamma=0, latency=min(2, p - 1))


def _spread_in_rounds(p: int) -> CostTerms:
    if p == 1:
        return CostTerms(0, 0, 0, 0)
    # The last piece of each rank is passed on when the root has sent everything.
    last = (p - 2) / ((p - 1) * direct.ROUNDS)
    return CostTerms(direct.ROUNDS * (p - 1), 1 + last, 0, min(2, p - 1))


def _spread_by_tree(p: int) -> CostTerms:
    return CostTerms(_depth(p), 2 * (p - 1) / p, 0, _tree_depth(p))


def _on_one_host(cost: Callable[[int], CostTerms]) -> Algorithm:
    """``hierarchical``: its formula holds on one host, where it is nowhere the best.

    On several it has to be asked for, unless ``hierarchy.costs`` knows what it costs there.
    """
    return Algorithm(hierarchical, cost, besides=lambda nbytes: math.inf)


ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {
        "doubling": Algorithm(doubling, _doubling),
        "direct": Algorithm(direct, _both_pairwise),
        "rabenseifner": Algorithm(rabenseifner, _rabenseifner),
        "hierarchical": _on_one_host(_both_pairwise),
        "star": Algorithm(
            star, lambda p: CostTerms(2 * (p - 1), 2 * (p - 1), p - 1, 2), crowds=False
        ),
        "ring": Algorithm(ring, _around(_both_pairwise), False, _commutes, crowds=False),
    },
    "reduce_scatter": {
        "direct": Algorithm(direct, _reducing_pairwise),
        "halving": Algorithm(halving, _halving),
        "doubling": Algorithm(doubling, _doubling),
        "hierarchical": _on_one_host(_reducing_pairwise),
        "star": Algorithm(star, lambda p: _both_star(p)._replace(gamma=p - 1), crowds=False),
        "ring": Algorithm(ring, _around(_reducing_pairwise), False, _commutes, crowds=False),
    },
    "scan": {"doubling": Algorithm(doubling, _doubling_scan)},
    "exscan": {"doubling": Algorithm(doubling, _doubling_exscan)},
    "all_gather": {
        "direct": Algorithm(direct, _pairwise),
        "doubling": Algorithm(doubling, _doubling_all_gather),
        "bruck": Algorithm(bruck, lambda p: CostTerms(_depth(p), (p - 1) / p, 0, _depth(p))),
        "hierarchical": _on_one_host(_pairwise),
        "star": Algorithm(star, _both_star, crowds=False),
        "ring": Algorithm(ring, _around(_pairwise), crowds=False),
    },
    "broadcast": {
        "tree": Algorithm(tree, _tree, crowds=False),
        "scatter_gather": Algorithm(
            scatter_gather,
            lambda p: CostTerms(2 * _depth(p), 2 * (p - 1) / p, 0, _tree_depth(p) + _depth(p)),
        ),
        "direct": Algorithm(direct, _spread_in_rounds),
        "hierarchical": _on_one_host(_spread_directly),
        "star": Algorithm(star, _star, crowds=False),
    },
    "reduce": {
        "tree": Algorithm(tree, lambda p: _tree(p)._replace(gamma=_depth(p)), crowds=False),
        "star": Algorithm(star, lambda p: _star(p)._replace(gamma=p - 1), crowds=False),
    },
    "gather": {
        "star": Algorithm(star, _spread_by_star, crowds=False),
        "tree": Algorithm(tree, _spread_by_tree, crowds=False),
    },
    "scatter": {
        "star": Algorithm(star, _spread_by_star, crowds=False),
        "tree": Algorithm(tree, _spread_by_tree, crowds=False),
    },
    "all_to_all": {
        "direct": Algorithm(direct, _pairwise),
        "bruck": Algorithm(bruck, _bruck_all_to_all),
    },
}
