"""Ragged collectives: the ranks contribute or receive different numbers of rows.

Rows are indices of axis 0; all other dimensions are equal on all ranks, and a rank may have no
rows at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fsdpcore.collectives.arguments import operand, remembered, spec_for
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.operations.perform import carry_out
from fsdpcore.collectives.output import Output
from fsdpcore.collectives.run import run
from fsdpcore.collectives.spec import CallSpec, Layout, Operation, Shape
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import DTYPES, Array
from fsdpcore.core.checks import as_rank
from fsdpcore.core.device import Device
from fsdpcore.core.errors import ArgumentError, MismatchError

_SIZED = 64  # of one kind of call


def join_rows(
    definition: Operation,
    array: ArrayLike,
    backend: Backend,
    out: Array | None,
    timeout: float | None,
    async_op: bool,
    algorithm: str,
    label: str,
    root: int = -1,
) -> Any:
    """Call a collective that joins the rows of all ranks, which these learn from each other."""
    source, backend = operand(array, backend)
    operation = f"{definition.name}_v"
    if definition.rooted:
        root = as_rank(root, backend.world_size, f"{operation}: root")
    spec = remembered(
        backend, _ragged, definition, source.dtype, source.shape, root, algorithm, label
    )
    gives = definition.gives(backend.rank, spec.layout)
    if gives:
        check_unsized_out(out, backend.moves, source.shape, source.dtype)

    def body(context: CollectiveContext) -> Array | None:
        layout, joined = sized(context, definition, source.shape, tuple(context.rows), root)
        output = None
        if gives:
            output = sized_output(context, out, joined, source.dtype, backend.moves)
        choice = context.choose(layout.bounds[-1] * source.dtype.itemsize)
        return carry_out(context, definition, choice, layout, source, output)

    return run(backend, spec, body, timeout=timeout, async_op=async_op)


def sized(
    context: CollectiveContext,
    definition: Operation,
    shape: Shape,
    sizes: tuple[int, ...],
    root: int,
) -> tuple[Layout, Shape]:
    """What follows from what the ranks have told each other: the layout, and the result's shape.

    Args:
        context: of the call; it has one root.
        definition: of the collective.
        shape: of the array.
        sizes: the rows of each rank's chunk.
        root: the root rank, or -1.
    """
    known, rank = context.spec.sized, context.rank
    found = known.get((shape, sizes))
    if found is None:
        if len(known) >= _SIZED:
            known.clear()
        layout = definition.layout(shape, sizes, rank, root=root)
        found = known[shape, sizes] = layout, definition.out_shape(shape, sizes, rank)
    return found


def _ragged(
    backend: Backend,
    definition: Operation,
    dtype: np.dtype[Any],
    shape: Shape,
    root: int,
    algorithm: str,
    label: str,
) -> CallSpec:
    operation = f"{definition.name}_v"
    check_rows(shape, operation)
    return spec_for(
        backend,
        operation,
        definition,
        dtype,
        shape,
        layout=Layout(root),
        algorithm=algorithm,
        label=label,
        ragged=True,
    )


def check_rows(shape: Shape, operation: str) -> None:
    """Raise ``ArgumentError`` if there is no axis 0."""
    if not shape:
        raise ArgumentError(f"{operation} works on rows (axis 0), which a 0-d array does not have")


def check_unsized_out(
    out: object, device: Device, shape: Shape | None = None, dtype: np.dtype[Any] | None = None
) -> None:
    """Check as much of ``out`` as is known before the ranks have told each other their sizes.

    Args:
        out: what the caller passed, or None.
        device: where it must be.
        shape: of the result, but for axis 0; None if that is for another rank to tell.
        dtype: likewise.

    Raises:
        ArgumentError: no result could fit into it.
    """
    if out is None:
        return
    own = tuple(getattr(out, "shape", ()))
    wanted = own if shape is None else (own[:1] or (0,)) + shape[1:]
    kind: Any = getattr(out, "dtype", None) if dtype is None else dtype
    found = device.check_out(out, wanted, kind)
    if found.dtype not in DTYPES:
        raise ArgumentError(f"out has the dtype {found.dtype}, of which no array is sent")
    if not own:
        raise ArgumentError("out must have rows (axis 0), which a 0-d array does not have")


def sized_output(
    context: CollectiveContext,
    out: Array | None,
    shape: Shape,
    dtype: np.dtype[Any],
    device: Device,
) -> Output:
    """Return the ``Output`` of a result whose size the ranks have told each other in the call.

    Raises:
        MismatchError: ``out`` does not fit what the others send.
    """
    try:
        return Output(out, shape, dtype, device)
    except ArgumentError as error:
        raise MismatchError(
            f"{context.name}: what the ranks send does not fit into out of rank "
            f"{context.global_rank(context.rank)}: {error}. The sizes are known only inside of the "
            "call: pass no out, or agree on them before"
        ) from None
