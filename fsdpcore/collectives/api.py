"""The collective operations.

All ranks of a group call the same operation with arrays that fit, in the same order. They take
the array first, then the backend, and share these keywords:

- ``out``: array to write the result to; it may be the input. Without it a new array is returned.
- ``algorithm``: "auto" (by size and number of ranks), or one that ``select.ALGORITHMS`` lists.
- ``timeout``: seconds for the whole operation; by default ``backend.timeout``.
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

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fsdpcore.backend import Backend, check_rank
from fsdpcore.buffers import (
    MAX_SIGNATURE,
    Array,
    bounds_of,
    pack_signature,
    row_size,
    split_sizes,
    unpack_signature,
)
from fsdpcore.collectives import tree
from fsdpcore.collectives.call import check_backend, operand, run
from fsdpcore.collectives.fingerprint import Fingerprint
from fsdpcore.collectives.link import Link
from fsdpcore.collectives.output import Output, separate
from fsdpcore.collectives.select import choose
from fsdpcore.errors import ArgumentError
from fsdpcore.reduce_ops import ReduceOp, Reduction


def barrier(backend: Backend, *, timeout: float | None = None, async_op: bool = False) -> Any:
    """Block until every rank has called it: ceil(lg p) small messages, no data."""
    check_backend(backend)
    fingerprint = Fingerprint("barrier")
    return run(backend, fingerprint, lambda link, rows: None, timeout=timeout, async_op=async_op)


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

    Returns:
        Array of the input's shape and dtype, the same bits on every rank.
    """
    source = operand(array, backend)
    reduction = Reduction.of(op, source.dtype)
    output = Output(out, source.shape, source.dtype)
    function = choose("all_reduce", algorithm, source.nbytes, backend).function

    def body(link: Link, rows: list[int]) -> Array:
        np.copyto(output.flat, source.reshape(-1))
        function(link, output.flat, reduction)
        return output.deliver()

    fingerprint = Fingerprint(
        "all_reduce", source.dtype, source.shape, reduction.name, algorithm=algorithm, label=label
    )
    return run(backend, fingerprint, body, timeout=timeout, async_op=async_op)


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

    Returns:
        Array of shape ``(rows of this rank, *array.shape[1:])``.
    """
    source = operand(array, backend)
    _check_splittable(source, "reduce_scatter")
    reduction = Reduction.of(op, source.dtype)
    counts = split_sizes(source.shape[0], backend.world_size)
    fingerprint = Fingerprint(
        "reduce_scatter", source.dtype, source.shape, reduction.name, -1, algorithm, label=label
    )
    body = reduce_scatter_body(source, backend, counts, out, algorithm, reduction)
    return run(backend, fingerprint, body, timeout=timeout, async_op=async_op)


def reduce_scatter_body(
    source: Array,
    backend: Backend,
    counts: list[int],
    out: Array | None,
    algorithm: str,
    reduction: Reduction,
) -> Any:
    """Prepare a reduction of which rank r gets ``counts[r]`` rows; shared with the ragged form."""
    me, flat = backend.rank, source.reshape(-1)
    bounds = bounds_of(counts, row_size(source.shape))
    output = Output(out, (counts[me], *source.shape[1:]), source.dtype)
    function = choose("reduce_scatter", algorithm, source.nbytes, backend).function
    flat = separate(flat, flat[bounds[me] : bounds[me + 1]], output.flat, output.flat)

    def body(link: Link, rows: list[int]) -> Array:
        function(link, flat, output.flat, bounds, reduction)
        return output.deliver()

    return body


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

    Returns:
        Array of shape ``(world_size * array.shape[0], *array.shape[1:])``; 0-d arrays join to one
        of shape ``(world_size,)``.
    """
    source = operand(array, backend)
    me, p = backend.rank, backend.world_size
    output = Output(out, _joined(source.shape, p), source.dtype)
    bounds = bounds_of([source.size] * p)
    function = choose("all_gather", algorithm, source.nbytes * p, backend).function
    flat = source.reshape(-1)
    flat = separate(flat, flat, output.flat, output.flat[bounds[me] : bounds[me + 1]])

    def body(link: Link, rows: list[int]) -> Array:
        function(link, flat, output.flat, bounds)
        return output.deliver()

    fingerprint = Fingerprint(
        "all_gather", source.dtype, source.shape, algorithm=algorithm, label=label
    )
    return run(backend, fingerprint, body, timeout=timeout, async_op=async_op)


