"""``scatter``, ``scatter_v``: split the root's array over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fsdpcore.collectives.algorithms import tree
from fsdpcore.collectives.arguments import check_backend, operand, remembered, spec_for
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.movements import Move, inputs, outputs
from fsdpcore.collectives.on_device import device_twin, mover
from fsdpcore.collectives.operations.broadcast import broadcast
from fsdpcore.collectives.operations.perform import carry_out
from fsdpcore.collectives.operations.rows import check_rows, check_unsized_out, sized, sized_output
from fsdpcore.collectives.run import run
from fsdpcore.collectives.spec import CallSpec, Layout, Operation, Shape
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import MAX_SIGNATURE, Array, pack_signature, unpack_signature
from fsdpcore.core.checks import as_counts, as_rank
from fsdpcore.core.errors import ArgumentError


def _movement(ranks: range, root: int) -> list[Move]:
    """Chunk r of the root's input to each rank r."""
    return [Move(outputs([rank]), inputs([root], rank)) for rank in ranks]


def _call(
    algorithm: Any, context: CollectiveContext, layout: Layout, source: Array | None, out: Array
) -> None:
    algorithm.scatter(context, source, out, layout.bounds, layout.root)


SCATTER = Operation("scatter", _call, _movement, splits=True, rooted=True)


def scatter(
    array: ArrayLike | None,
    backend: Backend,
    *,
    root: int = 0,
    out: Array | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
    async_op: bool = False,
    label: str = "",
) -> Any:
    """Split the root's array along axis 0; each rank gets its part.

    The other ranks pass None: they learn shape and dtype from the root, in one small broadcast.
    Where axis 0 does not divide evenly, the first ranks get one row more, as in
    ``numpy.array_split``. It is no barrier: the root may go on before others have begun.

    Args:
        array: on the root, of a dtype that travels (bool, integers, floats with bfloat16, complex),
            of at least one axis. The others' is ignored.
        backend: the group. All its ranks call this, in the same order of collectives.
        root: the rank that sends its array; the same on all ranks.
        out: array of the result's shape and dtype to write to; it may be this rank's own part of
            the input. Without it a new array is returned.
        algorithm: "auto" (the fastest for the size and the group), or its name, such as
            "tree"; an error for an unknown one lists them all. The same on all ranks.
        timeout: seconds for the whole operation, from when its turn comes after those that this
            group was given before; by default ``backend.timeout``.
        async_op: return a ``Work`` at once, whose ``wait()`` gives the result. Until then the
            input must not change and the output must not be read.
        label: what the call is for; compared between the ranks and named in errors.

    Returns:
        Array of shape ``(rows of this rank, *array.shape[1:])``.

    Raises:
        ArgumentError: this rank's arguments are wrong. Nothing was sent.
        MismatchError: the ranks called different things, or what they send does not fit into
            ``out``; on all, at the latest in their next call.
        CommTimeoutError: the deadline passed; names the ranks that are missing.
        PeerFailedError: another rank failed, was lost or left.

    Example::

        batch = fc.scatter(data if backend.rank == 0 else None, backend)
    """
    return _scatter("scatter", array, backend, None, root, out, timeout, async_op, algorithm, label)


def scatter_v(
    array: ArrayLike | None,
    backend: Backend,
    counts: Sequence[int] | None = None,
    *,
    root: int = 0,
    out: Array | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
    async_op: bool = False,
    label: str = "",
) -> Any:
    """Split the root's array along axis 0; rank r gets the next ``counts[r]`` rows.

    The other ranks pass None for both: they learn counts, shape and dtype from the root. It is no
    barrier: the root may go on before others have begun.

    Args:
        array: on the root, of a dtype that travels (bool, integers, floats with bfloat16, complex),
            with ``sum(counts)`` rows. The others' is ignored.
        backend: the group. All its ranks call this, in the same order of collectives.
        counts: on the root, rows for each rank, 0 or more.
        root: the rank that sends its array; the same on all ranks.
        out: array of the result's shape and dtype to write to; it may be this rank's own part of
            the input. Without it a new array is returned.
        algorithm: "auto" (the fastest for the size and the group), or its name, such as
            "tree"; an error for an unknown one lists them all. The same on all ranks.
        timeout: seconds for the whole operation, from when its turn comes after those that this
            group was given before; by default ``backend.timeout``.
        async_op: return a ``Work`` at once, whose ``wait()`` gives the result. Until then the
            input must not change and the output must not be read.
        label: what the call is for; compared between the ranks and named in errors.

    Returns:
        Array of shape ``(counts[rank], *array.shape[1:])``.

    Raises:
        ArgumentError: this rank's arguments are wrong. Nothing was sent.
        MismatchError: the ranks called different things, or what they send does not fit into
            ``out``; on all, at the latest in their next call.
        CommTimeoutError: the deadline passed; names the ranks that are missing.
        PeerFailedError: another rank failed, was lost or left.

    Example::

        mine = fc.scatter_v(data, backend, counts)  # both None but on rank 0
    """
    return _scatter(
        "scatter_v", array, backend, counts, root, out, timeout, async_op, algorithm, label
    )


