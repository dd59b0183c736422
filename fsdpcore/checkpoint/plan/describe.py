"""What a rank has to save: described in plain values, and the arrays themselves in that order."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np

from fsdpcore.checkpoint.format.dtypes import stored_as
from fsdpcore.checkpoint.format.metadata_builder import check_shape
from fsdpcore.checkpoint.memory.shards import (
    checked_state,
    dtype_of,
    parts_of,
    replica_of,
    shape_of,
)
from fsdpcore.checkpoint.plan.held import HeldArray, held_piece
from fsdpcore.checkpoint.plan.save_plan import Rows
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.device import HOST, Device
from fsdpcore.core.errors import ArgumentError
from fsdpcore.fsdp.state.state import EngineState


class StatefulEngine(Protocol):
    """What ``save`` and ``load`` need of an engine; ``fc.FSDP`` has it."""

    partially_updated: bool

    @property
    def tensor(self) -> Backend | None:
        """The ranks with the other boxes of its parameters; None if there are none."""

    @property
    def everyone(self) -> Backend:
        """Its ranks and theirs."""

    def state_dict(self, *, optimizer: bool = True) -> EngineState:
        """Return this rank's part of everything, as views."""

    def writing_state(self, *, optimizer: bool = True) -> AbstractContextManager[EngineState]:
        """Give this rank's part of everything, to be written in place."""

    def load_info(self, info: Mapping[str, Any]) -> None:
        """Take over the number of steps, and what else is in ``EngineState.info``."""


def is_engine(value: object) -> TypeGuard[StatefulEngine]:
    """Whether it is an engine, not an object with a state of any other kind."""
    return hasattr(value, "writing_state") and not isinstance(value, (Mapping, type))


def check_ranks(state: object, backend: Backend) -> None:
    """Raise ArgumentError for an engine of which ranks with the other boxes are not in ``backend``.

    A checkpoint without these boxes would not be complete, and loads of theirs could find another.
    Of groups that train apart, one of several would hold parts of one and parts of another.
    """
    if is_engine(state) and getattr(state, "apart", False):
        mine = sorted(state.everyone.ranks)
        others = sorted(set(backend.ranks) - set(mine))
        if others:
            raise ArgumentError(
                f"this OuterStep is of the group of ranks {mine}, and ranks {others} train apart, "
                "with other values: each group has a checkpoint of its own; pass the backend of "
                "its engine. fc.elastic keeps one state of all ranks, so it takes none"
            )
    if not is_engine(state) or state.tensor is None:
        return
    everyone = state.everyone
    if everyone.root is not backend.root:
        raise ArgumentError(
            "this engine has a tensor group, and belongs to another job than the backend, which "
            "cannot tell whether all of its ranks take part; pass the backend that the mesh was "
            "made of"
        )
    absent = sorted(set(everyone.ranks) - set(backend.ranks))
    if absent:
        raise ArgumentError(
            f"this engine and those of its tensor group are on ranks {sorted(everyone.ranks)}, of "
            f"which {absent} do not take part; pass the backend that the mesh was made of, so that "
            "all of them do it together"
        )


class HeldState(NamedTuple):
    """What this rank holds.

    Attributes:
        arrays: in plain values.
        sources: the pieces of all arrays, one after the other; views.
    """

    arrays: tuple[HeldArray, ...]
    sources: tuple[Array, ...]


def holding_of(state: object, device: Device = HOST) -> HeldState:
    """Return what this rank has of a state.

    Args:
        state: a mapping from names to arrays, ``ShardedArray``, ``BoxShard``.
        device: whose arrays may be in it, beside NumPy's.

    Raises:
        ArgumentError: it is none.
    """
    arrays, sources = [], []
    for name, shard in checked_state(state, device).items():
        held = []
        for part in parts_of(shard):
            held.append(held_piece(part.region, shape_of(shard)))
            sources.append(part.array)
        dtype, shape = _dtype(name, dtype_of(shard)), shape_of(shard)
        check_shape(shape, dtype_of(shard).itemsize, name, ArgumentError)
        arrays.append(HeldArray(name, dtype, shape, tuple(held), replica_of(shard)))
    return HeldState(tuple(arrays), tuple(sources))


def _dtype(name: str, dtype: np.dtype[Any]) -> str:
    try:
        return _stored_name(dtype)
    except ArgumentError as error:
        raise ArgumentError(f"{name!r}: {error}") from None


@functools.lru_cache(maxsize=64)  # NumPy makes the name anew each time
def _stored_name(dtype: np.dtype[Any]) -> str:
    stored_as(dtype)
    return dtype.name  # without the byte order: what is written is little-endian


def rows_of(array: Array, rows: Rows) -> Array:
    """Return some rows of a piece."""
    return array[rows.start : rows.stop] if array.ndim else array
