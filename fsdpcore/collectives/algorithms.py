"""The table of algorithms: for each collective, its functions and their costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fsdpcore.collectives import direct, doubling, ring, star, tree


class Terms(NamedTuple):
    """A cost: messages, and bytes moved and reduced as multiples of n, on the busiest rank."""

    alpha: float
    beta: float
    gamma: float


def _anything(dtype: np.dtype[Any] | None, op: str) -> bool:
    return True


class Algorithm(NamedTuple):
    """An algorithm for one collective.

    Attributes:
        module: has a function named like the collective.
        cost: for p ranks.
        canonical: its reductions follow the canonical order.
        supports: whether it can handle a dtype (None where it is not known yet) and reduction.
    """

    module: object
    cost: Callable[[int], Terms]
    canonical: bool = True
    supports: Callable[[np.dtype[Any] | None, str], bool] = _anything


def _depth(p: int) -> int:
    return (p - 1).bit_length()


@lru_cache(maxsize=256)
def _busiest(p: int) -> int:
    """Messages that the busiest rank sends in recursive doubling."""
    return max(sum(len(step.targets) for step in doubling.steps(rank, p)) for rank in range(p))


ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {
        "doubling": Algorithm(doubling, lambda p: Terms(_busiest(p), _busiest(p), _depth(p))),
        "direct": Algorithm(direct, lambda p: Terms(2 * (p - 1), 2 * (p - 1) / p, (p - 1) / p)),
        "star": Algorithm(star, lambda p: Terms(2 * (p - 1), 2 * (p - 1), p - 1)),
        "ring": Algorithm(ring, lambda p: Terms(2 * (p - 1), 2 * (p - 1) / p, (p - 1) / p), False),
    },
    "reduce_scatter": {
        "direct": Algorithm(direct, lambda p: Terms(p - 1, (p - 1) / p, (p - 1) / p)),
        "doubling": Algorithm(doubling, lambda p: Terms(_busiest(p), _busiest(p), _depth(p))),
        "star": Algorithm(star, lambda p: Terms(2 * (p - 1), (p - 1) * (1 + 1 / p), p - 1)),
        "ring": Algorithm(ring, lambda p: Terms(p - 1, (p - 1) / p, (p - 1) / p), False),
    },
    "all_gather": {
        "direct": Algorithm(direct, lambda p: Terms(p - 1, (p - 1) / p, 0)),
        "doubling": Algorithm(doubling, lambda p: Terms(_busiest(p), (p - 1) / p, 0)),
        "star": Algorithm(star, lambda p: Terms(2 * (p - 1), (p - 1) * (1 + 1 / p), 0)),
        "ring": Algorithm(ring, lambda p: Terms(p - 1, (p - 1) / p, 0)),
    },
    "broadcast": {
        "tree": Algorithm(tree, lambda p: Terms(_depth(p), _depth(p), 0)),
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
        "direct": Algorithm(direct, lambda p: Terms(p - 1, (p - 1) / p, 0)),
    },
}
