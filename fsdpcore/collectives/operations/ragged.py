"""Collectives in which the ranks contribute or receive different numbers of rows.

Rows are indices of axis 0; all other dimensions are equal on all ranks, and a rank may have no
rows at all. Keywords and errors are those of ``api.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fsdpcore.collectives.algorithms import direct, tree
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.operations.api import reduce_scatter_call, start_reduce_scatter
from fsdpcore.collectives.operations.rooted import (
    mover_of_root,
    scatter_chunks,
    tell_what_is_scattered,
)
from fsdpcore.collectives.output import Output
from fsdpcore.collectives.run import CallSpec, call_for, check_backend, operand, remembered, run
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array, bounds_of, row_size
from fsdpcore.core.checks import as_rank
from fsdpcore.core.device import Device
from fsdpcore.core.errors import ArgumentError, MismatchError
from fsdpcore.core.reductions import ReduceOp

# The ranks of all_to_all_v know different sizes, and have to choose the same: as for long arrays.
_UNKNOWN = 1 << 20


def all_gather_v(
    array: ArrayLike,
    backend: Backend,
    *,
    out: Array | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
    async_op: bool = False,
    label: str = "",
) -> Any:
    """Join arrays with different numbers of rows along axis 0; every rank gets the result.

    The numbers of rows need not be known beforehand: the ranks learn them from each other.

    Returns:
        Array of shape ``(rows of all ranks, *array.shape[1:])``.
    """
    source, backend = operand(array, backend)
    call = remembered(
        backend, _gather_v, "all_gather", source.dtype, source.shape, -1, algorithm, label
    )
    _check_rows_out(out, source, backend.moves)

    def body(link: CollectiveContext) -> Array:
        output, bounds, place = _joined(link, source, out, backend.moves)
        flat = output.separate(source.reshape(-1), 0, source.size, place)
        link.choose(output.flat.nbytes)(link, flat, output.flat, bounds)
        return output.deliver()

    return run(backend, call, body, timeout=timeout, async_op=async_op)


def gather_v(
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
    """Join arrays with different numbers of rows along axis 0; the root gets the result.

    The numbers of rows need not be known beforehand: the ranks learn them from each other.

    Returns:
        On the root an array as from ``all_gather_v``, None on the others (whose ``out`` is
        ignored).
    """
    source, backend = operand(array, backend)
    root = as_rank(root, backend.world_size, "gather_v: root")
    call = remembered(
        backend, _gather_v, "gather", source.dtype, source.shape, root, algorithm, label
    )
    if backend.rank == call.root:
        _check_rows_out(out, source, backend.moves)

    def body(link: CollectiveContext) -> Array | None:
        flat, target, output = source.reshape(-1), None, None
        bounds = bounds_of(link.rows, row_size(source.shape))
        if link.rank == call.root:
            output, _, place = _joined(link, source, out, backend.moves)
            flat, target = output.separate(flat, 0, flat.size, place), output.flat
        function = link.choose(bounds[-1] * source.dtype.itemsize)
        function(link, flat, target, bounds, call.root)
        return output.deliver() if output else None

    return run(backend, call, body, timeout=timeout, async_op=async_op)


def _gather_v(
    backend: Backend,
    collective: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    root: int,
    algorithm: str,
    label: str,
) -> CallSpec:
    _check_rows(shape, f"{collective}_v")
    return call_for(
        backend,
        f"{collective}_v",
        collective,
        dtype,
        shape,
        root=root,
        algorithm=algorithm,
        label=label,
        ragged=True,
    )


def _joined(
    link: CollectiveContext, source: Array, out: Array | None, device: Device
) -> tuple[Output, list[int], Array]:
    """The result of joining all ranks' rows, where they begin in it, and the place of this rank."""
    output = Output(out, (sum(link.rows), *source.shape[1:]), source.dtype, device)
    bounds = bounds_of(link.rows, row_size(source.shape))
    return output, bounds, output.flat[bounds[link.rank] : bounds[link.rank + 1]]


def scatter_v(
    array: ArrayLike | None,
    backend: Backend,
    counts: Sequence[int] | None = None,
    *,
    root: int = 0,
    out: Array | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
    async_op: bool = False,
    label: str = "",
) -> Any:
    """Split the root's array along axis 0; rank r gets the next ``counts[r]`` rows.

    The other ranks pass None for both: they learn counts, shape and dtype from the root.

    Args:
        array: on the root, with ``sum(counts)`` rows.
        backend: the group.
        counts: on the root, rows for each rank.
        root, out, algorithm, timeout, async_op: as in ``scatter``.
        label: what the call is for, as in ``all_gather``.

    Returns:
        Array of shape ``(counts[rank], *array.shape[1:])``.
    """
    check_backend(backend)
    root = as_rank(root, backend.world_size, "scatter_v: root")
    source, sizes = None, [0] * backend.world_size
    if backend.rank == root:
        if array is None or counts is None:
            raise ArgumentError(
                f"scatter_v: rank {root} is the root and has to pass the array and the counts"
            )
        source, _ = operand(array, backend)
        _check_rows(source.shape, "scatter_v")
        sizes = _check_counts(counts, backend, source.shape[0], "scatter_v: counts")
    backend = mover_of_root(array, backend, root)
    call = remembered(backend, _scatter_v, root, algorithm, label)

    def body(link: CollectiveContext) -> Array:
        dtype, shape = tell_what_is_scattered(link, source, call.root)
        told = np.array(sizes, np.int64)
        tree.broadcast(link, told, call.root)
        return scatter_chunks(
            link,
            call,
            source,
            told.tolist(),
            Output(out, (told[link.rank], *shape[1:]), dtype, backend.moves),
            shape,
        )

    return run(backend, call, body, timeout=timeout, async_op=async_op)


