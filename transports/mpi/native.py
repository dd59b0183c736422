"""MPI's own collectives as algorithms named ``native``.

Most block inside MPI, out of reach of deadlines; but all ranks of the group have agreed on the
call before it, so that only a rank that dies in the middle keeps the others. MPI's launcher then
ends the job. Should that not happen, ``guard.py`` does when the deadline has passed, or soon after
a failure has become known. Where a rank may still find something wrong after the agreement (its
``out``, its counts), the call does not block inside MPI: scatter, gather, all_to_all.

MPI reduces in an order of its own choice. It is not asked to where it would give other values than
the rest of this library: float16 and bfloat16 (rounded at every step), minima and maxima of floats
(which lose NaN), products of complex numbers, and sums and products of integers of 8 and 16 bits
(Open MPI's vector code saturates some of them instead of wrapping around).

The costs at the end were measured with Open MPI 5 on one host.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from fsdpcore.collectives.algorithms import direct, star
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.comm.backend import Backend
from fsdpcore.core.algorithm import Algorithm, Comparison, CostTerms
from fsdpcore.core.buffers import BFLOAT16, Array
from fsdpcore.core.errors import CommTimeoutError
from fsdpcore.core.reductions import ReduceOp, Reduction
from fsdpcore.core.text import rank_list

from .library import MPI, PROCESS
from .transport import MpiTransport

# MPI counts with 31 bits. Reductions and broadcasts go in pieces of half a GiB; the others, whose
# positions are counted too, are left to our own algorithms from there on.
PIECE = 1 << 29
_TAG = 0  # of messages within a collective; the communicator of the whole job has others

_SPINS = 100

_KINDS: dict[np.dtype[Any], MPI.Datatype] = {
    np.dtype(np.bool_): MPI.UINT8_T,
    np.dtype(np.int8): MPI.INT8_T,
    np.dtype(np.uint8): MPI.UINT8_T,
    np.dtype(np.int16): MPI.INT16_T,
    np.dtype(np.uint16): MPI.UINT16_T,
    np.dtype(np.int32): MPI.INT32_T,
    np.dtype(np.uint32): MPI.UINT32_T,
    np.dtype(np.int64): MPI.INT64_T,
    np.dtype(np.uint64): MPI.UINT64_T,
    np.dtype(np.float32): MPI.FLOAT,
    np.dtype(np.float64): MPI.DOUBLE,
    np.dtype(np.complex64): MPI.FLOAT,  # both parts by themselves: sums and means only
    np.dtype(np.complex128): MPI.DOUBLE,
}
_SUM, _MEAN, _PROD = ReduceOp.SUM.value, ReduceOp.MEAN.value, ReduceOp.PROD.value
_OPS: dict[str, MPI.Op] = {
    _SUM: MPI.SUM,
    _MEAN: MPI.SUM,
    _PROD: MPI.PROD,
    ReduceOp.MIN.value: MPI.MIN,
    ReduceOp.MAX.value: MPI.MAX,
    ReduceOp.BAND.value: MPI.BAND,
    ReduceOp.BOR.value: MPI.BOR,
    ReduceOp.BXOR.value: MPI.BXOR,
}
# Bool is bytes that are 0 or 1: on these the logical ops are those of bits, and minima and maxima.
_BOOL_OPS = {
    **_OPS,
    _SUM: MPI.MAX,
    _PROD: MPI.MIN,
    ReduceOp.LAND.value: MPI.BAND,
    ReduceOp.LOR.value: MPI.BOR,
    ReduceOp.LXOR.value: MPI.BXOR,
}


def reduces(dtype: np.dtype[Any] | None, op: str) -> bool:
    """Whether MPI reduces ``dtype`` by ``op`` to the values that this library promises."""
    if dtype is None:
        return True  # not known yet; what is not supported is then left to our own algorithms
    if dtype.kind == "b":
        return op in _BOOL_OPS and op != _MEAN
    if dtype not in _KINDS or op not in _OPS:
        return False
    if dtype.kind in "iu":
        return op not in (_SUM, _PROD, _MEAN) or (dtype.itemsize > 2 and op != _MEAN)
    return op in (_SUM, _MEAN) or (op == _PROD and dtype.kind == "f")


class MpiCollectives:
    """The collectives of one group, with the signatures of those in ``collectives``.

    A group runs one collective at a time. While it is inside MPI the guard watches it: the block
    ``with self._calling(context) as comm``.

    The communicator of a group that is not the whole job is made by the first call, on all
    members of the group and nobody else; groups of equal members get one each, so that their
    calls may be under way at the same time.
    """

    def __init__(self, transport: MpiTransport, group: Backend) -> None:
        self._transport = transport
        self.ranks = group.ranks
        self._bound: tuple[Reduction | None, tuple[MPI.Datatype, MPI.Op] | None] = (None, None)
        self._channel = group.channel
        whole = group is transport
        self._comm: MPI.Intracomm | None = transport.comm if whole else None

    def _calling(self, context: CollectiveContext) -> MpiCollectives:
        """Have the guard watch a call, for the block that is entered next."""
        self._transport.guard.calls[self] = context
        return self

    def __enter__(self) -> MPI.Intracomm:
        try:
            if self._comm is None:
                self._comm = self._create()
        except BaseException:
            del self._transport.guard.calls[self]
            raise
        return self._comm

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del self._transport.guard.calls[self]

    def _create(self) -> MPI.Intracomm:
        world = self._transport.comm
        highest = int(world.Get_attr(MPI.TAG_UB) or 32767)
        members = world.Get_group().Incl(list(self.ranks))
        # The tag keeps groups apart that other threads make at the same time.
        comm = world.Create_group(members, (self._channel >> 1) % highest)
        members.Free()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        return comm

    def _complete(
        self, context: CollectiveContext, requests: list[MPI.Request], memory: Any
    ) -> None:
        """Wait for requests outside of MPI, where deadlines and failures are seen."""
        spins = 0
        try:
            while not MPI.Request.Testall(requests):
                spins += 1
                if spins > _SPINS:
                    os.sched_yield()
                    self._transport.progress()
                    self._transport.check_usable()
                if not context.remaining():
                    raise CommTimeoutError(
                        f"{context.name} on ranks {rank_list(self.ranks)} timed out inside MPI on "
                        f"rank {self._transport.rank}: a rank is stopped or lost"
                    )
        except BaseException:
            # MPI cannot be made to forget them: what they use must not go away.
            PROCESS.kept.append((requests, memory))
            raise

    # Reductions.

    def _binding(self, reduction: Reduction) -> tuple[MPI.Datatype, MPI.Op] | None:
        """MPI's names for a reduction; None where it is left to our own algorithms."""
        if reduction is self._bound[0]:  # calls that are remembered bring the same one
            return self._bound[1]
        binding = None
        if len(self.ranks) > 1 and reduces(reduction.dtype, reduction.name):
            ops = _BOOL_OPS if reduction.dtype.kind == "b" else _OPS
            binding = _KINDS[reduction.dtype], ops[reduction.name]
        self._bound = reduction, binding
        return binding

    def all_reduce(
        self, context: CollectiveContext, source: Array, out: Array, reduction: Reduction
    ) -> None:
        """Reduce ``source`` of all ranks into ``out`` (may be ``source``) of all ranks."""
        binding = self._binding(reduction)
        if binding is None:
            return direct.all_reduce(context, source, out, reduction)
        kind, op = binding
        in_place = np.may_share_memory(source, out)
        with self._calling(context) as comm:
            for piece, room in zip(_pieces(source), _pieces(out), strict=True):
                given = MPI.IN_PLACE if in_place else _buffer(piece, kind)
                comm.Allreduce(given, _buffer(room, kind), op)
        return _finish(out, reduction, context.size)

    def reduce(
        self,
        context: CollectiveContext,
        source: Array,
        out: Array | None,
        root: int,
        reduction: Reduction,
    ) -> None:
        """Reduce ``source`` of all ranks into ``out`` (may be ``source``) of the root."""
        binding = self._binding(reduction)
        if binding is None:
            return star.reduce(context, source, out, root, reduction)
        kind, op = binding
        with self._calling(context) as comm:
            if context.rank != root:
                for piece in _pieces(source):
                    comm.Reduce(_buffer(piece, kind), None, op, root)
                return None
            assert out is not None
            for piece, room in zip(_pieces(source), _pieces(out), strict=True):
                in_place = np.may_share_memory(piece, room)
                sending = MPI.IN_PLACE if in_place else _buffer(piece, kind)
                comm.Reduce(sending, _buffer(room, kind), op, root)
        return _finish(out, reduction, context.size)

    def reduce_scatter(
        self,
        context: CollectiveContext,
        source: Array,
        own: Array,
        bounds: Sequence[int],
        reduction: Reduction,
    ) -> None:
        """Reduce ``source``, of which each rank gets ``[bounds[rank]:bounds[rank + 1]]``."""
        binding = self._binding(reduction)
        if binding is None or source.nbytes > PIECE:
            return direct.reduce_scatter(context, source, own, bounds, reduction)
        kind, op = binding
        room = np.empty_like(own) if np.may_share_memory(source, own) else own
        counts = _counts(bounds, _width(source, kind))
        with self._calling(context) as comm:
            receiving = _buffer(room, kind)
            if _equal(counts):
                comm.Reduce_scatter_block(_buffer(source, kind, counts[0]), receiving, op)
            else:
                comm.Reduce_scatter(_buffer(source, kind), receiving, counts, op)
        _finish(room, reduction, context.size)
        if room is not own:
            np.copyto(own, room)
        return None

    # Movement, of bytes.

    def broadcast(self, context: CollectiveContext, data: Array, root: int) -> None:
        """Copy ``data`` of the root into ``data`` of all ranks."""
        if context.size == 1:
            return
        with self._calling(context) as comm:
            for piece in _pieces(data):
                comm.Bcast(_buffer(piece), root)

    def all_gather(
        self, context: CollectiveContext, own: Array, out: Array, bounds: Sequence[int]
    ) -> None:
        """Bring every rank's ``own`` to ``out[bounds[rank]:bounds[rank + 1]]`` of all ranks."""
        if context.size == 1 or out.nbytes > PIECE:
            return direct.all_gather(context, own, out, bounds)
        counts = _counts(bounds, out.itemsize)
        sending = MPI.IN_PLACE if np.may_share_memory(own, out) else _buffer(own)
        with self._calling(context) as comm:
            if _equal(counts):
                comm.Allgather(sending, _buffer(out, count=counts[0]))
            else:
                comm.Allgatherv(sending, _parts(out, counts))
        return None

    def gather(
        self,
        context: CollectiveContext,
        own: Array,
        out: Array | None,
        bounds: Sequence[int],
        root: int,
    ) -> None:
        """Bring every rank's ``own`` to ``out[bounds[rank]:bounds[rank + 1]]`` of the root."""
        if context.size == 1 or bounds[-1] * own.itemsize > PIECE:
            return star.gather(context, own, out, bounds, root)
        counts = _counts(bounds, own.itemsize)
        sending: Any = _buffer(own)
        if out is not None and np.may_share_memory(own, out):
            sending = MPI.IN_PLACE
        with self._calling(context) as comm:
            if _equal(counts):
                receiving = None if out is None else _buffer(out, count=counts[0])
                request = comm.Igather(sending, receiving, root)
            else:
                request = comm.Igatherv(sending, None if out is None else _parts(out, counts), root)
            self._complete(context, [request], (own, out))
        return None

    def scatter(
        self,
        context: CollectiveContext,
        source: Array | None,
        own: Array,
        bounds: Sequence[int],
        root: int,
    ) -> None:
        """Bring ``source[bounds[rank]:bounds[rank + 1]]`` of the root to every rank's ``own``."""
        if context.size == 1 or bounds[-1] * own.itemsize > PIECE:
            return star.scatter(context, source, own, bounds, root)
        counts = _counts(bounds, own.itemsize)
        receiving: Any = _buffer(own)
        if source is not None and np.may_share_memory(source, own):
            receiving = MPI.IN_PLACE
        with self._calling(context) as comm:
            if _equal(counts):
                sending = None if source is None else _buffer(source, count=counts[0])
                request = comm.Iscatter(sending, receiving, root)
            else:
                parts = None if source is None else _parts(source, counts)
                request = comm.Iscatterv(parts, receiving, root)
            self._complete(context, [request], (source, own))
        return None

    def all_to_all(
        self,
        context: CollectiveContext,
        source: Array,
        send_bounds: Sequence[int],
        out: Array,
        recv_bounds: Sequence[int],
    ) -> None:
        """Send ``source[send_bounds[r]:send_bounds[r + 1]]`` to each rank r, receive from each.

        In the ragged form no rank knows all sizes, on which MPI's own forms would depend, and
        positions beyond 2 GiB are nothing to them. So these are MPI's messages, all at once.
        """
        me, p = context.rank, context.size
        own = slice(send_bounds[me], send_bounds[me + 1])
        np.copyto(out[recv_bounds[me] : recv_bounds[me + 1]], source[own])
        if p == 1:
            return
        with self._calling(context) as comm:
            requests = []
            for step in range(1, p):
                peer = (me - step) % p
                for piece in _pieces(out[recv_bounds[peer] : recv_bounds[peer + 1]]):
                    requests.append(comm.Irecv(_buffer(piece), peer, _TAG))
            for step in range(1, p):
                peer = (me + step) % p
                for piece in _pieces(source[send_bounds[peer] : send_bounds[peer + 1]]):
                    requests.append(comm.Isend(_buffer(piece), peer, _TAG))
            self._complete(context, requests, (source, out))


