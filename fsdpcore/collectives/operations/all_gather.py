"""``all_gather``, ``all_gather_v``: join the arrays of all ranks; every rank gets the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import ArrayLike

from fsdpcore.collectives.arguments import operand
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.movements import Move, inputs, outputs
from fsdpcore.collectives.operations.perform import perform
from fsdpcore.collectives.operations.rows import check_rows, join_rows
from fsdpcore.collectives.spec import Layout, Operation
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_counts
from fsdpcore.core.errors import ArgumentError


def _movement(ranks: range, root: int) -> list[Move]:
    """The input of each rank r to chunk r of all outputs."""
    return [Move(outputs(ranks, rank), inputs([rank])) for rank in ranks]


def _call(
    algorithm: Any, context: CollectiveContext, layout: Layout, source: Array, out: Array
) -> None:
    algorithm.all_gather(context, source, out, layout.bounds)


ALL_GATHER = Operation("all_gather", _call, _movement, joins=True)


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

    Args:
        array: of a dtype that travels (bool, integers, floats with bfloat16, complex),
            of any shape, 0-d and empty ones too; of equal shape and dtype on all ranks.
        backend: the group. All its ranks call this, in the same order of collectives.
        out: array of the result's shape and dtype to write to; the input may be this rank's own
            part of it. Without it a new array is returned.
        algorithm: "auto" (the fastest for the size and the group), or its name, such as
            "bruck"; an error for an unknown one lists them all. The same on all ranks.
        timeout: seconds for the whole operation, from when its turn comes after those that this
            group was given before; by default ``backend.timeout``.
        async_op: return a ``Work`` at once, whose ``wait()`` gives the result. Until then the
            input must not change and the output must not be read.
        label: what the call is for; compared between the ranks and named in errors.

    Returns:
        Array of shape ``(world_size * array.shape[0], *array.shape[1:])``, in rank order; 0-d
        arrays join to one of shape ``(world_size,)``.

    Raises:
        ArgumentError: this rank's arguments are wrong. Nothing was sent.
        MismatchError: the ranks called different things; on all, at the latest in their next call.
        CommTimeoutError: the deadline passed; names the ranks that are missing.
        PeerFailedError: another rank failed, was lost or left.

    Example::

        lengths = fc.all_gather(np.array(len(samples)), backend)  # one number per rank
    """
    return perform(ALL_GATHER, array, backend, out, timeout, async_op, algorithm, label)


def all_gather_v(
    array: ArrayLike,
    backend: Backend,
    *,
    counts: Sequence[int] | None = None,
    out: Array | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
    async_op: bool = False,
    label: str = "",
) -> Any:
    """Join arrays with different numbers of rows along axis 0; every rank gets the result.

    The numbers of rows need not be known beforehand: the ranks learn them from each other. That is
    an exchange of its own, which ``counts`` saves.

    Args:
        array: of a dtype that travels (bool, integers, floats with bfloat16, complex),
            of at least one axis. All but the size of axis 0, which may be 0, is equal on
            all ranks.
        backend: the group. All its ranks call this, in the same order of collectives.
        counts: the rows of each rank, if all ranks know all of them; the same on all.
        out: array of the result's shape and dtype to write to; the input may be this rank's own
            part of it. Without it a new array is returned.
        algorithm: "auto" (the fastest for the size and the group), or its name, such as
            "bruck"; an error for an unknown one lists them all. The same on all ranks.
        timeout: seconds for the whole operation, from when its turn comes after those that this
            group was given before; by default ``backend.timeout``.
        async_op: return a ``Work`` at once, whose ``wait()`` gives the result. Until then the
            input must not change and the output must not be read.
        label: what the call is for; compared between the ranks and named in errors.

    Returns:
        Array of shape ``(rows of all ranks, *array.shape[1:])``, in rank order.

    Raises:
        ArgumentError: this rank's arguments are wrong. Nothing was sent.
        MismatchError: the ranks called different things, or what they send does not fit into
            ``out``; on all, at the latest in their next call.
        CommTimeoutError: the deadline passed; names the ranks that are missing.
        PeerFailedError: another rank failed, was lost or left.

    Example::

        every = fc.all_gather_v(found, backend)  # found has as many rows as this rank has found
    """
    if counts is not None:
        source, backend = operand(array, backend)
        check_rows(source.shape, "all_gather_v")
        sizes = as_counts(counts, backend.world_size, "all_gather_v: counts")
        if sizes[backend.rank] != source.shape[0]:
            raise ArgumentError(
                f"all_gather_v: counts has {sizes[backend.rank]} rows for rank {backend.rank}, "
                f"whose array has {source.shape[0]}"
            )
        options = (out, timeout, async_op, algorithm, label)
        return perform(ALL_GATHER, source, backend, *options, counts=tuple(sizes))
    return join_rows(ALL_GATHER, array, backend, out, timeout, async_op, algorithm, label)
