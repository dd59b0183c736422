"""The states of random generators, as JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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
    states = {}
    for name, generator in generators.items():
        if not isinstance(name, str) or not isinstance(generator, np.random.Generator):
            raise ArgumentError(
                f"generators maps names to np.random.Generator, got {name!r}: "
                f"{type(generator).__name__}"
            )
        states[name] = _plain(generator.bit_generator.state)
    return states


def _plain(value: Any) -> Any:
    """Return a value of nested dicts with arrays and NumPy's integers replaced."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value


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
    found = {name: each for name, each in generators.items() if name in saved}
    jumps = {name: 0 if _equal(name, ranks) else rank // len(ranks) for name in found}
    for name, generator in found.items():
        _check_kind(name, generator, saved[name], jumps[name])
    for name, generator in found.items():
        bits: Any = generator.bit_generator
        try:
            bits.state = saved[name]
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise ArgumentError(
                f"the saved state of generator {name!r} is none: {error}"
            ) from error
        if jumps[name]:
            bits.state = bits.jumped(jumps[name]).state
    return sorted(set(generators) - set(found))


def _equal(name: str, ranks: Sequence[Any]) -> bool:
    """Whether all ranks that saved had the same state."""
    first, *others = (_saved(each).get(name) for each in ranks)
    return all(other == first for other in others)


def _saved(rank: Any) -> Mapping[str, Any]:
    """Return what the metadata has of a rank's generators; nothing if that is no mapping."""
    states = rank.get("generators") if isinstance(rank, Mapping) else None
    return states if isinstance(states, Mapping) else {}


def _check_kind(name: str, generator: np.random.Generator, state: Any, jumps: int) -> None:
    bits = generator.bit_generator
    kind = state.get("bit_generator") if isinstance(state, Mapping) else None
    if kind != type(bits).__name__:
        raise ArgumentError(
            f"generator {name!r} is a {type(bits).__name__}, but what was saved is a {kind}"
        )
    if jumps and not hasattr(bits, "jumped"):
        raise ArgumentError(
            f"generator {name!r} cannot be restored on more ranks than there were: a {kind} "
            "cannot jump ahead; seed it anew for each rank, and load without it"
        )
