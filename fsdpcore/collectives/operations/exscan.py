"""``exscan``: combine the arrays of the ranks before each one."""

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
    """To each rank the inputs before its own, reduced."""
    return [Move(outputs(ranks), inputs(ranks[:-1]), divided=True, prefixes=True)]


def _call(
    algorithm: Any, context: CollectiveContext, layout: Layout, source: Array, out: Array
) -> None:
    algorithm.exscan(context, source, out, layout.reduction)


EXSCAN = Operation("exscan", _call, _movement, reduces=True, starts_empty=True)


def exscan(
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
    """Combine the arrays of the ranks before this one elementwise.

    It is no barrier: a rank may go on before those behind it have begun.

    Rank r > 0 gets what ``all_reduce`` of the ranks 0 to r - 1 alone would give, to the bit: the
    canonical tree of these ranks. Rank 0 gets the value that changes nothing: 0 for sum, bor, bxor,
    lor and lxor; 1 for prod and land; all bits set for band; the largest value of the dtype
    (infinity) for min, the smallest for max. Nothing stands for the mean of no ranks, or is known
    of a reduction of your own: use ``scan`` for these. Arrays of a GPU are refused: copy them to
    the host.

    Args:
        array: of a dtype that travels (bool, integers, floats with bfloat16, complex),
            of any shape, 0-d and empty ones too; of equal shape and dtype on all ranks.
        backend: the group. All its ranks call this, in the same order of collectives.
        op: how values are combined: a ``ReduceOp`` or the name of one, such as "max". Always
            in the canonical order of ranks, so with the same bits. float16 and bfloat16 are
            accumulated in float32.
        out: array of the result's shape and dtype to write to, which may be the input; without it a
            new array is returned.
        algorithm: "auto" (the fastest for the size and the group), or its name, such as
            "doubling"; an error for an unknown one lists them all. The same on all ranks.
        timeout: seconds for the whole operation, from when its turn comes after those that this
            group was given before; by default ``backend.timeout``.
        async_op: return a ``Work`` at once, whose ``wait()`` gives the result. Until then the
            input must not change and the output must not be read.
        label: what the call is for; compared between the ranks and named in errors.

    Returns:
        Array of the input's shape and dtype.

    Raises:
        ArgumentError: this rank's arguments are wrong. Nothing was sent.
        MismatchError: the ranks called different things; on all, at the latest in their next call.
        CommTimeoutError: the deadline passed; names the ranks that are missing.
        PeerFailedError: another rank failed, was lost or left.

    Example::

        begins = fc.exscan(np.array(len(rows)), backend)  # how many rows are before this rank's
    """
    return perform(EXSCAN, array, backend, out, timeout, async_op, algorithm, label, op)