def _finish(out: Array, reduction: Reduction, count: int) -> None:
    """Divide for a mean, as our own algorithms do."""
    if reduction.op is ReduceOp.MEAN:
        reduction.store(out, out, count)


def _buffer(array: Array, kind: MPI.Datatype = MPI.BYTE, count: int | None = None) -> list[Any]:
    """A flat array as mpi4py takes it, in elements of ``kind`` (bytes by default)."""
    if array.dtype == BFLOAT16:  # which no C program knows
        array = array.view(np.uint8)
    return [array, array.nbytes // kind.size if count is None else count, kind]


def _parts(array: Array, counts: Sequence[int]) -> list[Any]:
    """A flat array in parts of so many bytes."""
    starts = [0, *itertools.accumulate(counts)][:-1]
    return [array.view(np.uint8), (counts, starts), MPI.BYTE]


def _pieces(array: Array) -> list[Array]:
    if array.nbytes <= PIECE:
        return [array]
    step = PIECE // array.itemsize
    return [array[at : at + step] for at in range(0, array.size, step)]


def _width(array: Array, kind: MPI.Datatype) -> int:
    """How many values of ``kind`` make one element."""
    return array.itemsize // int(kind.size)


def _counts(bounds: Sequence[int], scale: int) -> list[int]:
    return [(high - low) * scale for low, high in itertools.pairwise(bounds)]


def _equal(counts: Sequence[int]) -> bool:
    return counts.count(counts[0]) == len(counts)


_MOVES = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")
_REDUCES = ("all_reduce", "reduce_scatter", "reduce")


def native_algorithms(
    transport: MpiTransport, group: Backend
) -> Mapping[str, Mapping[str, Algorithm]]:
    """Return MPI's collectives for a group, in the form of ``Transport.algorithms``."""
    native = MpiCollectives(transport, group)
    table: dict[str, dict[str, Algorithm]] = {}
    for name in _REDUCES:
        table[name] = {"native": _algorithm(native, _COSTS[name], False, reduces)}
    for name in _MOVES:
        table[name] = {"native": _algorithm(native, _COSTS[name])}
    return table


_algorithm = partial(Algorithm, comparison=Comparison.NOT_AT_ALL)


def _split(beta: float, gamma: float = 0.0) -> Callable[[int], CostTerms]:
    """The cost where every rank handles (p - 1) / p of the data ``beta`` times."""

    def cost(p: int) -> CostTerms:
        share = (p - 1) / p
        depth = (p - 1).bit_length()  # the ranks meet before, by as many trips
        return CostTerms(_ALPHA * depth, beta * share, gamma * share, 2 * depth)

    return cost


# A message inside MPI costs a fraction of one through Python. For long arrays, Open MPI copies
# more often than our own algorithms do: in reduce_scatter by far.
_ALPHA = 0.2
_COSTS: dict[str, Callable[[int], CostTerms]] = {
    "all_reduce": _split(3, 1),
    "reduce_scatter": _split(8, 1),
    "all_gather": _split(1.5),
    "broadcast": lambda p: _split(0)(p)._replace(beta=1.4 * (p - 1).bit_length()),
    "reduce": _split(3, 1),
    "gather": _split(1),
    "scatter": _split(1),
    "all_to_all": lambda p: _split(1)(p)._replace(alpha=0.3 * (p - 1)),
}
