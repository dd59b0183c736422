"""Parameters that are cut over a group of ranks, beside the sharding: each rank's engine has a box.

With two axes of a mesh, 3 ranks that shard and 2 that cut, rank 3 has::

    backend     1 3 5          shard its boxes between them
    tensor          2 3        have the other boxes of the same parameters
    everyone    0 2 4 1 3 5    number ``tensor.rank * backend.world_size + backend.rank``

What is no box is the same on all ranks of ``tensor``, but not at the same place of their flat
buffers, since boxes may be of different sizes: it lies in the buffer of its unit, among the boxes.
That costs special cases here and there (who counts it for a norm, who gives it to a state, whose
sums an optimizer goes by). A buffer of its own would need none of them, but one gathering and one
reduction more per unit and pass, for what in most units is a few biases and gains.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fsdpcore.collectives import all_gather, all_gather_v, broadcast, gather_v, scatter_v
from fsdpcore.comm.backend import Backend
from fsdpcore.comm.transport import transport_of
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_instance
from fsdpcore.core.device import Device
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.boxes import ArrayBox

if TYPE_CHECKING:
    from fsdpcore.fsdp.state.entries import StateEntry
    from fsdpcore.fsdp.units.unit import Unit
    from fsdpcore.fsdp.units.updates import Optimizers


def checked_tensor(tensor: Any, backend: Backend) -> Backend | None:
    """Return the ``tensor`` group of an engine on ``backend``; None where no other rank is in it.

    Raises:
        ArgumentError: it cannot be such a group.
    """
    if tensor is None:
        return None
    as_instance(
        tensor,
        Backend,
        "tensor",
        "the group of ranks that have the other boxes of the same parameters, such as "
        "mesh['tensor']",
    )
    me = backend.ranks[backend.rank]
    common = sorted(set(tensor.ranks) & set(backend.ranks))
    if tensor.root is not backend.root or common != [me]:
        raise ArgumentError(
            f"the ranks that shard ({list(backend.ranks)}) and those of tensor "
            f"({list(tensor.ranks)}) must be of one job, with rank {me} alone in both: take two "
            "axes of one mesh"
        )
    return tensor if tensor.world_size > 1 else None


def everyone_of(backend: Backend, tensor: Backend | None) -> Backend:
    """Return the group of all ranks that train together: ``backend`` itself without ``tensor``.

    A collective of ``backend`` with it.

    Raises:
        ArgumentError: the groups of the ranks make no grid.
    """
    if tensor is None:
        return backend
    told = all_gather(np.array(tensor.ranks, np.int64), backend, label="ranks of tensor")
    table = told.reshape(backend.world_size, tensor.world_size)
    members = table.T.reshape(-1).tolist()
    if table[:, tensor.rank].tolist() != list(backend.ranks) or len(set(members)) < len(members):
        raise ArgumentError(
            f"the ranks {list(backend.ranks)}, which shard, have the groups {table.tolist()} as "
            "tensor; they must be rows of a grid of ranks, of which those that shard are a column: "
            "take two axes of one mesh"
        )
    return transport_of(backend).sub(members, name="fsdp everyone")


def drop_whole_boxes(units: Sequence[Unit]) -> None:
    """Have boxes that are all there is be none, where no group has others; changes the units.

    Raises:
        ArgumentError: there are others.
    """
    for unit in units:
        for name, box in list(unit.boxes.items()):
            if not box.is_whole:
                raise ArgumentError(
                    f"{unit.name}.{name} is {described(box)}, and no rank of this engine has the "
                    "rest; pass the group of ranks that do: FSDP(..., tensor=mesh['tensor'])"
                )
            del unit.boxes[name]


def check_optimizers(units: Sequence[Unit], optimizers: Optimizers | None) -> None:
    """Raise ArgumentError for a box with an optimizer that has to know the whole parameter."""
    for unit in units:
        found = {} if optimizers is None else optimizers.of_unit(unit.name)
        for name in unit.boxes:
            policy = found.get(name)
            if policy is not None and not (policy.elementwise or policy.takes_boxes):
                raise ArgumentError(
                    f"{unit.name}.{name} is cut over the ranks of tensor, but "
                    f"{type(policy).__name__} updates whole parameters; give it another optimizer"
                )


def described(box: ArrayBox) -> str:
    """Return a box in words."""
    ranges = ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True))
    return f"the box [{ranges}] of an array of shape {box.whole}"


def untiled(boxes: Sequence[ArrayBox]) -> str:
    """Say why the boxes of one array do not cover it once; "" if they do."""
    starts = np.array([box.start for box in boxes])[:, None]
    stops = np.array([box.stop for box in boxes])[:, None]
    least, most = np.minimum(stops, stops[:, 0]), np.maximum(starts, starts[:, 0])
    overlaps = np.triu((most < least).all(axis=2), 1)
    if overlaps.any():
        one, other = np.argwhere(overlaps)[0].tolist()
        return f"ranks {one} and {other} of tensor have the same elements"
    missing = math.prod(boxes[0].whole) - sum(box.size for box in boxes)
    return f"no rank of tensor has {missing} of its elements" if missing else ""


def spans(unit: Unit, *, boxed: bool) -> Iterator[slice]:
    """Give the parts of this rank's shard that are boxes, or those that are not."""
    for piece in unit.layout.pieces(unit.shard_rank):
        if (piece.name in unit.boxes) is boxed:
            yield slice(piece.shard_start, piece.shard_stop)


