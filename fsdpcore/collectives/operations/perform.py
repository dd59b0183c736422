"""What all public functions of collectives do: from arrays to the call, and to its result."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fsdpcore.collectives.arguments import check_backend, operand, recall, remember, spec_for
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.output import Output
from fsdpcore.collectives.run import run
from fsdpcore.collectives.spec import DECLINED, CallSpec, Choice, Layout, Operation, Shape
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_rank
from fsdpcore.core.reductions import ReduceOp, Reduction


def perform(
    definition: Operation,
    array: ArrayLike,
    backend: Backend,
    out: Array | None,
    timeout: float | None,
    async_op: bool,
    algorithm: str = "auto",
    label: str = "",
    op: ReduceOp | str = "",
    root: int = -1,
    counts: tuple[int, ...] = (),
) -> Any:
    """Call a collective of which every rank knows shapes and sizes before it begins.

    Args:
        definition: which one.
        array, backend, out, timeout, async_op, algorithm, label: as in all public functions.
        op: of one that reduces.
        root: of one that has a root.
        counts: the rows of each rank's chunk, which all ranks know; by default as even as can be.
    """
    # A small call is over in two microseconds: what every call passes is written out here.
    if type(array) is np.ndarray and array.flags.c_contiguous:
        source = array
    else:
        source, backend = operand(array, backend)
    if type(root) is not int:  # True is no rank, but as a key it is equal to 1
        check_backend(backend)
        root = as_rank(root, backend.world_size, f"{definition.name}: root")
    key = (definition, source.dtype, source.shape, algorithm, label, op, root, counts)
    spec: CallSpec | None
    try:
        spec = backend.collectives.specs[key]  # type: ignore[attr-defined]
    except (AttributeError, KeyError, TypeError):
        spec = None
    if spec is None:
        check_backend(backend)
        spec = spec_of(backend, *key)
    if timeout is None and spec.fast_path is not None and not async_op:
        result = spec.fast_path(source, out)
        if result is not DECLINED:
            return result
    gives = definition.gives(backend.rank, spec.layout)
    other = spec.reduction.result if spec.reduction is not None else None  # dtype of the result
    output = Output(out, spec.out_shape, other or source.dtype, backend.moves) if gives else None

    def body(context: CollectiveContext) -> Array | None:
        if other is not None:
            return _convert_and_reduce(context, definition, spec.layout, source, output)
        return carry_out(context, definition, spec.choice, spec.layout, source, output)

    return run(backend, spec, body, timeout=timeout, async_op=async_op, output=output)


def spec_of(
    backend: Backend,
    definition: Operation,
    dtype: np.dtype[Any],
    shape: Shape,
    algorithm: str = "auto",
    label: str = "",
    op: ReduceOp | str = "",
    root: int = -1,
    counts: tuple[int, ...] = (),
) -> CallSpec:
    """Return the spec of a call, made once for equal arguments; these are as in ``perform``.

    Raises:
        ArgumentError: one of them is wrong.
    """
    rank, world_size = backend.rank, backend.world_size
    if definition.rooted:
        root = as_rank(root, world_size, f"{definition.name}: root")
    key = (definition, dtype, shape, algorithm, label, op, root, counts)
    known = recall(backend, key)
    if known is not None:
        return known
    sizes = counts or definition.sizes(shape, world_size)
    ragged = bool(counts) and definition.joins and not definition.splits
    nbytes = math.prod(shape) * dtype.itemsize
    if ragged:  # each rank has a chunk of its own size
        nbytes = sum(counts) * math.prod(shape[1:]) * dtype.itemsize // world_size
    reduction = None
    if definition.reduces:
        reduction = Reduction.of(op, dtype, converts=backend.moves.on_host)
        if definition.starts_empty:
            _ = reduction.identity  # without one, all ranks refuse the call, not rank 0 alone
    # Of what is converted, the algorithm is chosen late: the fast path is for arrays as they are.
    late = reduction is not None and reduction.result is not None
    spec = spec_for(
        backend,
        f"{definition.name}_v" if counts else definition.name,
        definition,
        dtype,
        shape,
        size=None if late else definition.size(nbytes, world_size),
        layout=definition.layout(shape, sizes, rank, root=root, reduction=reduction),
        out_shape=definition.out_shape(shape, sizes, rank),
        algorithm=algorithm,
        label=label,
        counts=counts,
        ragged=ragged,
    )
    remember(backend, key, spec)
    return spec


def carry_out(
    context: CollectiveContext,
    definition: Operation,
    choice: Choice,
    layout: Layout,
    source: Array | None,
    output: Output | None,
) -> Array | None:
    """Run an algorithm from the input, if this rank has one, to its result, if it gets one."""
    flat = None if source is None else source.reshape(-1)
    if output is None:
        choice.start(context, definition, layout, flat, None)
        return None
    if flat is not None:
        flat = output.separate(flat, definition, layout, context.rank)
    choice.start(context, definition, layout, flat, output.flat)
    return output.deliver()


def _convert_and_reduce(
    context: CollectiveContext,
    definition: Operation,
    layout: Layout,
    source: Array,
    output: Output | None,
) -> Array | None:
    """Reduce a copy of the input in another dtype, in place, and convert the result."""
    reduction = layout.reduction
    assert reduction is not None
    wide = reduction.load(source.reshape(-1))
    choice = context.choose(definition.size(wide.nbytes, context.size))
    if output is None:
        choice.start(context, definition, layout, wide, None)
        return None
    parts = definition.own_parts(layout, context.rank)
    assert parts is not None, "a reduction does not join"
    own = wide[parts[0]] if definition.splits else wide
    choice.start(context, definition, layout, wide, own)
    reduction.store(own, output.flat, 1)  # it is the mean already: only round it
    return output.deliver()
