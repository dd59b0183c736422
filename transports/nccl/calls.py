"""NCCL's own collectives, and those that are put together from its sends and receives.

Algorithms named ``nccl``. NCCL reduces in an order of its own choice, float16 and bfloat16 rounded
as often as it combines them; a mean is of inputs that were divided before. It is not asked where it
would give other values than the rest of this library: minima and maxima of floats (which lose NaN),
products of half precision and of complex numbers, and integers of 16 bits, which it does not know.
``direct.py`` does these.

Everything is enqueued on the calling thread's current stream. Data moves as bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import cupy
import numpy as np
from cupy.cuda import nccl, runtime

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import BFLOAT16, Array
from fsdpcore.core.reductions import ReduceOp, Reduction

from .communicators import Communicator
from .transport import NcclTransport

_SUM, _MEAN, _PROD = ReduceOp.SUM.value, ReduceOp.MEAN.value, ReduceOp.PROD.value
_MIN, _MAX = ReduceOp.MIN.value, ReduceOp.MAX.value

_INTEGERS: dict[np.dtype[Any], int] = {
    np.dtype(np.int8): nccl.NCCL_INT8,
    np.dtype(np.uint8): nccl.NCCL_UINT8,
    np.dtype(np.int32): nccl.NCCL_INT32,
    np.dtype(np.uint32): nccl.NCCL_UINT32,
    np.dtype(np.int64): nccl.NCCL_INT64,
    np.dtype(np.uint64): nccl.NCCL_UINT64,
}
_FLOATS: dict[np.dtype[Any], int] = {
    np.dtype(np.float16): nccl.NCCL_FLOAT16,
    BFLOAT16: nccl.NCCL_BFLOAT16,
    np.dtype(np.float32): nccl.NCCL_FLOAT32,
    np.dtype(np.float64): nccl.NCCL_FLOAT64,
}
_COMPLEX: dict[np.dtype[Any], int] = {
    np.dtype(np.complex64): nccl.NCCL_FLOAT32,
    np.dtype(np.complex128): nccl.NCCL_FLOAT64,
}
_OF_INTEGERS = {
    _SUM: nccl.NCCL_SUM,
    _PROD: nccl.NCCL_PROD,
    _MIN: nccl.NCCL_MIN,
    _MAX: nccl.NCCL_MAX,
}
_OF_FLOATS = {_SUM: nccl.NCCL_SUM, _MEAN: nccl.NCCL_AVG}
# On bytes that are 0 or 1, these are the logical or, and and.
_OF_BOOLS = {_SUM: nccl.NCCL_MAX, _MAX: nccl.NCCL_MAX, _PROD: nccl.NCCL_MIN, _MIN: nccl.NCCL_MIN}

BYTES = nccl.NCCL_UINT8


class NcclReduction(NamedTuple):
    """How NCCL is told of a reduction.

    Attributes:
        dtype, op: NCCL's numbers for them.
        width: how many values of ``dtype`` make one element.
    """

    dtype: int
    op: int
    width: int = 1


def kind_of(dtype: np.dtype[Any], op: str) -> NcclReduction | None:
    """NCCL's names for a reduction; None where it is not asked."""
    if dtype.kind == "b":
        table, number, width = _OF_BOOLS, nccl.NCCL_UINT8, 1
    elif dtype in _INTEGERS:
        table, number, width = _OF_INTEGERS, _INTEGERS[dtype], 1
    elif dtype in _FLOATS:
        table, number, width = _OF_FLOATS, _FLOATS[dtype], 1
        if op == _PROD and dtype.itemsize > 2:
            return NcclReduction(number, nccl.NCCL_PROD)
    elif dtype in _COMPLEX:  # both parts by themselves
        table, number, width = _OF_FLOATS, _COMPLEX[dtype], 2
    else:
        return None
    return NcclReduction(number, table[op], width) if op in table else None


def reduces(dtype: np.dtype[Any] | None, op: str) -> bool:
    """Whether NCCL reduces ``dtype`` by ``op`` to the values that this library promises."""
    return dtype is None or kind_of(dtype, op) is not None


