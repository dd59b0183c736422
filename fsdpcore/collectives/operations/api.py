"""The collective operations.

All ranks of a group call the same operation with arrays that fit, in the same order. They take
the array first, then the backend, and share these keywords:

- ``out``: array to write the result to; it may be the input. Without it a new array is returned.
- ``algorithm``: "auto" (by size and number of ranks), or one that ``algorithms.ALGORITHMS`` lists.
- ``timeout``: seconds for the whole operation, from when its turn comes after those that this
  group was given before; by default ``backend.timeout``.
- ``async_op``: return a ``Work`` at once; until its ``wait()``, the input must not change and the
  output must not be read.
- ``label``: what the call is for; compared between the ranks and named in errors.

Arrays have one of the dtypes of ``buffers.DTYPES``; any shape, contiguous or not, 0-d and empty
ones too. Where axis 0 is split over the ranks and does not divide evenly, the first ranks get one
row more, as in ``numpy.array_split``. What differs in size between ranks is in ``ragged.py``.

They block until this rank's result is complete, and raise:

- ``ArgumentError``: this rank's arguments are wrong. Nothing was sent.
- ``MismatchError``: the ranks called different things; on all ranks.
- ``CommTimeoutError``: the deadline passed; names the ranks that are missing.
- ``PeerFailedError``: another rank failed, was lost or left.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.output import Output
from fsdpcore.collectives.run import CallSpec, call_for, check_backend, operand, remembered, run
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import (
    Array,
    bounds_of,
    row_size,
    split_sizes,
)
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.reductions import ReduceOp, Reduction

Shape = tuple[int, ...]


def barrier(
    backend: Backend, *, timeout: float | None = None, async_op: bool = False, label: str = ""
) -> Any:
    """Block until every rank has called it: ceil(lg p) small messages, no data."""
    check_backend(backend)
    call = remembered(backend, _barrier, label)
    return run(backend, call, _nothing, timeout=timeout, async_op=async_op)


def _barrier(backend: Backend, label: str) -> CallSpec:
    return call_for(backend, "barrier", "", label=label)


def _nothing(link: CollectiveContext) -> None:
    """The body of a barrier: that all ranks have agreed to it is all that it does."""


def all_reduce(
    array: ArrayLike,
    backend: Backend,
    *,
    op: ReduceOp | str = "sum",
    out: Array | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
    async_op: bool = False,
    label: str = "",
) -> Any:
    """Combine the arrays of all ranks elementwise; every rank gets the result.

    The keywords and errors of all collectives: ``help(fsdpcore.collectives.operations.api)``.

    Returns:
        Array of the input's shape and dtype, the same bits on every rank.
    """
    source, backend = operand(array, backend)
    call = remembered(backend, _all_reduce, source.dtype, source.shape, op, algorithm, label)
    if call.lane is not None and timeout is None and not async_op:
        result = call.lane(source, out)
        if result is not None:
            return result
    output, reduction = Output(out, call.out_shape, source.dtype, backend.moves), call.reduction
    assert reduction is not None

    def body(link: CollectiveContext) -> Array:
        if call.choice.into is not None:  # it needs no copy of the input
            flat = output.separate(source.reshape(-1), 0, source.size, output.flat)
            call.choice.into(link, flat, output.flat, reduction)
        else:
            output.load(array, source)
            call.choice.function(link, output.flat, reduction)
        return output.deliver()

    return run(backend, call, body, timeout=timeout, async_op=async_op, output=output)


def _all_reduce(
    backend: Backend,
    dtype: np.dtype[Any],
    shape: Shape,
    op: ReduceOp | str,
    algorithm: str,
    label: str,
) -> CallSpec:
    return call_for(
        backend,
        "all_reduce",
        "all_reduce",
        dtype,
        shape,
        size=nbytes_of(dtype, shape),
        reduction=Reduction.of(op, dtype),
        algorithm=algorithm,
        label=label,
        out_shape=shape,
    )


def reduce_scatter(
    array: ArrayLike,
    backend: Backend,
    *,
    op: ReduceOp | str = "sum",
    out: Array | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
    async_op: bool = False,
    label: str = "",
) -> Any:
    """Combine the arrays of all ranks elementwise; each rank gets its part of axis 0.

    The keywords and errors of all collectives: ``help(fsdpcore.collectives.operations.api)``.

    Returns:
        Array of shape ``(rows of this rank, *array.shape[1:])``.
    """
    source, backend = operand(array, backend)
    call = remembered(
        backend,
        reduce_scatter_call,
        source.dtype,
        source.shape,
        op,
        algorithm,
        label,
    )
    return start_reduce_scatter(source, backend, call, out, timeout=timeout, async_op=async_op)


def start_reduce_scatter(
    source: Array,
    backend: Backend,
    call: CallSpec,
    out: Array | None,
    *,
    timeout: float | None,
    async_op: bool,
) -> Any:
    """Run a reduction of which rank r gets chunk r; shared with the ragged form."""
    if call.lane is not None and timeout is None and not async_op:
        result = call.lane(source, out)
        if result is not None:
            return result
    output = Output(out, call.out_shape, source.dtype, backend.moves)

    def body(link: CollectiveContext) -> Array:
        bounds, me = call.bounds, link.rank
        flat = output.separate(source.reshape(-1), bounds[me], bounds[me + 1], output.flat)
        call.choice.function(link, flat, output.flat, bounds, call.reduction)
        return output.deliver()

    return run(backend, call, body, timeout=timeout, async_op=async_op, output=output)


def reduce_scatter_call(
    backend: Backend,
    dtype: np.dtype[Any],
    shape: Shape,
    op: ReduceOp | str,
    algorithm: str,
    label: str,
    counts: tuple[int, ...] = (),
) -> CallSpec:
    """The call, and that of the ragged form, which has counts."""
    check_splittable(shape, "reduce_scatter")
    sizes = counts or split_sizes(shape[0], backend.world_size)
    return call_for(
        backend,
        "reduce_scatter_v" if counts else "reduce_scatter",
        "reduce_scatter",
        dtype,
        shape,
        size=nbytes_of(dtype, shape),
        reduction=Reduction.of(op, dtype),
        algorithm=algorithm,
        label=label,
        counts=counts,
        bounds=bounds_of(sizes, row_size(shape)),
        out_shape=(sizes[backend.rank], *shape[1:]),
    )


def all_gather(
    array: ArrayLike,
    backend: Backend,
    *,
    out: Array | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
    async_op: bool = False,
    label: str = "",
) -> Any:
    """Join the arrays of all ranks, which have equal shapes, along axis 0; every rank gets it.

    The keywords and errors of all collectives: ``help(fsdpcore.collectives.operations.api)``.

    Returns:
        Array of shape ``(world_size * array.shape[0], *array.shape[1:])``; 0-d arrays join to one
        of shape ``(world_size,)``.
    """
    source, backend = operand(array, backend)
    call = remembered(backend, all_gather_call, source.dtype, source.shape, algorithm, label)
    if call.lane is not None and timeout is None and not async_op:
        result = call.lane(source, out)
        if result is not None:
            return result
    output = Output(out, call.out_shape, source.dtype, backend.moves)

    def body(link: CollectiveContext) -> Array:
        bounds, me = call.bounds, link.rank
        place = output.flat[bounds[me] : bounds[me + 1]]
        flat = output.separate(source.reshape(-1), 0, source.size, place)
        call.choice.function(link, flat, output.flat, bounds)
        return output.deliver()

    return run(backend, call, body, timeout=timeout, async_op=async_op, output=output)


def all_gather_call(
    backend: Backend,
    dtype: np.dtype[Any],
    shape: Shape,
    algorithm: str,
    label: str,
    operation: str = "all_gather",
    root: int = -1,
) -> CallSpec:
    """The call, and that of ``gather``."""
    p = backend.world_size
    return call_for(
        backend,
        operation,
        operation,
        dtype,
        shape,
        size=nbytes_of(dtype, shape) * p,
        root=root,
        algorithm=algorithm,
        label=label,
        bounds=bounds_of([row_size((1, *shape))] * p),
        out_shape=(p * shape[0], *shape[1:]) if shape else (p,),
    )


def all_to_all(
    array: ArrayLike,
    backend: Backend,
    *,
    out: Array | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Send part r of axis 0 to each rank r; join what arrives, in rank order.

    Returns:
        Array of shape ``(world_size * rows of this rank's part, *array.shape[1:])``.
    """
    source, backend = operand(array, backend)
    call = remembered(backend, _all_to_all, source.dtype, source.shape, algorithm)
    output = Output(out, call.out_shape, source.dtype, backend.moves)
    arriving = bounds_of([output.flat.size // backend.world_size] * backend.world_size)

    def body(link: CollectiveContext) -> Array:
        flat = output.beside(source.reshape(-1))
        call.choice.function(link, flat, call.bounds, output.flat, arriving)
        return output.deliver()

    return run(backend, call, body, timeout=timeout, async_op=async_op, output=output)


def _all_to_all(backend: Backend, dtype: np.dtype[Any], shape: Shape, algorithm: str) -> CallSpec:
    check_splittable(shape, "all_to_all")
    counts = split_sizes(shape[0], backend.world_size)
    return call_for(
        backend,
        "all_to_all",
        "all_to_all",
        dtype,
        shape,
        size=nbytes_of(dtype, shape),
        algorithm=algorithm,
        bounds=bounds_of(counts, row_size(shape)),
        out_shape=(backend.world_size * counts[backend.rank], *shape[1:]),
    )


def nbytes_of(dtype: np.dtype[Any], shape: Shape) -> int:
    """The size of an array."""
    return math.prod(shape) * dtype.itemsize


def check_splittable(shape: Shape, operation: str) -> None:
    """Raise ``ArgumentError`` if there is no axis 0 to split."""
    if not shape:
        raise ArgumentError(f"{operation} splits axis 0, which a 0-d array does not have")
