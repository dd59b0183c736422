"""Which algorithm carries a collective out.

The choice minimises the cost formulas of the algorithms' docstrings with the transport's alpha,
beta and gamma. It depends on values only that are equal on all ranks: the collective, the bytes,
the number of ranks and the transport. ``ring``, which is not canonical, has to be asked for; a
transport's own algorithms that are not are left out where ``deterministic`` is set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fsdpcore.backend import Backend
from fsdpcore.collectives.algorithms import ALGORITHMS, Algorithm
from fsdpcore.errors import ArgumentError


class Choice(NamedTuple):
    """An algorithm: its name, and the function that carries the collective out."""

    name: str
    function: Callable[..., Any]


def choose(
    collective: str,
    algorithm: str,
    nbytes: int,
    backend: Backend,
    dtype: np.dtype[Any] | None = None,
    op: str = "",
) -> Choice:
    """Return the algorithm that carries ``collective`` out.

    Args:
        collective: a key of ``ALGORITHMS``.
        algorithm: one of its algorithms or of the transport's own, or "auto".
        nbytes: the n of the cost formulas.
        backend: gives the number of ranks, the transport's costs and its own algorithms.
        dtype, op: of the call, where they are known; an algorithm may not support them.

    Raises:
        ArgumentError: the collective has no such algorithm.
    """
    own = backend.own_algorithms.get(collective, {})
    known = {**ALGORITHMS[collective], **own}
    if algorithm == "auto":
        algorithm = cheapest(collective, nbytes, backend, dtype, op)
    elif algorithm not in known:
        names = ", ".join(repr(name) for name in ["auto", *known])
        raise ArgumentError(f"{collective} has no algorithm {algorithm!r}; it has {names}")
    elif not known[algorithm].supports(dtype, op):
        what = f"{op} of {dtype}" if op else f"{dtype}"
        raise ArgumentError(f"algorithm {algorithm!r} of {collective} has no {what}; use 'auto'")
    return Choice(algorithm, getattr(known[algorithm].module, collective))


def cheapest(
    collective: str,
    nbytes: int,
    backend: Backend,
    dtype: np.dtype[Any] | None = None,
    op: str = "",
) -> str:
    """Return the name of the algorithm with the lowest cost; the first one of equals."""
    costs = backend.capabilities

    def seconds(known: Algorithm) -> float:
        terms = known.cost(backend.world_size)
        return terms.alpha * costs.alpha + nbytes * (
            terms.beta * costs.beta + terms.gamma * costs.gamma
        )

    candidates = {n: a for n, a in ALGORITHMS[collective].items() if a.canonical}
    for name, own in backend.own_algorithms.get(collective, {}).items():
        if (own.canonical or not backend.root.deterministic) and own.supports(dtype, op):
            candidates[name] = own
    return min(candidates, key=lambda name: seconds(candidates[name]))