class NcclCollectives:
    """What all algorithms of one group share: its communicator, and the movement of bytes.

    Functions have the signatures of those in ``collectives``, on flat contiguous arrays of the GPU.
    A group of one rank needs no communicator: its data is copied.

    Attributes:
        copies_alone: that is so. Where there is just one GPU, tests and benches switch it off, to
            see NCCL called.
    """

    copies_alone: ClassVar[bool] = True

    def __init__(self, transport: NcclTransport, group: Backend) -> None:
        self._transport = transport
        self._group = group
        self._launches = transport.communicators.launches
        self._found: Communicator | None = None

    def communicator(self, context: CollectiveContext) -> Communicator:
        """The group's communicator, made by its first call; for a call that follows at once."""
        self._transport.supervisor.enter(context)
        if self._found is None:
            self._found = self._transport.groups.of(self._group, context)
        return self._found

    def _only_copies(self, context: CollectiveContext) -> bool:
        return context.size == 1 and self.copies_alone

    # Movement.

    def broadcast(self, context: CollectiveContext, data: Array, root: int) -> None:
        """Copy ``data`` of the root into ``data`` of all ranks."""
        if data.size and not self._only_copies(context):
            at = pointer(data)
            self.communicator(context).call("broadcast", at, at, data.nbytes, BYTES, root, stream())

    def all_gather(
        self, context: CollectiveContext, own: Array, out: Array, bounds: Sequence[int]
    ) -> None:
        """Bring every rank's ``own`` to ``out[bounds[rank]:bounds[rank + 1]]`` of all ranks."""
        size = out.itemsize
        if self._only_copies(context):
            copy(own, out)
        elif is_even(bounds):
            if own.size:
                self.communicator(context).call(
                    "allGather", pointer(own), pointer(out), own.nbytes, BYTES, stream()
                )
        else:
            communicator, where = self.communicator(context), stream()
            with self._launches.group():
                for rank, (low, high) in enumerate(itertools.pairwise(bounds)):
                    to = pointer(out) + low * size
                    at = pointer(own) if rank == context.rank else to
                    if high > low:
                        nbytes = (high - low) * size
                        communicator.call("broadcast", at, to, nbytes, BYTES, rank, where)

    def gather(
        self,
        context: CollectiveContext,
        own: Array,
        out: Array | None,
        bounds: Sequence[int],
        root: int,
    ) -> None:
        """Bring every rank's ``own`` to ``out[bounds[rank]:bounds[rank + 1]]`` of the root."""
        if context.rank != root:
            sends, receives = [(root, own)], []
        else:
            assert out is not None
            parts = list(enumerate(pieces(out, bounds)))
            sends, receives = [], [(rank, part) for rank, part in parts if rank != root]
            copy(own, parts[root][1])
        self.exchange(context, sends, receives)

    def scatter(
        self,
        context: CollectiveContext,
        source: Array | None,
        own: Array,
        bounds: Sequence[int],
        root: int,
    ) -> None:
        """Bring ``source[bounds[rank]:bounds[rank + 1]]`` of the root to every rank's ``own``."""
        if context.rank != root:
            sends, receives = [], [(root, own)]
        else:
            assert source is not None
            parts = list(enumerate(pieces(source, bounds)))
            sends, receives = [(rank, part) for rank, part in parts if rank != root], []
            copy(parts[root][1], own)
        self.exchange(context, sends, receives)

    def all_to_all(
        self,
        context: CollectiveContext,
        source: Array,
        send_bounds: Sequence[int],
        out: Array,
        recv_bounds: Sequence[int],
    ) -> None:
        """Send ``source[send_bounds[r]:send_bounds[r + 1]]`` to each rank r, receive from each."""
        me = context.rank
        sends = list(enumerate(pieces(source, send_bounds)))
        receives = list(enumerate(pieces(out, recv_bounds)))
        copy(sends.pop(me)[1], receives.pop(me)[1])
        self.exchange(context, sends, receives)

    def exchange(
        self,
        context: CollectiveContext,
        sends: list[tuple[int, Array]],
        receives: list[tuple[int, Array]],
    ) -> None:
        """Send arrays to ranks and receive from ranks, all at once; empty ones not at all."""
        sends = [(rank, array) for rank, array in sends if array.size]
        receives = [(rank, array) for rank, array in receives if array.size]
        if not sends and not receives:
            return
        communicator, where = self.communicator(context), stream()
        with self._launches.group():
            for rank, array in sends:
                communicator.call("send", pointer(array), array.nbytes, BYTES, rank, where)
            for rank, array in receives:
                communicator.call("recv", pointer(array), array.nbytes, BYTES, rank, where)


