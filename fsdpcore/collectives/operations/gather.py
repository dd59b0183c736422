"""``gather``, ``gather_v``: join the arrays of all ranks; the root gets the result."""

from __future__ import annotations

from typing import Any

from numpy.typing import ArrayLike

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.movements import Move, inputs, outputs
from fsdpcore.collectives.operations.perform import perform
from fsdpcore.collectives.operations.rows import join_rows
from fsdpcore.collectives.spec import Layout, Operation
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array


def _movement(ranks: range, root: int) -> list[Move]:
    """The input of each rank r to chunk r of the root's output."""
    return [Move(outputs([root], rank), inputs([rank])) for rank in ranks]


def _call(
    algorithm: Any, context: CollectiveContext, layout: Layout, source: Array, out: Array | None
) -> None:
    algorithm.gather(context, source, out, layout.bounds, layout.root)


GATHER = Operation("gather", _call, _movement, joins=True, rooted=True, to_root=True)


def gather(
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
    """Join the arrays of all ranks, which have equal shapes, along axis 0; the root gets it.

    It is no barrier: a rank that has sent its part may go on before others have begun.

    Args:
        array: of a dtype that travels (bool, integers, floats with bfloat16, complex),
            of any shape, 0-d and empty ones too; of equal shape and dtype on all ranks.
        backend: the group. All its ranks call this, in the same order of collectives.
        root: the rank that gets the result; the same on all ranks.
        out: array of the result's shape and dtype to write to; the input may be this rank's own
            part of it. Without it a new array is returned. Ignored on the others.
        algorithm: "auto" (the fastest for the size and the group), or its name, such as
            "tree"; an error for an unknown one lists them all. The same on all ranks.
        timeout: seconds for the whole operation, from when its turn comes after those that this
            group was given before; by default ``backend.timeout``.
        async_op: return a ``Work`` at once, whose ``wait()`` gives the result. Until then the
            input must not change and the output must not be read.
        label: what the call is for; compared between the ranks and named in errors.

    Returns:
        On the root an array of shape ``(world_size * array.shape[0], *array.shape[1:])``, in rank
        order; 0-d arrays join to one of shape ``(world_size,)``. None on the others.

    Raises:
        ArgumentError: this rank's arguments are wrong. Nothing was sent.
        MismatchError: the ranks called different things; on all, at the latest in their next call.
        CommTimeoutError: the deadline passed; names the ranks that are missing.
        PeerFailedError: another rank failed, was lost or left.

    Example::

        losses = fc.gather(loss, backend, root=0)  # None but on rank 0
    """
    return perform(GATHER, array, backend, out, timeout, async_op, algorithm, label, root=root)


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

    Args:
        array: of a dtype that travels (bool, integers, floats with bfloat16, complex),
            of at least one axis. All but the size of axis 0, which may be 0, is equal on
            all ranks.
        backend: the group. All its ranks call this, in the same order of collectives.
        root: the rank that gets the result; the same on all ranks.
        out: array of the result's shape and dtype to write to; the input may be this rank's own
            part of it. Without it a new array is returned. Ignored on the others.
        algorithm: "auto" (the fastest for the size and the group), or its name, such as
            "tree"; an error for an unknown one lists them all. The same on all ranks.
        timeout: seconds for the whole operation, from when its turn comes after those that this
            group was given before; by default ``backend.timeout``.
        async_op: return a ``Work`` at once, whose ``wait()`` gives the result. Until then the
            input must not change and the output must not be read.
        label: what the call is for; compared between the ranks and named in errors.

    Returns:
        On the root an array of shape ``(rows of all ranks, *array.shape[1:])``, in rank order; None
        on the others.

    Raises:
        ArgumentError: this rank's arguments are wrong. Nothing was sent.
        MismatchError: the ranks called different things, or what they send does not fit into
            ``out``; on all, at the latest in their next call.
        CommTimeoutError: the deadline passed; names the ranks that are missing.
        PeerFailedError: another rank failed, was lost or left.

    Example::

        every = fc.gather_v(found, backend, root=0)
    """
    return join_rows(GATHER, array, backend, out, timeout, async_op, algorithm, label, root)
