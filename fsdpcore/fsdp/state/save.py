"""``engine.state_dict``: this rank's part of everything, or all of it, gathered array by array."""

from __future__ import annotations

import operator
from typing import Any

from fsdpcore.collectives import all_gather_v, barrier, gather_v
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import ArgumentError
from fsdpcore.fsdp.sharding.process_groups import ProcessGroups
from fsdpcore.fsdp.state.boxes import gather_boxes, scatter_boxes
from fsdpcore.fsdp.state.entries import (
    StateEntry,
    by_unit,
    entries_of,
    ignored_of,
    memory_of,
    ties_of,
)
from fsdpcore.fsdp.state.state import FORMAT, ArrayPiece, EngineState, ShardedArray
from fsdpcore.fsdp.units.model import ShardedModel
from fsdpcore.fsdp.units.views import read_only


class ShardedState:
    """Views of what this rank holds of an engine, made again only where its memory is another.

    Args:
        model: of the engine.
    """

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self._known: dict[bool, tuple[list[Array], dict[str, ShardedArray | Array]]] = {}

    def get(self, *, optimizer: bool, to: int | str = "all") -> EngineState:
        """Return the views; does not communicate, and copies nothing.

        Raises ArgumentError where ``to`` names a single rank, as only ``full_state`` can.
        """
        if to != "all":
            raise ArgumentError("to=... belongs to full=True; each rank has its own shards anyway")
        model = self._model
        model.status.check_whole()
        if optimizer:
            model.status.check_own("the state of the optimizer, which has the weights now,")
        memory = memory_of(model.units, optimizer=optimizer)
        known, arrays = self._known.get(optimizer, ([], {}))
        if len(known) != len(memory) or not all(map(operator.is_, known, memory)):
            arrays = _views(model, optimizer)
            self._known[optimizer] = memory, arrays
        return EngineState(arrays, info_of(model))


def _views(model: ShardedModel, optimizer: bool) -> dict[str, ShardedArray | Array]:
    arrays: dict[str, ShardedArray | Array] = {}
    for entry in entries_of(model.units, optimizer=optimizer):
        arrays[entry.name] = sharded(model.groups, entry, read_only(entry.data))
    for name, (unit, param) in ignored_of(model.units).items():
        arrays[name] = unit.ignored[param]
    return arrays


def sharded(groups: ProcessGroups, entry: StateEntry, data: Array) -> ShardedArray:
    """Return this rank's part of an array, as ``data``."""
    pieces = (ArrayPiece(entry.start, entry.stop, data),) if data.size else ()
    copy = (0, 1) if entry.of_all else (groups.replica, groups.placement.replicas)
    if not entry.split:
        copy = (groups.whole.rank, groups.whole.world_size)
    if groups.tensor is not None and entry.box is None:  # all of these have it alike
        copy = (groups.tensor.rank * copy[1] + copy[0], copy[1] * groups.tensor.world_size)
    return ShardedArray(entry.whole, data.dtype, pieces, *copy, entry.box)


def full_state(model: ShardedModel, *, optimizer: bool, to: int | str) -> EngineState:
    """Gather one array after the other, into NumPy's; a collective.

    A rank that gets the result holds nothing else than that. Of the others, those that share a copy
    with it may pass on what is sent, less than one array at a time.

    Args:
        model: whose state.
        optimizer: with the optimizer's.
        to: the one rank that gets arrays, or "all"; with ``tensor``, the first of it that there is
            at this rank of the model's backend.
    """
    model.status.check_whole()
    if optimizer:
        model.status.check_own("the state of the optimizer, which has the weights now,")
    groups, device = model.groups, model.device
    backend = groups.whole
    root = None
    if to != "all":
        if isinstance(to, str):
            raise ArgumentError(f"to={to!r}; give the number of a rank, or 'all'")
        root = as_int(to, "to (the rank that gets the state)", minimum=0)
        if root >= backend.world_size:
            raise ArgumentError(f"to={root}, but there are {backend.world_size} ranks, from 0")
    entries = entries_of(model.units, optimizer=optimizer)
    barrier(groups.everyone, label=f"state_dict(full=True, optimizer={optimizer}, to={to!r})")
    arrays: dict[str, ShardedArray | Array] = {}
    for group in by_unit(entries):
        for entry in group:
            array = _gathered(groups, entry, root)
            if array is not None:
                arrays[entry.name] = device.to_host(array)
    if root is None or (root == backend.rank and groups.leads):
        for name, (unit, param) in ignored_of(model.units).items():
            arrays[name] = device.to_host(unit.ignored[param].copy())
    return EngineState(arrays, info_of(model))


def gathered(groups: ProcessGroups, entry: StateEntry) -> Array:
    """Return a copy of all of an array; a collective of the ranks that share a copy.

    Of those with the other boxes too, if it is cut.
    """
    array = _gathered(groups, entry, None)
    assert array is not None
    return array


def _gathered(groups: ProcessGroups, entry: StateEntry, root: int | None) -> Array | None:
    """Return all of an array on the root, or everywhere if that is None; else None."""
    tensor, device = groups.tensor, groups.device
    if tensor is None:
        return _shared(groups, entry, root)
    if entry.boxes:
        box = _shared(groups, entry, root)
        only = None if root is None else 0
        return None if box is None else gather_boxes(device, entry, box, tensor, only)
    # All ranks of tensor have it alike, or nearly so: where sums over ranks depend on the place in
    # a buffer, as by "ring", places differ. So that it is one array, one of them gives it.
    found = _shared(groups, entry, root) if groups.leads else None
    if root is not None:
        return found
    return scatter_boxes(device, entry, found, tensor).reshape(entry.shape)


def _shared(groups: ProcessGroups, entry: StateEntry, root: int | None) -> Array | None:
    """Return what the ranks that share a copy have of an array: all, or a box of it."""
    shards, size = groups.shards, groups.placement.shards
    if entry.of_all:
        shards, size = groups.whole, groups.whole.world_size
    own = root in (None, groups.whole.rank)
    if not entry.split or shards.world_size == 1:
        return entry.data.copy().reshape(entry.shape) if own else None
    label = f"state, {entry.name}"
    if root is None:
        flat: Array = all_gather_v(entry.movable, shards, label=label)
        return flat.reshape(entry.shape)
    if not entry.of_all and root // size != groups.replica:
        return None  # another replica gives it
    out = groups.device.empty(entry.bounds[-1], entry.data.dtype) if own else None
    gather_v(entry.movable, shards, root=root % size, out=out, label=label)
    return None if out is None else out.reshape(entry.shape)


def info_of(model: ShardedModel) -> dict[str, Any]:
    """Return what ``EngineState`` says of it."""
    scaler, optimizers = model.scaler, model.optimizers
    scale = {"scale": scaler.scale, "applied": scaler.applied}
    return {
        "format": FORMAT,
        "step": model.status.steps,
        "loss_scale": None if scaler.policy is None else scale,
        "optimizer": None if optimizers is None else repr(optimizers),
        "strategy": model.options.strategy.name,
        "world_size": model.groups.everyone.world_size,
        "ties": ties_of(model.units),
    }