def _scatter_v(backend: Backend, root: int, algorithm: str, label: str) -> CallSpec:
    return call_for(backend, "scatter_v", "scatter", root=root, algorithm=algorithm, label=label)


def reduce_scatter_v(
    array: ArrayLike,
    backend: Backend,
    counts: Sequence[int],
    *,
    op: ReduceOp | str = "sum",
    out: Array | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
    async_op: bool = False,
    label: str = "",
) -> Any:
    """Combine the arrays of all ranks elementwise; rank r gets the next ``counts[r]`` rows.

    Args:
        array: of equal shape on all ranks, with ``sum(counts)`` rows.
        backend: the group.
        counts: rows for each rank, the same on all ranks.
        op, out, algorithm, timeout, async_op, label: as in ``reduce_scatter``.

    Returns:
        Array of shape ``(counts[rank], *array.shape[1:])``.
    """
    source, backend = operand(array, backend)
    _check_rows(source.shape, "reduce_scatter_v")
    sizes = tuple(_check_counts(counts, backend, source.shape[0], "reduce_scatter_v: counts"))
    call = remembered(
        backend,
        reduce_scatter_call,
        source.dtype,
        source.shape,
        op,
        algorithm,
        label,
        sizes,
    )
    return start_reduce_scatter(source, backend, call, out, timeout=timeout, async_op=async_op)


def all_to_all_v(
    array: ArrayLike,
    backend: Backend,
    send_counts: Sequence[int],
    *,
    recv_counts: Sequence[int] | None = None,
    out: Array | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Send the next ``send_counts[r]`` rows to each rank r; join what arrives, in rank order.

    Args:
        array: with ``sum(send_counts)`` rows.
        backend: the group.
        send_counts: rows for each rank.
        recv_counts: rows expected from each rank, if known; they are checked. The ranks learn
            them from each other in any case.
        out, algorithm, timeout, async_op: as in ``all_to_all``.

    Returns:
        Array of shape ``(rows that arrived, *array.shape[1:])``.
    """
    source, backend = operand(array, backend)
    call = remembered(backend, _all_to_all_v, source.dtype, source.shape, algorithm)
    sending = _check_counts(send_counts, backend, source.shape[0], "all_to_all_v: send_counts")
    expected = None
    if recv_counts is not None:
        expected = _check_counts(recv_counts, backend, None, "all_to_all_v: recv_counts")

    def body(link: CollectiveContext) -> Array:
        receiving = _tell_counts(link, sending)
        if expected is not None and expected != receiving:
            raise MismatchError(
                f"{link.name}: rank {link.global_rank(link.rank)} expects rows {expected} "
                f"(recv_counts), but the ranks send {receiving}"
            )
        row = row_size(source.shape)
        output = Output(out, (sum(receiving), *source.shape[1:]), source.dtype, backend.moves)
        flat = output.beside(source.reshape(-1))
        send_bounds, bounds = bounds_of(sending, row), bounds_of(receiving, row)
        link.choose(_UNKNOWN)(link, flat, send_bounds, output.flat, bounds)
        return output.deliver()

    return run(backend, call, body, timeout=timeout, async_op=async_op)


def _all_to_all_v(
    backend: Backend, dtype: np.dtype[Any], shape: tuple[int, ...], algorithm: str
) -> CallSpec:
    _check_rows(shape, "all_to_all_v")
    return call_for(
        backend, "all_to_all_v", "all_to_all", dtype, shape, algorithm=algorithm, ragged=True
    )


def _tell_counts(link: CollectiveContext, sending: list[int]) -> list[int]:
    """Tell every rank how many rows it will get from this one; return what this one will get."""
    one_each, arriving = range(link.size + 1), np.empty(link.size, np.int64)
    direct.all_to_all(link, np.array(sending, np.int64), one_each, arriving, one_each)
    return [int(count) for count in arriving]


def _check_rows(shape: tuple[int, ...], operation: str) -> None:
    if not shape:
        raise ArgumentError(f"{operation} works on rows (axis 0), which a 0-d array does not have")


def _check_rows_out(out: Array | None, source: Array, device: Device) -> None:
    """Check all of ``out`` but the number of rows, which is not known yet."""
    if out is not None:
        rows = tuple(getattr(out, "shape", ()))[:1] or (0,)
        device.check_out(out, rows + source.shape[1:], source.dtype)


def _check_counts(
    counts: Sequence[int], backend: Backend, total: int | None, what: str
) -> list[int]:
    try:
        if isinstance(counts, (Mapping, Set)) or any(isinstance(c, bool) for c in counts):
            raise TypeError
        sizes = [operator.index(count) for count in counts]
    except TypeError:
        raise ArgumentError(f"{what} must be integers, one per rank, got {counts!r}") from None
    if len(sizes) != backend.world_size or any(size < 0 for size in sizes):
        raise ArgumentError(
            f"{what} must be {backend.world_size} numbers >= 0, one per rank, got {sizes}"
        )
    if total is not None and sum(sizes) != total:
        raise ArgumentError(
            f"{what} {sizes} sum up to {sum(sizes)}, but the array has {total} rows"
        )
    return sizes
