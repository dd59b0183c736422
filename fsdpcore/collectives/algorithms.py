"""The table of algorithms: for each collective, its functions and their costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

from fsdpcore.collectives import direct, doubling, ring, star, tree


class Terms(NamedTuple):
    """A cost: messages, and bytes moved and reduced as multiples of n, on the busiest rank."""

    alpha: float
    beta: float
    gamma: float


class Algorithm(NamedTuple):
    """The module with the function, its cost for p ranks, and whether it is canonical."""

    module: ModuleType
    cost: Callable[[int], Terms]
    canonical: bool = True


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
