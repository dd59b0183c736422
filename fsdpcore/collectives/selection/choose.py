"""Which algorithm carries a collective out.

For ``algorithm="auto"``, the first of these that has an answer decides:

1. the user's override for the collective and the size (``overrides``);
2. where the ranks share memory: ``shared`` for arrays that all of them can see in place, and for
   others what follows;
3. the ranges that ``fsdpcore tune`` measured, where it did for a group of this size;
4. the lowest cost by the formulas of the algorithms' docstrings, with the costs of the tuning
   table or, for a transport that it does not know, of ``Capabilities``; for a group that spans
   hosts, with those that were measured between them (``Policy.link``). What ``hierarchical``
   costs there is known (``hierarchy.costs``) where the ranks of each host share memory.

What is named but cannot be used (the group has no such algorithm, it does not support the dtype
or the reduction, it is not canonical where ``deterministic`` is set) is passed over. An override
may name any algorithm; otherwise ``ring``, which is not canonical, has to be asked for.

The choice depends on values only that are equal on all ranks: the call, the bytes, the group, the
transport, and the job's ``Policy``, whose digest the ranks compare.

Arrays of a GPU are moved by the transport's own algorithms alone. Of these the first one is taken
that can be used, after the overrides.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from fsdpcore.collectives.selection.table import ALGORITHMS
from fsdpcore.collectives.spec import Choice
from fsdpcore.collectives.state import state_of
from fsdpcore.comm.backend import Backend
from fsdpcore.core.algorithm import Algorithm
from fsdpcore.core.capabilities import Capabilities
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.policy import Costs

Algorithms = dict[str, Algorithm]

AUTOMATIC = ("auto", "canonical")
"""Names for what is chosen here."""

# Who sends on what it got is done when the receiver has asked for it: a trip more for each but the
# first one. Up to about so many bytes nobody has to ask.
_UNASKED = 64 * 1024


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
        algorithm: one of its algorithms or of the transport's own, or "auto"; "canonical" is that
            among those that reduce in the canonical order.
        nbytes: the n of the cost formulas.
        backend: gives the group, the transport's costs and its own algorithms, and the policy.
        dtype, op: of the call, where they are known; an algorithm may not support them.

    Raises:
        ArgumentError: the collective has no such algorithm, or on a GPU none at all for the call.
    """
    # Once: the group's thread may find more of them at any time, with the first collective.
    own = state_of(backend).own_algorithms.get(collective, {})
    known = _known(collective, backend, own)
    publisher = None
    if algorithm in AUTOMATIC:
        usable = _usable(known, backend, dtype, op, canonical=algorithm == "canonical")
        algorithm = _overridden(collective, nbytes, backend, usable) or ""
        if not algorithm:
            allowed = _allowed(collective, usable, own)
            if not backend.moves.on_host:
                if not allowed:
                    raise ArgumentError(
                        f"{collective} of arrays on {backend.moves} has no algorithm for "
                        f"{_in_words(dtype, op)} that may be used; copy the array to the host"
                    )
                return _choice(next(iter(allowed)), known)
            algorithm = _measured(collective, nbytes, backend, allowed) or _cheapest(
                allowed, nbytes, backend
            )
            publisher = next((n for n in usable if 0 < known[n].publishes < nbytes), None)
    elif not isinstance(algorithm, str) or algorithm not in known:
        raise unknown(collective, algorithm, [*known])
    elif not known[algorithm].supports(dtype, op):
        raise ArgumentError(
            f"algorithm {algorithm!r} of {collective} has no {_in_words(dtype, op)}; use 'auto'"
        )
    choice = _choice(algorithm, known)
    if publisher is None or publisher == algorithm:
        return choice
    return _choice(publisher, known)._replace(fallback=choice)


def _choice(name: str, known: dict[str, Algorithm]) -> Choice:
    return Choice(name, known[name])


def _in_words(dtype: np.dtype[Any] | None, op: str) -> str:
    return f"{op} of {dtype}" if op else f"{dtype}"


def unknown(collective: str, algorithm: object, known: list[str]) -> ArgumentError:
    """The error of a call that asks for an algorithm that there is not."""
    names = ", ".join(repr(name) for name in [*AUTOMATIC, *known])
    return ArgumentError(f"{collective} has no algorithm {algorithm!r}; it has {names}")


