"""Which algorithms there are, and which one ``algorithm="auto"`` takes.

The choice minimises the cost formulas of the algorithms' docstrings with the transport's alpha,
beta and gamma. It depends on values only that are equal on all ranks: the collective, the bytes,
the number of ranks and the transport. It takes canonical algorithms only, so ``auto`` gives the
same bits everywhere; ``ring``, which is not, has to be asked for.
"""

from __future__ import annotations

from typing import Any

from fsdpcore.backend import Backend
from fsdpcore.collectives.algorithms import ALGORITHMS
from fsdpcore.errors import ArgumentError


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
