"""Collectives in which the ranks contribute or receive different numbers of rows.

Rows are indices of axis 0; all other dimensions are equal on all ranks, and a rank may have no
rows at all. Keywords and errors are those of ``api.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fsdpcore.backend import Backend
from fsdpcore.buffers import Array, bounds_of, check_out, row_size
from fsdpcore.collectives.api import reduce_scatter_body
from fsdpcore.collectives.call import operand, run
from fsdpcore.collectives.fingerprint import Fingerprint
from fsdpcore.collectives.link import Link
from fsdpcore.collectives.output import Output, separate
from fsdpcore.collectives.select import choose
from fsdpcore.errors import ArgumentError, MismatchError
from fsdpcore.reduce_ops import ReduceOp, Reduction


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
    source = operand(array, backend)
    _check_rows(source, "all_gather_v")
    choose("all_gather", algorithm, 0, backend)
    if out is not None:
        check_out(out, (np.shape(out)[:1] or (0,)) + source.shape[1:], source.dtype)

    def body(link: Link, rows: list[int]) -> Array:
        me, bounds = link.rank, bounds_of(rows, row_size(source.shape))
        output = Output(out, (sum(rows), *source.shape[1:]), source.dtype)
        flat = source.reshape(-1)
        flat = separate(flat, flat, output.flat, output.flat[bounds[me] : bounds[me + 1]])
        function = choose("all_gather", algorithm, output.flat.nbytes, backend).function
        function(link, flat, output.flat, bounds)
        return output.deliver()

    fingerprint = Fingerprint(
        "all_gather_v", source.dtype, source.shape, algorithm=algorithm, label=label, ragged=True
    )
    return run(backend, fingerprint, body, timeout=timeout, async_op=async_op)


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
    source = operand(array, backend)
    _check_rows(source, "reduce_scatter_v")
    sizes = _check_counts(counts, backend, source.shape[0], "reduce_scatter_v: counts")
    reduction = Reduction.of(op, source.dtype)
    fingerprint = Fingerprint(
        "reduce_scatter_v",
        source.dtype,
        source.shape,
        reduction.name,
        algorithm=algorithm,
        counts=tuple(sizes),
        label=label,
    )
    body = reduce_scatter_body(source, backend, sizes, out, algorithm, reduction)
    return run(backend, fingerprint, body, timeout=timeout, async_op=async_op)


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
    source = operand(array, backend)
    _check_rows(source, "all_to_all_v")
    sending = _check_counts(send_counts, backend, source.shape[0], "all_to_all_v: send_counts")
    function = choose("all_to_all", algorithm, 0, backend).function
    expected = None
    if recv_counts is not None:
        expected = _check_counts(recv_counts, backend, None, "all_to_all_v: recv_counts")

    def body(link: Link, rows: list[int]) -> Array:
        one_each = bounds_of([1] * link.size)
        arriving = np.empty(link.size, np.int64)
        function(link, np.array(sending, np.int64), one_each, arriving, one_each)
        receiving = arriving.tolist()
        if expected is not None and expected != receiving:
            raise MismatchError(
                f"{link.name}: rank {link.global_rank(link.rank)} expects rows {expected} "
                f"(recv_counts), but the ranks send {receiving}"
            )
        row = row_size(source.shape)
        output = Output(out, (sum(receiving), *source.shape[1:]), source.dtype)
        flat = source.reshape(-1)
        if np.may_share_memory(flat, output.flat):
            flat = flat.copy()
        bounds = bounds_of(receiving, row)
        function(link, flat, bounds_of(sending, row), output.flat, bounds)
        return output.deliver()

    fingerprint = Fingerprint(
        "all_to_all_v", source.dtype, source.shape, algorithm=algorithm, ragged=True
    )
    return run(backend, fingerprint, body, timeout=timeout, async_op=async_op)


def _check_rows(source: Array, operation: str) -> None:
    if source.ndim == 0:
        raise ArgumentError(f"{operation} works on rows (axis 0), which a 0-d array does not have")


def _check_counts(
    counts: Sequence[int], backend: Backend, total: int | None, what: str
) -> list[int]:
    try:
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
