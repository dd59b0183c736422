"""Which algorithms there are, and which one ``algorithm="auto"`` takes.

The choice minimises the cost formulas of the algorithms' docstrings with the transport's alpha,
beta and gamma. It depends on values only that are equal on all ranks: the collective, the bytes,
the number of ranks and the transport. It takes canonical algorithms only, so ``auto`` gives the
same bits everywhere; ``ring``, which is not, has to be asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

from fsdpcore.backend import Backend
from fsdpcore.collectives import direct, doubling, ring, star, tree
from fsdpcore.errors import ArgumentError


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


def choose(collective: str, algorithm: str, nbytes: int, backend: Backend) -> Any:
    """Return the function that carries ``collective`` out.

    Args:
        collective: a key of ``ALGORITHMS``.
        algorithm: one of its algorithms, or "auto".
        nbytes: the n of the cost formulas.
        backend: gives the number of ranks and the transport's costs.

    Raises:
        ArgumentError: the collective has no such algorithm.
    """
    known = ALGORITHMS[collective]
    if algorithm == "auto":
        return getattr(known[cheapest(collective, nbytes, backend)].module, collective)
    if algorithm not in known:
        names = ", ".join(repr(name) for name in ["auto", *known])
        raise ArgumentError(f"{collective} has no algorithm {algorithm!r}; it has {names}")
    return getattr(known[algorithm].module, collective)


def cheapest(collective: str, nbytes: int, backend: Backend) -> str:
    """Return the name of the canonical algorithm with the lowest cost; the first one of equals."""
    costs = backend.capabilities

    def seconds(name: str) -> float:
        terms = ALGORITHMS[collective][name].cost(backend.world_size)
        return terms.alpha * costs.alpha + nbytes * (
            terms.beta * costs.beta + terms.gamma * costs.gamma
        )

    canonical = [name for name, known in ALGORITHMS[collective].items() if known.canonical]
    return min(canonical, key=seconds)
