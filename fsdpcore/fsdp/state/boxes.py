"""Arrays that are cut over the ranks of ``tensor``, put together from their boxes and cut again."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpcore.collectives import all_gather_v, broadcast, gather_v, scatter_v
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.device import Device
from fsdpcore.core.geometry.boxes import ArrayBox
from fsdpcore.fsdp.state.entries import StateEntry


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