class NativeCollectives(NcclCollectives):
    """Reductions by NCCL."""

    def all_reduce(
        self, context: CollectiveContext, source: Array, out: Array, reduction: Reduction
    ) -> None:
        """Reduce ``source`` of all ranks into ``out`` (may be ``source``) of all ranks."""
        if self._only_copies(context):
            copy(source, out)
        elif out.size:
            dtype, op, width = _kind(reduction)
            self.communicator(context).call(
                "allReduce", pointer(source), pointer(out), out.size * width, dtype, op, stream()
            )

    def reduce(
        self,
        context: CollectiveContext,
        source: Array,
        out: Array | None,
        root: int,
        reduction: Reduction,
    ) -> None:
        """Reduce ``source`` of all ranks into ``out`` (may be ``source``) of the root."""
        if self._only_copies(context):
            assert out is not None
            copy(source, out)
        elif source.size:
            dtype, op, width = _kind(reduction)
            at = pointer(source)
            to = at if out is None else pointer(out)
            self.communicator(context).call(
                "reduce", at, to, source.size * width, dtype, op, root, stream()
            )

    def reduce_scatter(
        self,
        context: CollectiveContext,
        source: Array,
        own: Array,
        bounds: Sequence[int],
        reduction: Reduction,
    ) -> None:
        """Reduce ``source``, of which each rank gets ``[bounds[rank]:bounds[rank + 1]]``."""
        if self._only_copies(context):
            copy(source, own)
            return
        dtype, op, width = _kind(reduction)
        if is_even(bounds):
            if own.size:
                self.communicator(context).call(
                    "reduceScatter", pointer(source), pointer(own), own.size * width, dtype, op,
                    stream(),
                )  # fmt: skip
            return
        communicator, where = self.communicator(context), stream()
        with self._launches.group():
            for rank, (low, high) in enumerate(itertools.pairwise(bounds)):
                at = pointer(source) + low * source.itemsize
                to = pointer(own) if rank == context.rank else at
                if high > low:
                    count = (high - low) * width
                    communicator.call("reduce", at, to, count, dtype, op, rank, where)


def _kind(reduction: Reduction) -> NcclReduction:
    kind = kind_of(reduction.dtype, reduction.name)
    assert kind is not None, "an algorithm is asked for what it supports"
    return kind


def stream() -> int:
    """The handle of the calling thread's current stream."""
    return int(cupy.cuda.get_current_stream().ptr)


def pointer(array: Array) -> int:
    """Where an array of a GPU begins."""
    return int(array.data.ptr)  # type: ignore[attr-defined]


def pieces(array: Array, bounds: Sequence[int]) -> list[Array]:
    """The parts of a flat array between bounds."""
    return [array[low:high] for low, high in itertools.pairwise(bounds)]


def copy(source: Array, target: Array) -> None:
    """Enqueue a copy between flat arrays of one GPU, which are the same or apart."""
    if source.size and pointer(source) != pointer(target):
        runtime.memcpyAsync(
            pointer(target), pointer(source), source.nbytes, runtime.memcpyDefault, stream()
        )


def is_even(bounds: Sequence[int]) -> bool:
    """Whether all parts between bounds have the same size."""
    size = bounds[1] - bounds[0]
    return all(high - low == size for low, high in itertools.pairwise(bounds))