def broadcast(
    array: ArrayLike,
    backend: Backend,
    *,
    root: int = 0,
    out: Array | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Copy the root's array to all ranks; the others pass one of equal shape and dtype.

    Returns:
        Array of that shape. The input itself changes only where it is passed as ``out`` too.
    """
    source = operand(array, backend)
    root = check_rank(root, backend.world_size, "broadcast: root")
    output = Output(out, source.shape, source.dtype)
    function = choose("broadcast", algorithm, source.nbytes, backend).function

    def body(link: Link, rows: list[int]) -> Array:
        if link.rank == root:
            np.copyto(output.flat, source.reshape(-1))
        function(link, output.flat, root)
        return output.deliver()

    fingerprint = Fingerprint(
        "broadcast", source.dtype, source.shape, root=root, algorithm=algorithm
    )
    return run(backend, fingerprint, body, timeout=timeout, async_op=async_op)


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
    source = operand(array, backend)
    root = check_rank(root, backend.world_size, "reduce: root")
    reduction = Reduction.of(op, source.dtype)
    output = Output(out, source.shape, source.dtype) if backend.rank == root else None
    function = choose("reduce", algorithm, source.nbytes, backend).function
    flat = source.reshape(-1)
    if output is not None:
        flat = separate(flat, flat, output.flat, output.flat)

    def body(link: Link, rows: list[int]) -> Array | None:
        function(link, flat, output.flat if output else None, root, reduction)
        return output.deliver() if output else None

    fingerprint = Fingerprint("reduce", source.dtype, source.shape, reduction.name, root, algorithm)
    return run(backend, fingerprint, body, timeout=timeout, async_op=async_op)


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
    source = operand(array, backend)
    root = check_rank(root, backend.world_size, "gather: root")
    p = backend.world_size
    bounds = bounds_of([source.size] * p)
    function = choose("gather", algorithm, source.nbytes * p, backend).function
    flat = source.reshape(-1)
    output = None
    if backend.rank == root:
        output = Output(out, _joined(source.shape, p), source.dtype)
        flat = separate(flat, flat, output.flat, output.flat[bounds[root] : bounds[root + 1]])

    def body(link: Link, rows: list[int]) -> Array | None:
        function(link, flat, output.flat if output else None, bounds, root)
        return output.deliver() if output else None

    fingerprint = Fingerprint("gather", source.dtype, source.shape, root=root, algorithm=algorithm)
    return run(backend, fingerprint, body, timeout=timeout, async_op=async_op)


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
    root = check_rank(root, backend.world_size, "scatter: root")
    choose("scatter", algorithm, 0, backend)
    source = None
    if backend.rank == root:
        if array is None:
            raise ArgumentError(f"scatter: rank {root} is the root and has to pass the array")
        source = operand(array, backend)
        _check_splittable(source, "scatter")

    def body(link: Link, rows: list[int]) -> Array:
        return _scatter(link, source, backend, root, out, algorithm)

    fingerprint = Fingerprint("scatter", root=root, algorithm=algorithm)
    return run(backend, fingerprint, body, timeout=timeout, async_op=async_op)


def _scatter(
    link: Link, source: Array | None, backend: Backend, root: int, out: Array | None, algorithm: str
) -> Array:
    header = np.zeros(MAX_SIGNATURE, np.uint8)
    if source is not None:
        signature = pack_signature(source.dtype, source.shape)
        header[: len(signature)] = np.frombuffer(signature, np.uint8)
    tree.broadcast(link, header, root)
    dtype, shape = unpack_signature(header.tobytes())
    counts = split_sizes(shape[0], link.size)
    bounds = bounds_of(counts, row_size(shape))
    output = Output(out, (counts[link.rank], *shape[1:]), dtype)
    flat = None
    if source is not None:
        flat = source.reshape(-1)
        flat = separate(flat, flat[bounds[root] : bounds[root + 1]], output.flat, output.flat)
    function = choose("scatter", algorithm, bounds[-1] * dtype.itemsize, backend).function
    function(link, flat, output.flat, bounds, root)
    return output.deliver()


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
    source = operand(array, backend)
    _check_splittable(source, "all_to_all")
    p, row = backend.world_size, row_size(source.shape)
    counts = split_sizes(source.shape[0], p)
    mine = counts[backend.rank]
    output = Output(out, (p * mine, *source.shape[1:]), source.dtype)
    function = choose("all_to_all", algorithm, source.nbytes, backend).function
    flat = source.reshape(-1)
    if np.may_share_memory(flat, output.flat):
        flat = flat.copy()

    def body(link: Link, rows: list[int]) -> Array:
        function(link, flat, bounds_of(counts, row), output.flat, bounds_of([mine] * p, row))
        return output.deliver()

    fingerprint = Fingerprint("all_to_all", source.dtype, source.shape, algorithm=algorithm)
    return run(backend, fingerprint, body, timeout=timeout, async_op=async_op)


def _check_splittable(source: Array, operation: str) -> None:
    if source.ndim == 0:
        raise ArgumentError(f"{operation} splits axis 0, which a 0-d array does not have")


def _joined(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    return (count * shape[0], *shape[1:]) if shape else (count,)
