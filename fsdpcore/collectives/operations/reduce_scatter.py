"""``reduce_scatter``, ``reduce_scatter_v``: combine arrays; each rank gets a part of the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import ArrayLike

from fsdpcore.collectives.arguments import operand
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.movements import Move, inputs, outputs
from fsdpcore.collectives.operations.perform import perform
from fsdpcore.collectives.operations.rows import check_rows
from fsdpcore.collectives.spec import Layout, Operation
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_counts
from fsdpcore.core.reductions import ReduceOp


def _movement(ranks: range, root: int) -> list[Move]:
    """Chunk r of all inputs, reduced, to each rank r."""
    return [Move(outputs([rank]), inputs(ranks, rank)) for rank in ranks]


def _call(
    algorithm: Any, context: CollectiveContext, layout: Layout, source: Array, out: Array
) -> None:
    algorithm.reduce_scatter(context, source, out, layout.bounds, layout.reduction)


REDUCE_SCATTER = Operation("reduce_scatter", _call, _movement, splits=True, reduces=True)


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

    Where axis 0 does not divide evenly, the first ranks get one row more, as in
    ``numpy.array_split``.

    Args:
        array: of a dtype that travels (bool, integers, floats with bfloat16, complex),
            of at least one axis; of equal shape and dtype on all ranks.
        backend: the group. All its ranks call this, in the same order of collectives.
        op: how values are combined: a ``ReduceOp`` or the name of one, such as "max". Always
            in the canonical order of ranks, so with the same bits, but for "ring" and what a
            transport calls its own. float16 and bfloat16 are accumulated in float32.
        out: array of the result's shape and dtype to write to; it may be this rank's own part of
            the input. Without it a new array is returned.
        algorithm: "auto" (the fastest for the size and the group), or its name, such as
            "halving"; an error for an unknown one lists them all. The same on all ranks.
        timeout: seconds for the whole operation, from when its turn comes after those that this
            group was given before; by default ``backend.timeout``.
        async_op: return a ``Work`` at once, whose ``wait()`` gives the result. Until then the
            input must not change and the output must not be read.
        label: what the call is for; compared between the ranks and named in errors.

    Returns:
        Array of shape ``(rows of this rank, *array.shape[1:])``.

    Raises:
        ArgumentError: this rank's arguments are wrong. Nothing was sent.
        MismatchError: the ranks called different things; on all, at the latest in their next call.
        CommTimeoutError: the deadline passed; names the ranks that are missing.
        PeerFailedError: another rank failed, was lost or left.

    Example::

        shard = fc.reduce_scatter(gradient, backend, op="mean")
    """
    return perform(REDUCE_SCATTER, array, backend, out, timeout, async_op, algorithm, label, op)


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
        array: of a dtype that travels (bool, integers, floats with bfloat16, complex),
            with ``sum(counts)`` rows; of equal shape and dtype on all ranks.
        backend: the group. All its ranks call this, in the same order of collectives.
        counts: rows for each rank, 0 or more; the same on all ranks.
        op: how values are combined: a ``ReduceOp`` or the name of one, such as "max". Always
            in the canonical order of ranks, so with the same bits, but for "ring" and what a
            transport calls its own. float16 and bfloat16 are accumulated in float32.
        out: array of the result's shape and dtype to write to; it may be this rank's own part of
            the input. Without it a new array is returned.
        algorithm: "auto" (the fastest for the size and the group), or its name, such as
            "halving"; an error for an unknown one lists them all. The same on all ranks.
        timeout: seconds for the whole operation, from when its turn comes after those that this
            group was given before; by default ``backend.timeout``.
        async_op: return a ``Work`` at once, whose ``wait()`` gives the result. Until then the
            input must not change and the output must not be read.
        label: what the call is for; compared between the ranks and named in errors.

    Returns:
        Array of shape ``(counts[rank], *array.shape[1:])``.

    Raises:
        ArgumentError: this rank's arguments are wrong. Nothing was sent.
        MismatchError: the ranks called different things; on all, at the latest in their next call.
        CommTimeoutError: the deadline passed; names the ranks that are missing.
        PeerFailedError: another rank failed, was lost or left.

    Example::

        own = fc.reduce_scatter_v(histogram, backend, counts=[10, 0, 22])
    """
    source, backend = operand(array, backend)
    check_rows(source.shape, "reduce_scatter_v")
    sizes = as_counts(counts, backend.world_size, "reduce_scatter_v: counts", source.shape[0])
    return perform(
        REDUCE_SCATTER, source, backend, out, timeout, async_op, algorithm, label, op,
        counts=tuple(sizes),
    )  # fmt: skip
