"""The states of generators by name, as ``generators=`` of ``save`` and ``load`` takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fsdpcore.checkpoint.format.random_states import check, jumped, set_state, state_of
from fsdpcore.core.errors import ArgumentError

Generators = Mapping[str, np.random.Generator]
"""Random generators by name."""


def states_of(generators: Generators) -> dict[str, Any]:
    """Return the states by name; arrays in them as lists.

    Raises:
        ArgumentError: something is no ``np.random.Generator``.
    """
    if not isinstance(generators, Mapping):
        raise ArgumentError(
            "generators maps names to np.random.Generator, got " + type(generators).__name__
        )
    for name, generator in generators.items():
        if not isinstance(name, str) or not isinstance(generator, np.random.Generator):
            raise ArgumentError(
                f"generators maps names to np.random.Generator, got {name!r}: "
                f"{type(generator).__name__}; others go into the state"
            )
    return {name: state_of(generator) for name, generator in generators.items()}


def restore(generators: Generators, ranks: Sequence[Any], rank: int) -> list[str]:
    """Set generators to what they were when a checkpoint was saved.

    A generator that was equal on all ranks is so again, on any number of ranks. Of others, with
    more ranks than there were, rank r goes on from the state of rank ``r % saved``, jumped ahead
    ``r // saved`` times, so that no two ranks draw the same numbers.

    Args:
        generators: whose states are set.
        ranks: what the metadata has of every rank that saved.
        rank: this one.

    Returns:
        The names of which the checkpoint has nothing, sorted; they stay as they are.

    Raises:
        ArgumentError: a generator is of another kind than the one saved, or cannot jump.
    """
    states_of(generators)  # for the types
    saved = _saved(ranks[rank % len(ranks)]) if ranks else {}
    found = {name: saved[name] for name in generators if name in saved}
    for name, state in found.items():
        jumps = 0 if _equal(name, ranks) else rank // len(ranks)
        try:
            check(generators[name], "Generator", state)
            found[name] = jumped("Generator", state, jumps)
        except ArgumentError as error:
            raise ArgumentError(f"generator {name!r} {error}") from error
    for name, state in found.items():
        set_state(generators[name], state)
    return sorted(set(generators) - set(found))


def _equal(name: str, ranks: Sequence[Any]) -> bool:
    """Whether all ranks that saved had the same state."""
    first, *others = (_saved(each).get(name) for each in ranks)
    return all(other == first for other in others)


def _saved(rank: Any) -> Mapping[str, Any]:
    """Return what the metadata has of a rank's generators; nothing if that is no mapping."""
    states = rank.get("generators") if isinstance(rank, Mapping) else None
    return states if isinstance(states, Mapping) else {}
