"""The collectives that have a root. Keywords and errors are those of ``api.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fsdpcore.collectives.algorithms import tree
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.on_device import device_twin
from fsdpcore.collectives.operations.api import all_gather_call, check_splittable, nbytes_of
from fsdpcore.collectives.output import Output
from fsdpcore.collectives.run import CallSpec, call_for, check_backend, operand, remembered, run
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import (
    MAX_SIGNATURE,
    Array,
    bounds_of,
    pack_signature,
    row_size,
    split_sizes,
    unpack_signature,
)
from fsdpcore.core.checks import as_rank
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.reductions import ReduceOp, Reduction

Shape = tuple[int, ...]


def broadcast(
    array: ArrayLike,
    backend: Backend,
    *,
    root: int = 0,
    out: Array | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
    async_op: bool = False,
    label: str = "",
) -> Any:
    """Copy the root's array to all ranks; the others pass one of equal shape and dtype.

    Returns:
        Array of that shape. The input itself changes only where it is passed as ``out`` too.
    """
    source, backend = operand(array, backend)
    root = as_rank(root, backend.world_size, "broadcast: root")
    call = remembered(backend, _broadcast, source.dtype, source.shape, root, algorithm, label)
    if call.lane is not None and timeout is None and not async_op:
        result = call.lane(source, out)
        if result is not None:
            return result
    output = Output(out, source.shape, source.dtype, backend.moves)

    def body(link: CollectiveContext) -> Array:
        if link.rank == call.root:
            output.load(array, source)
        call.choice.function(link, output.flat, call.root)
        return output.deliver()

    return run(backend, call, body, timeout=timeout, async_op=async_op, output=output)


def _broadcast(
    backend: Backend,
    dtype: np.dtype[Any],
    shape: Shape,
    root: int,
    algorithm: str,
    label: str,
) -> CallSpec:
    return call_for(
        backend,
        "broadcast",
        "broadcast",
        dtype,
        shape,
        size=nbytes_of(dtype, shape),
        root=root,
        algorithm=algorithm,
        out_shape=shape,
        label=label,
    )


def reduce(
    array: ArrayLike,
    backend: Backend,
    *,
    root: int = 0,
    op: ReduceOp | str = "sum",
    out: Array | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Combine the arrays of all ranks elementwise; the root gets the result.

    Returns:
        Array of the input's shape on the root, None on the others (whose ``out`` is ignored).
    """
    source, backend = operand(array, backend)
    root = as_rank(root, backend.world_size, "reduce: root")
    call = remembered(backend, _reduce, source.dtype, source.shape, root, op, algorithm)
    output = (
        Output(out, source.shape, source.dtype, backend.moves)
        if backend.rank == call.root
        else None
    )

    def body(link: CollectiveContext) -> Array | None:
        flat = source.reshape(-1)
        if output is not None:
            flat = output.separate(flat, 0, flat.size, output.flat)
        call.choice.function(link, flat, output.flat if output else None, call.root, call.reduction)
        return output.deliver() if output else None

    return run(backend, call, body, timeout=timeout, async_op=async_op, output=output)


def _reduce(
    backend: Backend,
    dtype: np.dtype[Any],
    shape: Shape,
    root: int,
    op: ReduceOp | str,
    algorithm: str,
) -> CallSpec:
    return call_for(
        backend,
        "reduce",
        "reduce",
        dtype,
        shape,
        size=nbytes_of(dtype, shape),
        reduction=Reduction.of(op, dtype),
        root=root,
        algorithm=algorithm,
    )


def gather(
    array: ArrayLike,
    backend: Backend,
    *,
    root: int = 0,
    out: Array | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Join the arrays of all ranks, which have equal shapes, along axis 0; the root gets it.

    Returns:
        On the root an array as from ``all_gather``, None on the others (whose ``out`` is ignored).
    """
    source, backend = operand(array, backend)
    root = as_rank(root, backend.world_size, "gather: root")
    call = remembered(
        backend,
        all_gather_call,
        source.dtype,
        source.shape,
        algorithm,
        "",
        "gather",
        root,
    )
    output = (
        Output(out, call.out_shape, source.dtype, backend.moves) if backend.rank == root else None
    )

    def body(link: CollectiveContext) -> Array | None:
        flat, bounds = source.reshape(-1), call.bounds
        if output is not None:
            place = output.flat[bounds[root] : bounds[root + 1]]
            flat = output.separate(flat, 0, flat.size, place)
        call.choice.function(link, flat, output.flat if output else None, bounds, root)
        return output.deliver() if output else None

    return run(backend, call, body, timeout=timeout, async_op=async_op, output=output)


def scatter(
    array: ArrayLike | None,
    backend: Backend,
    *,
    root: int = 0,
    out: Array | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Split the root's array along axis 0; each rank gets its part.

    The other ranks pass None: they learn shape and dtype from the root, in one small broadcast.

    Returns:
        Array of shape ``(rows of this rank, *array.shape[1:])``.
    """
    check_backend(backend)
    root = as_rank(root, backend.world_size, "scatter: root")
    source = None
    if backend.rank == root:
        if array is None:
            raise ArgumentError(f"scatter: rank {root} is the root and has to pass the array")
        source, _ = operand(array, backend)
        check_splittable(source.shape, "scatter")
    backend = mover_of_root(array, backend, root)
    call = remembered(backend, _scatter, root, algorithm)

    def body(link: CollectiveContext) -> Array:
        dtype, shape = tell_what_is_scattered(link, source, call.root)
        counts = split_sizes(shape[0], link.size)
        output = Output(out, (counts[link.rank], *shape[1:]), dtype, backend.moves)
        return scatter_chunks(link, call, source, counts, output, shape)

    return run(backend, call, body, timeout=timeout, async_op=async_op)


def _scatter(backend: Backend, root: int, algorithm: str) -> CallSpec:
    return call_for(backend, "scatter", "scatter", size=None, root=root, algorithm=algorithm)


def mover_of_root(array: ArrayLike | None, backend: Backend, root: int) -> Backend:
    """Return the group that moves what the root scatters, which the root alone knows.

    A broadcast, where there is more than one kind of arrays. Blocks.
    """
    if backend.root.device.on_host:
        return backend
    elsewhere = np.array([array is not None and backend.device.claims(array)])
    return device_twin(backend) if broadcast(elsewhere, backend, root=root)[0] else backend


def tell_what_is_scattered(
    link: CollectiveContext, source: Array | None, root: int
) -> tuple[np.dtype[Any], Shape]:
    """Tell all ranks dtype and shape of the root's array."""
    header = np.zeros(MAX_SIGNATURE, np.uint8)
    if source is not None:
        signature = pack_signature(source.dtype, source.shape)
        header[: len(signature)] = np.frombuffer(signature, np.uint8)
    tree.broadcast(link, header, root)
    return unpack_signature(header.tobytes())


def scatter_chunks(
    link: CollectiveContext,
    call: CallSpec,
    source: Array | None,
    counts: Sequence[int],
    output: Output,
    shape: Shape,
) -> Array:
    """Bring the root's rows to the ranks, ``counts[r]`` of them to rank r."""
    root = call.root
    bounds = bounds_of(counts, row_size(shape))
    flat = None
    if source is not None:
        flat = source.reshape(-1)
        flat = output.separate(flat, bounds[root], bounds[root + 1], output.flat)
    function = link.choose(bounds[-1] * output.flat.itemsize)
    function(link, flat, output.flat, bounds, root)
    return output.deliver()