def candidates(
    collective: str, backend: Backend, dtype: np.dtype[Any] | None = None, op: str = ""
) -> dict[str, Algorithm]:
    """Return what ``auto`` may choose from, without an override."""
    own = state_of(backend).own_algorithms.get(collective, {})
    known = _known(collective, backend, own)
    return _allowed(collective, _usable(known, backend, dtype, op), own)


def _known(collective: str, backend: Backend, own: Mapping[str, Algorithm]) -> Algorithms:
    """All algorithms of a collective: the general ones move arrays of the host only."""
    return {**(ALGORITHMS[collective] if backend.moves.on_host else {}), **own}


def _allowed(collective: str, usable: Algorithms, own: Mapping[str, Algorithm]) -> Algorithms:
    """Those that reduce in the canonical order, and what only the transport has."""
    special = own.keys() - ALGORITHMS.get(collective, {}).keys()
    return {name: known for name, known in usable.items() if known.canonical or name in special}


def cheapest(collective: str, nbytes: int, backend: Backend) -> str:
    """Return the name of the algorithm with the lowest cost; the first one of equals."""
    return _cheapest(candidates(collective, backend), nbytes, backend)


def expected_seconds(collective: str, nbytes: int, backend: Backend, *, groups: int = 1) -> float:
    """Return what the cheapest algorithm takes in a group, by its cost formula.

    Args:
        collective: its name.
        nbytes: of the full buffer, on each rank.
        backend: the group. If its ranks share memory, it knows that since its first collective.
        groups: how many do the same at the same time, over the links of the same hosts.
    """
    known = candidates(collective, backend)
    name = _cheapest(known, nbytes, backend)
    costs = _costs(name, known, backend, groups)
    return predict(known[name], backend.world_size, nbytes, costs)


def _cheapest(known: Algorithms, nbytes: int, backend: Backend) -> str:
    def seconds(name: str) -> float:
        costs = _costs(name, known, backend)
        return predict(known[name], backend.world_size, nbytes, costs)

    return min(known, key=seconds)


def _costs(name: str, known: Algorithms, backend: Backend, groups: int = 1) -> Costs | Capabilities:
    """What the messages of an algorithm cost in a group, where so many groups do the same."""
    policy = backend.root.policy
    own = policy.tuning.own.get(name) or known[name].costs
    if own is None and policy.link is not None:
        most = _most_on_a_host(tuple(backend.hosts))
        if most < backend.world_size:
            senders = groups * (most if known[name].crowds else 1)
            return dataclasses.replace(policy.link, beta=policy.link.beta * senders)
    return own or policy.tuning.costs or backend.capabilities


@functools.lru_cache(maxsize=256)
def _most_on_a_host(hosts: tuple[int, ...]) -> int:
    return max(Counter(hosts).values())


def predict(
    algorithm: Algorithm, world_size: int, nbytes: int, costs: Costs | Capabilities
) -> float:
    """Return the seconds that an algorithm takes by its cost formula."""
    terms = algorithm.cost(world_size)
    moved, reduced = terms.beta * costs.beta, terms.gamma * costs.gamma
    trips = terms.latency
    if nbytes > _UNASKED and trips > 1:
        trips += trips - 1
    seconds = trips * costs.latency + terms.alpha * costs.alpha
    seconds += nbytes * (moved + reduced)
    return seconds + (algorithm.besides(nbytes) if algorithm.besides is not None else 0.0)


def _usable(
    known: Algorithms,
    backend: Backend,
    dtype: np.dtype[Any] | None,
    op: str,
    *,
    canonical: bool = False,
) -> Algorithms:
    """What can be used for a call at all, whoever asks for it."""
    deterministic = canonical or backend.root.policy.deterministic
    return {
        name: algorithm
        for name, algorithm in known.items()
        if algorithm.supports(dtype, op) and (algorithm.canonical or not deterministic)
    }


def _overridden(collective: str, nbytes: int, backend: Backend, usable: Algorithms) -> str | None:
    ranges = backend.root.policy.overrides.get(collective)
    name = None if ranges is None else ranges.at(nbytes)
    return name if name in usable else None


def _measured(collective: str, nbytes: int, backend: Backend, allowed: Algorithms) -> str | None:
    hosts = len(set(backend.hosts))
    entry = backend.root.policy.tuning.for_group(backend.world_size, hosts)
    if entry is None:
        return None
    for table in (entry.best, entry.general):
        ranges = table.get(collective)
        name = None if ranges is None else ranges.at(nbytes)
        if name in allowed:
            return name
    return None
