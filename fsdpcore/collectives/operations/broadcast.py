"""``broadcast``: copy the root's array to all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.movements import Move, inputs, outputs
from fsdpcore.collectives.operations.perform import perform
from fsdpcore.collectives.spec import Layout, Operation
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array


def _movement(ranks: range, root: int) -> list[Move]:
    """The root's input to all outputs."""
    return [Move(outputs(ranks), inputs([root]))]


def _call(
    algorithm: Any, context: CollectiveContext, layout: Layout, source: Array, out: Array
) -> None:
    if context.rank == layout.root and source is not out:
        np.copyto(out, source)
    algorithm.broadcast(context, out, layout.root)


BROADCAST = Operation("broadcast", _call, _movement, rooted=True)


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

    It is no barrier: the root may go on before others have begun.

    Args:
        array: of a dtype that travels (bool, integers, floats with bfloat16, complex),
            of any shape, 0-d and empty ones too. It changes only where it is passed as
            ``out`` too; what it holds on the other ranks is not looked at.
        backend: the group. All its ranks call this, in the same order of collectives.
        root: the rank that sends its array; the same on all ranks.
        out: array of the result's shape and dtype to write to, which may be the input; without it a
            new array is returned.
        algorithm: "auto" (the fastest for the size and the group), or its name, such as
            "tree"; an error for an unknown one lists them all. The same on all ranks.
        timeout: seconds for the whole operation, from when its turn comes after those that this
            group was given before; by default ``backend.timeout``.
        async_op: return a ``Work`` at once, whose ``wait()`` gives the result. Until then the
            input must not change and the output must not be read.
        label: what the call is for; compared between the ranks and named in errors.

    Returns:
        Array of the input's shape and dtype, with the root's values.

    Raises:
        ArgumentError: this rank's arguments are wrong. Nothing was sent.
        MismatchError: the ranks called different things; on all, at the latest in their next call.
        CommTimeoutError: the deadline passed; names the ranks that are missing.
        PeerFailedError: another rank failed, was lost or left.

    Example::

        fc.broadcast(weights, backend, out=weights)  # from rank 0, in place
    """
    return perform(BROADCAST, array, backend, out, timeout, async_op, algorithm, label, root=root)
