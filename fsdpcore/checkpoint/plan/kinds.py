"""What may stand in a state, and how one kind is told from another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeGuard

import numpy as np

from fsdpcore.checkpoint.format.random_states import kind_of as generator_kind
from fsdpcore.checkpoint.plan.describe import is_engine
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.foreign import is_foreign, is_random_key
from fsdpcore.core.geometry.boxes import BoxShard
from fsdpcore.fsdp.state.state import EngineState, ShardedArray


class Stateful(Protocol):
    """What ``save`` and ``load`` need of any other object."""

    def state_dict(self) -> Any:
        """Return its state: containers of arrays, numbers and text."""

    def load_state_dict(self, state: Any) -> object:
        """Go on from what ``state_dict`` gave; arrays may be new ones."""


class PerRank:
    """Marks a value in a state that each rank has of its own; see ``save`` and ``load``.

    ``save`` stores the value of each rank, ``load`` gives each rank its own back. On other numbers
    of ranks than had saved it, a rank that there was takes its own; those of ranks that there are
    no more are left alone. A rank that there was not takes ``default``. Without one a generator of
    NumPy goes on from the state of rank ``r % saved``, jumped ahead ``r // saved`` times, so that
    no two ranks draw the same numbers, and anything else is an error. ``Loaded.state`` has the
    value itself in its place. ::

        state = {"model": engine, "noise": fc.checkpoint.PerRank(rng)}

    Args:
        value: anything that a state may have but engines and parts of arrays. For ``load``, what it
            is loaded into, or None to get what was saved.
        default: for ``load``: what a rank gets for which none was saved. ``value`` stays as it is.
        every: for ``load``: get the values of all ranks that saved, new ones, in a list by rank.

    Raises:
        ArgumentError: ``every`` goes with another argument.
    """

    def __init__(self, value: Any = None, *, default: Any = ..., every: bool = False) -> None:
        if every and not (value is None and default is ...):
            raise ArgumentError("PerRank(every=True) gives new values: it takes no others")
        self.value = value
        self.default = default
        self.every = every

    @property
    def has_default(self) -> bool:
        """Whether there is one."""
        return self.default is not ...

    def __repr__(self) -> str:
        if self.every:
            return "PerRank(every=True)"
        return f"PerRank({self.value!r})"


Kind = Literal["per rank", "engine", "state", "shard", "array", "key", "generator", "stateful", ""]
"""Of what stands in a state: "state" is an ``EngineState``; "" is a container, or plain values."""


def kind_of(value: object) -> Kind:
    """Return what something in a state is."""
    if isinstance(value, PerRank):
        return "per rank"
    if is_engine(value):
        return "engine"
    if isinstance(value, EngineState):
        return "state"
    if isinstance(value, (ShardedArray, BoxShard)):
        return "shard"
    if isinstance(value, np.ndarray):
        return "array"
    if isinstance(value, np.generic):
        return ""
    if is_foreign(value):
        return "key" if is_random_key(value) else "array"
    if generator_kind(value) is not None:
        return "generator"
    return "stateful" if is_stateful(value) else ""


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Whether it is an object that gives and takes its state."""
    return (
        hasattr(value, "state_dict")
        and hasattr(value, "load_state_dict")
        and not (isinstance(value, (Mapping, type)))
    )