def _scatter(
    operation: str,
    array: ArrayLike | None,
    backend: Backend,
    counts: Sequence[int] | None,
    root: int,
    out: Array | None,
    timeout: float | None,
    async_op: bool,
    algorithm: str,
    label: str,
) -> Any:
    check_backend(backend)
    root = as_rank(root, backend.world_size, f"{operation}: root")
    ragged, source = operation == "scatter_v", None
    given = [0] * backend.world_size
    if backend.rank == root:
        source, given = _given(operation, array, backend, counts, root)
        if out is not None:
            moves = mover(backend, source).moves
            moves.check_out(out, (given[root], *source.shape[1:]), source.dtype)
    else:
        check_unsized_out(out, mover(backend, out).moves)
    backend = _mover_of_root(array, backend, root)
    spec = remembered(backend, _spec, operation, root, algorithm, label)

    def body(context: CollectiveContext) -> Array | None:
        dtype, shape = _tell_what_is_scattered(context, source, root)
        if ragged:
            told = np.array(given, np.int64)
            tree.broadcast(context, told, root)
            sizes = told.tolist()
        else:
            sizes = SCATTER.sizes(shape, context.size)
        layout, chunk = sized(context, SCATTER, shape, tuple(sizes), root)
        output = sized_output(context, out, chunk, dtype, backend.moves)
        choice = context.choose(layout.bounds[-1] * dtype.itemsize)
        return carry_out(context, SCATTER, choice, layout, source, output)

    return run(backend, spec, body, timeout=timeout, async_op=async_op)


def _given(
    operation: str,
    array: ArrayLike | None,
    backend: Backend,
    counts: Sequence[int] | None,
    root: int,
) -> tuple[Array, list[int]]:
    """Check what the root passes; return its array, and the rows of each rank."""
    ragged = operation == "scatter_v"
    if array is None or (ragged and counts is None):
        what = "the array and the counts" if ragged else "the array"
        raise ArgumentError(f"{operation}: rank {root} is the root and has to pass {what}")
    source, _ = operand(array, backend)
    if counts is None:
        return source, SCATTER.sizes(source.shape, backend.world_size)
    check_rows(source.shape, operation)
    return source, as_counts(counts, backend.world_size, f"{operation}: counts", source.shape[0])


def _spec(backend: Backend, operation: str, root: int, algorithm: str, label: str) -> CallSpec:
    layout = Layout(root)
    return spec_for(backend, operation, SCATTER, layout=layout, algorithm=algorithm, label=label)


def _mover_of_root(array: ArrayLike | None, backend: Backend, root: int) -> Backend:
    """Return the group that moves what the root scatters, which the root alone knows.

    A broadcast, where there is more than one kind of arrays. Blocks.
    """
    if backend.root.device.on_host:
        return backend
    elsewhere = np.array([array is not None and backend.device.claims(array)])
    return device_twin(backend) if broadcast(elsewhere, backend, root=root)[0] else backend


def _tell_what_is_scattered(
    context: CollectiveContext, source: Array | None, root: int
) -> tuple[np.dtype[Any], Shape]:
    """Tell all ranks dtype and shape of the root's array."""
    header = np.zeros(MAX_SIGNATURE, np.uint8)
    if source is not None:
        signature = pack_signature(source.dtype, source.shape)
        header[: len(signature)] = np.frombuffer(signature, np.uint8)
    tree.broadcast(context, header, root)
    return unpack_signature(header.tobytes())
