"""Reductions of the same arrays again and again, with all that can be prepared done once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fsdpcore.core.buffers import Array
from fsdpcore.core.reductions import BLOCK, ReduceOp, Reduction

if TYPE_CHECKING:
    from fsdpcore.collectives.context import CollectiveContext

Reduce = Callable[[Array], None]


def prepare(context: CollectiveContext, reduction: Reduction, parts: Sequence[Array]) -> Reduce:
    """Return what does ``reduction.reduce(parts, out)`` with the ``out`` that it is given.

    Args:
        context: its scratch memory is used.
        reduction: which one.
        parts: one flat array per rank, at least two; or none.
    """
    if not parts or type(reduction) is not Reduction:  # it reduces in a way of its own
        return partial(reduction.reduce, parts)
    size, dtype = parts[0].size, reduction.dtype
    if reduction.accumulator is not dtype or (len(parts) > 2 and size > BLOCK):
        return partial(reduction.reduce, parts)
    store = reduction.store
    if len(parts) == 2 and reduction.op is not ReduceOp.MEAN:
        return reduction.combining(*parts)
    rows, values = len(parts) // 2, list(parts)
    scratch = context.scratch(rows * size, dtype).reshape(rows, size)
    steps: list[Callable[[], Any]] = []
    stride = 1
    while 2 * stride < len(parts):  # all of the tree but its root
        for low in range(0, len(parts) - stride, 2 * stride):
            target = values[low] if stride > 1 else scratch[low // 2]
            steps.append(partial(reduction.combining(values[low], values[low + stride]), target))
            values[low] = target
        stride *= 2
    last = reduction.combining(values[0], values[stride])
    divides, count = reduction.op is ReduceOp.MEAN, len(parts)

    def reduce(out: Array) -> None:
        for step in steps:
            step()
        last(out)
        if divides:
            store(out, out, count)

    return reduce
