"""The collectives of tensor parallelism: arrays of a group that are cut along some axis.

An axis is cut as ``splits`` says: contiguous parts, the first ones one longer. All ranks of the
group call the same function in the same order; with one rank nothing is communicated or copied.
Arrays are NumPy's, or CuPy's where the group's device is a GPU; contiguous ones are moved without
further copies where everything before the cut axis has an extent of one, and with one otherwise.
The errors are those of ``fsdpcore.all_reduce``. Every function blocks until this rank's result
is complete.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from fsdpcore import collectives
from fsdpcore.comm.backend import Backend
from fsdpcore.core.array_module import array_module
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_instance, as_int
from fsdpcore.core.errors import ArgumentError, MismatchError
from fsdpcore.parallel.splits import bounds, own_range, own_size, split


def all_reduce(x: Array, group: Backend, *, op: str = "sum", label: str = "parallel sum") -> Array:
    """Combine the arrays of all ranks of ``group`` elementwise: one all_reduce, which blocks.

    Args:
        x: of equal shape and dtype on all ranks. It belongs to the call, which may overwrite it.
        group: the ranks.
        op: how values are combined: the name of a ``ReduceOp``.
        label: what it is for, in traces and errors.

    Returns:
        An array like ``x``, with the same bits on every rank; ``x`` itself in a group of one, or
        if it is contiguous.

    Raises:
        The errors of ``fc.all_reduce``.
    """
    if group.world_size == 1:
        return x
    out = x if x.flags.c_contiguous else None
    result: Array = collectives.all_reduce(x, group, op=op, out=out, label=label)
    return result


def local_part(x: Array, group: Backend, axis: int) -> Array:
    """Return this rank's part along ``axis`` of ``x``, which all ranks of ``group`` have: a view.

    Without communication; the derivative of ``all_gather`` where all ranks have the same gradient.

    Args:
        x: the same on all ranks.
        group: the ranks over which the axis is cut, as ``split`` cuts it.
        axis: the one that is cut; negative ones count from the last.

    Raises:
        ArgumentError: ``x`` has no such axis.
    """
    place = _place(x, axis)
    start, stop = own_range(x.shape[place], group)
    part: Array = x[(slice(None),) * place + (slice(start, stop),)]
    return part


def all_gather(
    x: Array, group: Backend, axis: int, *, size: int | None = None, label: str = "parallel join"
) -> Array:
    """Join the parts of all ranks along ``axis``: one all_gather, which blocks.

    Args:
        x: this rank's part; the other axes are the same on all ranks.
        group: the ranks that have the parts.
        axis: the one that is cut.
        size: its whole extent, if that is known. It spares the ranks from telling each other in an
            all_gather of 8 bytes each before.
        label: what it is for, in traces and errors.

    Returns:
        A contiguous array, the same on every rank; ``x`` itself in a group of one.

    Raises:
        ArgumentError: ``x`` has no such axis.
        MismatchError: a part is not the one that ``split`` gives its rank. Without ``size`` all
            ranks raise it, before the parts are sent.
    """
    parts, place = group.world_size, _place(x, axis)
    if parts == 1:
        return x
    before, after = math.prod(x.shape[:place]), math.prod(x.shape[place + 1 :])
    if size is None:
        size = _told_size(x.shape[place], group, label)
    else:
        _check_part(x.shape[place], size, group.rank, parts)
    if size % parts == 0:
        flat: Array = collectives.all_gather(x.reshape(-1), group, label=label)
    else:
        rows = x.reshape(x.shape[place], before * after)
        flat = collectives.all_gather_v(rows, group, label=label).reshape(-1)
    shape = (*x.shape[:place], size, *x.shape[place + 1 :])
    return (
        flat.reshape(shape)
        if before == 1
        else _unpacked(flat, (before, size, after), parts).reshape(shape)
    )


def reduce_scatter(
    x: Array, group: Backend, axis: int, *, label: str = "parallel sum of parts"
) -> Array:
    """Sum the arrays of all ranks, and keep this rank's part along ``axis``: one reduce_scatter.

    It blocks until this rank's result is complete.

    Args:
        x: of equal shape on all ranks; not changed.
        group: the ranks.
        axis: the one that is cut.
        label: what it is for, in traces and errors.

    Returns:
        A contiguous array; ``x`` itself in a group of one.

    Raises:
        ArgumentError: ``x`` has no such axis.
        The errors of ``fc.reduce_scatter``.
    """
    parts, place = group.world_size, _place(x, axis)
    if parts == 1:
        return x
    before, after = math.prod(x.shape[:place]), math.prod(x.shape[place + 1 :])
    size = x.shape[place]
    shape = (*x.shape[:place], own_size(size, group), *x.shape[place + 1 :])
    if before == 1:
        summed: Array = collectives.reduce_scatter(x.reshape(size, after), group, label=label)
    else:
        packed = _packed(x.reshape(before, size, after), parts)
        counts = [(high - low) * before * after for low, high in pairwise(bounds(size, parts))]
        if size % parts == 0:
            summed = collectives.reduce_scatter(packed, group, label=label)
        else:
            summed = collectives.reduce_scatter_v(packed, group, counts, label=label)
    return summed.reshape(shape)


def as_group(group: Backend, what: str) -> Backend:
    """Return ``group`` if it is one; raise ``ArgumentError`` otherwise."""
    return as_instance(group, Backend, f"{what}: the group", "a Backend, such as mesh['tensor']")


def _packed(x: Array, parts: int) -> Array:
    """Return a flat array in which the parts along axis 1 follow each other, each contiguous."""
    before, size, after = x.shape
    packed: Array = array_module(x).empty(x.size, x.dtype)
    for start, stop in pairwise(bounds(size, parts)):
        part = packed[start * before * after : stop * before * after]
        part.reshape(before, stop - start, after)[...] = x[:, start:stop]
    return packed


def _unpacked(flat: Array, shape: tuple[int, int, int], parts: int) -> Array:
    """Return an array of ``shape`` from what ``_packed`` makes of it."""
    before, size, after = shape
    whole: Array = array_module(flat).empty(shape, flat.dtype)
    for start, stop in pairwise(bounds(size, parts)):
        part = flat[start * before * after : stop * before * after]
        whole[:, start:stop] = part.reshape(before, stop - start, after)
    return whole


def _place(x: Array, axis: int) -> int:
    """Return ``axis`` counted from the front."""
    axis = as_int(axis, "the axis to be cut along")
    if not -x.ndim <= axis < x.ndim:
        raise ArgumentError(f"an array of shape {x.shape} has no axis {axis} to be cut along")
    return axis % x.ndim


def _told_size(extent: int, group: Backend, label: str) -> int:
    """Return the sum of all ranks' extents, and check each.

    A small all_gather and one of equal parts take less than half the time of an all_gather_v, whose
    ranks tell each other their rows as well; and most sequences divide evenly.
    """
    mine = np.array([extent], np.int64)
    extents: list[int] = collectives.all_gather(mine, group, label=f"{label}, extents").tolist()
    size = sum(extents)
    for rank, theirs in enumerate(extents):
        _check_part(theirs, size, rank, len(extents))
    return size


def _check_part(extent: int, size: int, rank: int, parts: int) -> None:
    start, stop = split(size, parts, rank)
    if extent != stop - start:
        raise MismatchError(
            f"rank {rank} of {parts} has {extent} indices of an axis of {size}, where "
            f"[{start}, {stop}) is its part; cut it as fsdpcore.parallel.split does"
        )
