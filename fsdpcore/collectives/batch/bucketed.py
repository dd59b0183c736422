"""``all_reduce_many``: all_reduce of a list of arrays, in buckets."""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fsdpcore.collectives.arguments import check_backend, operand
from fsdpcore.collectives.operations.all_reduce import all_reduce
from fsdpcore.collectives.selection.choose import choose
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array, dtype_code
from fsdpcore.core.checks import as_int
from fsdpcore.core.device import Device
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.reductions import ReduceOp, Reduction
from fsdpcore.core.work import Deadline, Work

BUCKET_BYTES = 25 << 20

# Buckets under way besides the one that is being filled: one that communicates, and one behind it
# so that the next can begin at once.
IN_FLIGHT = 2


def all_reduce_many(
    arrays: Sequence[ArrayLike],
    backend: Backend,
    *,
    op: ReduceOp | str = "sum",
    bucket_bytes: int = BUCKET_BYTES,
    out: Sequence[Array | None] | None = None,
    algorithm: str = "auto",
    timeout: float | None = None,
    label: str = "",
) -> list[Array]:
    """Combine the arrays of all ranks elementwise, list position by list position.

    Arrays of equal dtype are put together, in order, in buckets of up to ``bucket_bytes``, and
    each bucket is one ``all_reduce``; while one communicates, the next is filled. An array that
    has a bucket for itself is not copied. Needs memory for three buckets besides the results. The
    results have the bits of single calls where the algorithm is canonical.

    Args:
        arrays: any shapes and dtypes, the same on all ranks.
        backend: the group.
        op, algorithm, label: as in ``all_reduce``.
        bucket_bytes: size of a bucket, the same on all ranks; a larger array gets one of its own.
        out: arrays to write the results to, None for a new one. ``out[i]`` may be ``arrays[i]``,
            but must not overlap any other of the arrays.
        timeout: seconds for everything.

    Returns:
        The results, in the order of ``arrays``.

    Raises:
        The errors of ``all_reduce``; ``ArgumentError`` before anything was sent.

    Example::

        weights, bias = fc.all_reduce_many([weights, bias], backend, op="mean")
    """
    check_backend(backend)
    operands = [operand(array, backend) for array in _listed(arrays, "arrays")]
    sources = [source for source, _ in operands]
    for source, group in operands:
        dtype_code(source.dtype)
        name = Reduction.of(op, source.dtype).name
        choose("all_reduce", algorithm, source.nbytes, group, source.dtype, name)
    results = _outputs([(source, group.moves) for source, group in operands], out)
    deadline = Deadline(backend.timeout if timeout is None else timeout, backend.root.clock)
    options: dict[str, Any] = {"op": op, "algorithm": algorithm, "async_op": True}
    flying: deque[tuple[_Bucket, Work]] = deque()
    try:
        for bucket in plan(
            sources, as_int(bucket_bytes, "all_reduce_many: bucket_bytes", minimum=1)
        ):
            if len(flying) == IN_FLIGHT:
                _land(flying, results)
            data, target = bucket.fill(sources, results)
            words = f"{label}: {bucket}" if label else str(bucket)
            seconds = deadline.remaining()
            work = all_reduce(data, backend, out=target, timeout=seconds, label=words, **options)
            flying.append((bucket, work))
        while flying:
            _land(flying, results)
    except Exception:
        for _, work in flying:  # they write to the caller's arrays until they have ended
            with contextlib.suppress(Exception):
                work.wait()
        raise
    return results


def _land(flying: deque[tuple[_Bucket, Work]], results: list[Array]) -> None:
    """Wait for the oldest bucket under way, which ends by its own deadline."""
    bucket, work = flying.popleft()
    work.wait()
    bucket.empty(results)


@dataclass
class _Bucket:
    """Arrays of one dtype that travel together.

    Attributes:
        indices: their positions in the list.
        count: the length of the list.
        nbytes: their bytes.
        shapes: digest of their shapes, which the ranks compare.
    """

    indices: list[int]
    count: int
    nbytes: int = 0
    shapes: str = ""
    buffer: Array | None = None

    def fill(self, sources: list[Array], results: list[Array]) -> tuple[Array, Array]:
        """Return what to reduce, and where to."""
        shapes = repr([sources[index].shape for index in self.indices]).encode()
        self.shapes = hashlib.blake2b(shapes, digest_size=8).hexdigest()
        if len(self.indices) == 1:
            return sources[self.indices[0]], results[self.indices[0]]
        self.buffer = np.concatenate([sources[index].reshape(-1) for index in self.indices])
        return self.buffer, self.buffer

    def empty(self, results: list[Array]) -> None:
        """Copy the reduced arrays to where they belong."""
        if self.buffer is None:
            return
        at = 0
        for index in self.indices:
            result = results[index]
            np.copyto(result, self.buffer[at : at + result.size].reshape(result.shape))
            at += result.size
        self.buffer = None

    def __str__(self) -> str:
        first, last = self.indices[0], self.indices[-1]
        where = f"array {first}" if first == last else f"{len(self.indices)} arrays {first}..{last}"
        return f"{where} of {self.count} (shapes {self.shapes})"


def plan(sources: Sequence[Array], bucket_bytes: int) -> list[_Bucket]:
    """Divide arrays into buckets, in the order in which these are full."""
    done: list[_Bucket] = []
    filling: dict[tuple[type, np.dtype[Any]], _Bucket] = {}
    for index, source in enumerate(sources):
        kind = (type(source), source.dtype)  # NumPy's arrays apart from those of a GPU
        bucket = filling.get(kind)
        if bucket is not None and bucket.nbytes + source.nbytes > bucket_bytes:
            done.append(filling.pop(kind))
            bucket = None
        if bucket is None:
            bucket = filling[kind] = _Bucket([], len(sources))
        bucket.indices.append(index)
        bucket.nbytes += source.nbytes
    return [*done, *filling.values()]


def _listed(arrays: object, what: str) -> list[Any]:
    single = isinstance(arrays, (str, bytes)) or hasattr(arrays, "dtype")
    if single or not isinstance(arrays, Iterable):
        raise ArgumentError(
            f"all_reduce_many: {what} is a list of arrays, got {type(arrays).__name__}; "
            "use all_reduce for a single one"
        )
    return list(arrays)


def _outputs(
    sources: list[tuple[Array, Device]], out: Sequence[Array | None] | None
) -> list[Array]:
    given = [None] * len(sources) if out is None else _listed(out, "out")
    if len(given) != len(sources):
        raise ArgumentError(
            f"all_reduce_many: out has {len(given)} arrays, but there are {len(sources)} to reduce"
        )
    return [
        device.empty(source.shape, source.dtype)
        if target is None
        else device.check_out(target, source.shape, source.dtype)
        for (source, device), target in zip(sources, given, strict=True)
    ]
