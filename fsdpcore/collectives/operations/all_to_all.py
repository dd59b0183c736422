"""``all_to_all``, ``all_to_all_v``: every rank sends each rank a part of its array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fsdpcore.collectives.algorithms import direct
from fsdpcore.collectives.arguments import operand, remembered, spec_for
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.movements import Move, inputs, outputs
from fsdpcore.collectives.operations.perform import carry_out, perform
from fsdpcore.collectives.operations.rows import check_rows, check_unsized_out, sized_output
from fsdpcore.collectives.run import run
from fsdpcore.collectives.spec import CallSpec, Layout, Operation, Shape
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array, bounds_of, row_size
from fsdpcore.core.checks import as_counts
from fsdpcore.core.errors import MismatchError

# The ranks of all_to_all_v know different sizes, and have to choose the same: as for long arrays.
_UNKNOWN = 1 << 20


def _movement(ranks: range, root: int) -> list[Move]:
    """Chunk r of the input of each rank s to chunk s of the output of each rank r."""
    return [Move(outputs([r], s), inputs([s], r)) for r in ranks for s in ranks]


def _call(
    algorithm: Any, context: CollectiveContext, layout: Layout, source: Array, out: Array
) -> None:
    algorithm.all_to_all(context, source, layout.bounds, out, layout.arriving)


ALL_TO_ALL = Operation("all_to_all", _call, _movement, splits=True, joins=True)


def all_to_all(
    array: ArrayLike,
    backend: Backend,
    *,
    out: Array | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
    async_op: bool = False,
    label: str = "",
) -> Any:
    """Send part r of axis 0 to each rank r; join what arrives, in rank order.

    Where axis 0 does not divide evenly, the first ranks get one row more, as in
    ``numpy.array_split``.

    Args:
        array: of a dtype that travels (bool, integers, floats with bfloat16, complex),
            of at least one axis; of equal shape and dtype on all ranks.
        backend: the group. All its ranks call this, in the same order of collectives.
        out: array of the result's shape and dtype to write to, which may
            be the input. Without it a new array is
            returned.
        algorithm: "auto" (the fastest for the size and the group), or its name, such as
            "bruck"; an error for an unknown one lists them all. The same on all ranks.
        timeout: seconds for the whole operation, from when its turn comes after those that this
            group was given before; by default ``backend.timeout``.
        async_op: return a ``Work`` at once, whose ``wait()`` gives the result. Until then the
            input must not change and the output must not be read.
        label: what the call is for; compared between the ranks and named in errors.

    Returns:
        Array of shape ``(world_size * rows of this rank's part, *array.shape[1:])``.

    Raises:
        ArgumentError: this rank's arguments are wrong. Nothing was sent.
        MismatchError: the ranks called different things; on all, at the latest in their next call.
        CommTimeoutError: the deadline passed; names the ranks that are missing.
        PeerFailedError: another rank failed, was lost or left.

    Example::

        swapped = fc.all_to_all(rows, backend)  # a transposition of the parts
    """
    return perform(ALL_TO_ALL, array, backend, out, timeout, async_op, algorithm, label)


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
    label: str = "",
) -> Any:
    """Send the next ``send_counts[r]`` rows to each rank r; join what arrives, in rank order.

    Args:
        array: of a dtype that travels (bool, integers, floats with bfloat16, complex),
            with ``sum(send_counts)`` rows. All but the size of axis 0 is equal on all
            ranks.
        backend: the group. All its ranks call this, in the same order of collectives.
        send_counts: rows for each rank, 0 or more.
        recv_counts: rows expected from each rank, if known; they are checked. The ranks learn
            them from each other in any case.
        out: array of the result's shape and dtype to write to, which may
            be the input. Without it a new array is
            returned.
        algorithm: "auto" (the fastest for the size and the group), or its name, such as
            "bruck"; an error for an unknown one lists them all. The same on all ranks.
        timeout: seconds for the whole operation, from when its turn comes after those that this
            group was given before; by default ``backend.timeout``.
        async_op: return a ``Work`` at once, whose ``wait()`` gives the result. Until then the
            input must not change and the output must not be read.
        label: what the call is for; compared between the ranks and named in errors.

    Returns:
        Array of shape ``(rows that arrived, *array.shape[1:])``.

    Raises:
        ArgumentError: this rank's arguments are wrong. Nothing was sent.
        MismatchError: the ranks called different things, or what they send does not fit into
            ``out``; on all, at the latest in their next call.
        CommTimeoutError: the deadline passed; names the ranks that are missing.
        PeerFailedError: another rank failed, was lost or left.

    Example::

        mine = fc.all_to_all_v(tokens, backend, send_counts=[3, 0, 5])
    """
    source, backend = operand(array, backend)
    spec = remembered(backend, _ragged, source.dtype, source.shape, algorithm, label)
    ranks, rows = backend.world_size, source.shape[0]
    sending = as_counts(send_counts, ranks, "all_to_all_v: send_counts", rows)
    expected = None
    if recv_counts is not None:
        expected = as_counts(recv_counts, ranks, "all_to_all_v: recv_counts")
        if out is not None:
            backend.moves.check_out(out, (sum(expected), *source.shape[1:]), source.dtype)
    check_unsized_out(out, backend.moves, source.shape, source.dtype)

    def body(context: CollectiveContext) -> Array | None:
        receiving = _tell_counts(context, sending)
        if expected is not None and expected != receiving:
            raise MismatchError(
                f"{context.name}: rank {context.global_rank(context.rank)} expects rows {expected} "
                f"(recv_counts), but the ranks send {receiving}"
            )
        row = row_size(source.shape)
        joined = (sum(receiving), *source.shape[1:])
        output = sized_output(context, out, joined, source.dtype, backend.moves)
        layout = Layout(bounds=bounds_of(sending, row), arriving=bounds_of(receiving, row))
        choice = context.choose(_UNKNOWN)
        return carry_out(context, ALL_TO_ALL, choice, layout, source, output)

    return run(backend, spec, body, timeout=timeout, async_op=async_op)


def _ragged(
    backend: Backend, dtype: np.dtype[Any], shape: Shape, algorithm: str, label: str
) -> CallSpec:
    check_rows(shape, "all_to_all_v")
    return spec_for(
        backend,
        "all_to_all_v",
        ALL_TO_ALL,
        dtype,
        shape,
        algorithm=algorithm,
        label=label,
        ragged=True,
    )


def _tell_counts(context: CollectiveContext, sending: list[int]) -> list[int]:
    """Tell every rank how many rows it will get from this one; return what this one will get."""
    one_each, arriving = range(context.size + 1), np.empty(context.size, np.int64)
    direct.all_to_all(context, np.array(sending, np.int64), one_each, arriving, one_each)
    return [int(count) for count in arriving]
