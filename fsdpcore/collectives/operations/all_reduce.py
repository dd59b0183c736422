"""``all_reduce``: combine the arrays of all ranks; every rank gets the result."""

from __future__ import annotations

from typing import Any

from numpy.typing import ArrayLike

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.movements import Move, inputs, outputs
from fsdpcore.collectives.operations.perform import perform
from fsdpcore.collectives.spec import Layout, Operation
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.reductions import ReduceOp


def _movement(ranks: range, root: int) -> list[Move]:
    """All inputs, reduced, to all outputs."""
    return [Move(outputs(ranks), inputs(ranks), divided=True)]


def _call(
    algorithm: Any, context: CollectiveContext, layout: Layout, source: Array, out: Array
) -> None:
    algorithm.all_reduce(context, source, out, layout.reduction)


ALL_REDUCE = Operation("all_reduce", _call, _movement, reduces=True)


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

    Args:
        array: of a dtype that travels (bool, integers, floats with bfloat16, complex),
            of any shape, 0-d and empty ones too; of equal shape and dtype on all ranks.
        backend: the group. All its ranks call this, in the same order of collectives.
        op: how values are combined: a ``ReduceOp`` or the name of one, such as "max". Always
            in the canonical order of ranks, so with the same bits, but for "ring" and what a
            transport calls its own. float16 and bfloat16 are accumulated in float32.
        out: array of the result's shape and dtype to write to, which may be the input; without it a
            new array is returned.
        algorithm: "auto" (the fastest for the size and the group), or its name, such as
            "ring"; an error for an unknown one lists them all. The same on all ranks.
        timeout: seconds for the whole operation, from when its turn comes after those that this
            group was given before; by default ``backend.timeout``.
        async_op: return a ``Work`` at once, whose ``wait()`` gives the result. Until then the
            input must not change and the output must not be read.
        label: what the call is for; compared between the ranks and named in errors.

    Returns:
        Array of the input's shape and dtype, the same bits on every rank.

    Raises:
        ArgumentError: this rank's arguments are wrong. Nothing was sent.
        MismatchError: the ranks called different things; on all, at the latest in their next call.
        CommTimeoutError: the deadline passed; names the ranks that are missing.
        PeerFailedError: another rank failed, was lost or left.

    Example::

        loss = fc.all_reduce(loss, backend, op="mean")
        fc.all_reduce(gradient, backend, out=gradient)  # in place
    """
    return perform(ALL_REDUCE, array, backend, out, timeout, async_op, algorithm, label, op)