# Whole arrays.


def gather_boxes(
    device: Device, entry: StateEntry, box: Array, tensor: Backend, root: int | None
) -> Array | None:
    """Put an array together from the boxes of all ranks of ``tensor``; a collective of these.

    Args:
        device: where the arrays are.
        entry: what it is.
        box: this rank's.
        tensor: the ranks.
        root: the one that gets it; None for all.
    """
    label = f"state, {entry.name}"
    if root is None:
        flat = all_gather_v(box.reshape(-1), tensor, label=label)
    else:
        total = sum(each.size for each in entry.boxes)
        out = device.empty(total, box.dtype) if tensor.rank == root else None
        flat = gather_v(box.reshape(-1), tensor, root=root, out=out, label=label)
        if tensor.rank != root:
            return None
    if _lie_in_order(entry.boxes):
        return flat.reshape(entry.whole)  # type: ignore[no-any-return]
    whole, start = device.empty(entry.whole, box.dtype), 0
    for each in entry.boxes:
        whole[each.slices] = flat[start : start + each.size].reshape(each.shape)
        start += each.size
    return whole


def scatter_boxes(device: Device, entry: StateEntry, whole: Array | None, tensor: Backend) -> Array:
    """Return this rank's box, flat, of an array that rank 0 of ``tensor`` has; a collective.

    Of an array that is not cut it is all of it.
    """
    dtype, label = entry.data.dtype, f"state, {entry.name}"
    if not entry.boxes:
        flat = device.empty(entry.size, dtype) if whole is None else whole.reshape(-1)
        broadcast(flat, tensor, root=0, out=flat if whole is None else None, label=label)
        return flat
    sizes = [each.size for each in entry.boxes]
    given = None
    if whole is not None:
        given, start = device.empty(sum(sizes), dtype), 0
        for each in entry.boxes:
            given[start : start + each.size] = whole[each.slices].reshape(-1)
            start += each.size
    out = device.empty(sizes[tensor.rank], dtype)
    scatter_v(given, tensor, None if given is None else sizes, root=0, out=out, label=label)
    return out


def _lie_in_order(boxes: Sequence[ArrayBox]) -> bool:
    """Whether boxes that cover an array lie in it one behind the other, rank by rank."""
    runs = [box.run for box in boxes if box.size]
    starts = [run[0] for run in runs if run is not None]
    return len(starts) == len(runs) and starts == sorted(starts)
