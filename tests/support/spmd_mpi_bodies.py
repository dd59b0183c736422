"""Bodies: MPI's own collectives, the algorithm ``native`` of the mpi transport."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
from support import oracle
from support.arrays import Array, array_of, arrays_of, check_close, check_same
from support.bodies.point_to_point import check_words, expect
from support.spmd_job import meet

import fsdpcore as fc
from fsdpcore.collectives.state import state_of
from fsdpcore.core.reductions import Reduction

NATIVE = "native"
SOON = 20.0
# What MPI does to the values that are promised; for all else it must not be asked.
SHAPES = [(12,), (13, 2), (1,), (0,), (5, 0), (24, 3)]


def _compare(actual: Any, expected: Array, what: str, ranks: int) -> None:
    if expected.dtype.kind in "biu":
        check_same(actual, expected, what)
    else:
        check_close(actual, expected, what, terms=2 * ranks)


def reductions(backend: fc.Backend) -> None:
    """Every dtype and operation, in every collective; what MPI would get wrong is refused."""
    me, p = backend.rank, backend.world_size
    for (dtype, op), shape in itertools.product(oracle.COMBINATIONS, SHAPES[:2]):
        what = f"{op} of {dtype} {shape}"
        parts = arrays_of(p, shape, dtype, salt=op)
        if op == "prod" and dtype.kind in "fc":
            parts = [
                np.asarray(1 + 0.1 * np.tanh(part.astype(dtype))).astype(dtype) for part in parts
            ]
        expected = oracle.reduced(parts, op)
        keywords = {"op": op, "algorithm": NATIVE}
        half = dtype in oracle.HALVES
        loses_nan = op in ("min", "max") and dtype.kind == "f"
        saturates = op in ("sum", "prod") and dtype.kind in "iu" and dtype.itemsize <= 2
        if half or loses_nan or saturates or (op == "prod" and dtype.kind == "c"):
            for call in (fc.all_reduce, fc.reduce_scatter, fc.reduce):
                check_words(expect(fc.ArgumentError, call, parts[me], backend, **keywords), NATIVE)
            check_same(fc.all_reduce(parts[me], backend, op=op), expected, f"auto {what}")
            continue
        _compare(fc.all_reduce(parts[me], backend, **keywords), expected, what, p)
        mine = oracle.pieces(expected, p)[me]
        _compare(fc.reduce_scatter(parts[me], backend, **keywords), mine, what, p)
        for root in (0, p - 1):
            total = fc.reduce(parts[me], backend, root=root, **keywords)
            if me == root:
                _compare(total, expected, what, p)
            else:
                assert total is None


def movement(backend: fc.Backend) -> None:
    """Every dtype, in shapes that divide by the ranks and in others, to the bit."""
    me, p = backend.rank, backend.world_size
    for dtype, shape in itertools.product(oracle.DTYPES, SHAPES):
        what = f"{dtype} {shape}"
        parts = arrays_of(p, shape, dtype)
        own, whole = parts[me], oracle.joined(parts)
        check_same(fc.all_gather(own, backend, algorithm=NATIVE), whole, what)
        arriving = oracle.joined([oracle.pieces(part, p)[me] for part in parts])
        check_same(fc.all_to_all(own, backend, algorithm=NATIVE), arriving, what)
        for root in {0, p - 1}:
            keywords: dict[str, Any] = {"root": root, "algorithm": NATIVE}
            check_same(fc.broadcast(own, backend, **keywords), parts[root], what)
            mine = oracle.pieces(parts[root], p)[me]
            check_same(fc.scatter(own if me == root else None, backend, **keywords), mine, what)
            joined = fc.gather(own, backend, **keywords)
            if me == root:
                check_same(joined, whole, what)
            else:
                assert joined is None


class _Apart:
    """A communicator of MPI that takes no two buffers of a call that overlap, as MPI demands.

    What happens otherwise is up to the MPI library; Open MPI may well do what was meant.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._comm, name)

        def checked(*args: Any) -> Any:
            arrays = [arg[0] for arg in args if isinstance(arg, list)]
            for one, other in itertools.combinations(arrays, 2):
                assert not np.may_share_memory(one, other), f"the buffers of {name} overlap"
            return call(*args)

        return checked


def in_place(backend: fc.Backend) -> None:
    """With ``out`` being the input, or the part of it that is this rank's."""
    from fsdpcore.transports.mpi.native import MpiCollectives

    enter = MpiCollectives.__enter__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MpiCollectives, "__enter__", lambda self: _Apart(enter(self)))
        _in_place(backend)


def _in_place(backend: fc.Backend) -> None:
    me, p = backend.rank, backend.world_size
    parts = arrays_of(p, (3 * p, 2))
    total, rows = oracle.reduced(parts, "sum"), slice(3 * me, 3 * me + 3)
    data = parts[me].copy()
    assert fc.all_reduce(data, backend, out=data, algorithm=NATIVE) is data
    _compare(data, total, "all_reduce", p)
    data = parts[me].copy()
    fc.reduce_scatter(data, backend, out=data[rows], algorithm=NATIVE)
    _compare(data[rows], total[rows], "reduce_scatter", p)
    data = parts[me].copy()
    fc.reduce(data, backend, root=p - 1, out=data, algorithm=NATIVE)
    _compare(data, total if me == p - 1 else parts[me], "reduce", p)
    data = np.zeros((3 * p, 2), np.float32)
    data[rows] = parts[me][rows]
    fc.all_gather(data[rows], backend, out=data, algorithm=NATIVE)
    gathered = np.concatenate([part[3 * r : 3 * r + 3] for r, part in enumerate(parts)])
    check_same(data, gathered, "all_gather")
    data = np.zeros((3 * p, 2), np.float32)
    data[rows] = parts[me][rows]
    fc.gather(data[rows], backend, root=0, out=data if me == 0 else None, algorithm=NATIVE)
    check_same(data[rows], parts[me][rows], "the part that was gathered")
    if me == 0:
        check_same(data, gathered, "gather")
    data = parts[me].copy()
    fc.scatter(data if me == 0 else None, backend, out=data[rows], algorithm=NATIVE)
    check_same(data[rows], parts[0][rows], "scatter")


def without_a_copy(backend: fc.Backend) -> None:
    """MPI reduces from one array into another, and leaves the first as it is."""
    me, p = backend.rank, backend.world_size
    algorithm = state_of(backend).own_algorithms["all_reduce"][NATIVE].module
    all_reduce = algorithm.all_reduce  # type: ignore[attr-defined]
    for op, dtype in (("sum", np.int64), ("mean", np.float32), ("min", np.float16)):
        parts = arrays_of(p, (70,), dtype)
        source, out = parts[me].copy(), np.zeros(70, dtype)
        fc.barrier(backend)
        link = state_of(backend).context
        assert link is not None
        all_reduce(link, source, out, Reduction.of(op, source.dtype))
        _compare(out, oracle.reduced(parts, op), op, p)
        check_same(source, parts[me], "the input")


def ragged(backend: fc.Backend) -> None:
    """Parts of any size, none at all too."""
    me, p = backend.rank, backend.world_size
    counts = [(5 * rank) % 4 for rank in range(p)]
    parts = [array_of(rank, (counts[rank], 3)) for rank in range(p)]
    got = fc.all_gather_v(parts[me], backend, algorithm=NATIVE)
    check_same(got, oracle.joined(parts), "all_gather_v")
    whole = arrays_of(p, (sum(counts), 2))
    start = sum(counts[:me])
    mine = oracle.reduced(whole, "sum")[start : start + counts[me]]
    _compare(fc.reduce_scatter_v(whole[me], backend, counts, algorithm=NATIVE), mine, "ragged", p)
    table = [[(src + 2 * dst) % 3 for dst in range(p)] for src in range(p)]
    sources = [array_of(rank, (sum(table[rank]), 2)) for rank in range(p)]
    got = fc.all_to_all_v(sources[me], backend, table[me], algorithm=NATIVE)
    check_same(got, oracle.exchanged(sources, table, me), "all_to_all_v")


def groups_at_once(backend: fc.Backend) -> None:
    """Operations of crossing groups, started in different orders on different ranks."""
    me, p = backend.rank, backend.world_size
    members = [
        list(range(p)),
        list(reversed(range(p))),
        *([r, (r + 1) % p] for r in range(p) if p > 1),
    ]
    groups = {i: backend.sub(ranks) for i, ranks in enumerate(members) if me in ranks}
    for number in range(3):
        works = []
        # The order in which a rank makes the communicators, and uses them, is its own.
        for i in sorted(groups, key=lambda i: (i * (me + 1) + number) % 7):
            ranks, group = members[i], groups[i]
            parts = [array_of(rank, (50,), np.int64, salt=f"{i}/{number}") for rank in ranks]
            work = fc.all_reduce(parts[group.rank], group, algorithm=NATIVE, async_op=True)
            works.append((work, oracle.reduced(parts, "sum"), f"{ranks}, number {number}"))
        parts = [array_of(rank, (50,), np.int64, salt=str(number)) for rank in range(p)]
        got = fc.all_reduce(parts[me], backend, algorithm=NATIVE)
        check_same(got, oracle.reduced(parts, "sum"), "all ranks")
        for work, expected, what in works:
            check_same(work.wait(), expected, what)


def training(backend: fc.Backend) -> None:
    """Two steps of an engine whose collectives are MPI's own, in all groups of a strategy."""
    full, hybrid = fc.Strategy("full_shard"), fc.Strategy("hybrid_shard", shard_group_size=2)
    for strategy in [full, hybrid][: 1 if backend.world_size % 2 else 2]:
        found = [_trained(backend, strategy, algorithm) for algorithm in ("direct", NATIVE)]
        check_close(found[1], found[0], f"{strategy}", terms=2 * backend.world_size)
    if backend.world_size > 1:
        moved = [e for e in backend.root.recorder.entries() if "unit u" in e.call.label]
        assert {e.call.operation for e in moved} >= {"all_gather", "reduce_scatter"}
        assert moved[-1].carrier == NATIVE


def _trained(backend: fc.Backend, strategy: fc.Strategy, algorithm: str) -> Array:
    unit = fc.Unit("u", {"w": array_of(0, (13, 5))})
    sgd = fc.optim.SGD(lr=0.1)
    engine = fc.FSDP(
        [unit], backend, strategy=strategy, optimizer=sgd, algorithm=algorithm, window=False
    )
    for _ in range(2):
        with engine.step() as step:
            with step.forward(unit):
                pass
            with step.backward(unit) as (params, grads):
                grads["w"] = (backend.rank + 1) * params["w"]
            step.update(clip=1.0)
    with engine.full_params() as params:
        trained: Array = params["u.w"].copy()
    engine.close()
    return trained


def advances_by_itself(backend: fc.Backend) -> None:
    """Long messages arrive while nobody waits for them, and both sides compute."""
    me, p = backend.rank, backend.world_size
    if p == 1:
        return
    parts = arrays_of(p, (2_000_000,))
    room = np.empty_like(parts[0])
    works = [backend.irecv(room, (me - 1) % p), backend.isend(parts[me], (me + 1) % p)]
    total = fc.all_reduce(np.ones(3), backend, async_op=True)
    end = time.monotonic() + 20
    while not all(work.done() for work in (*works, total)) and time.monotonic() < end:
        sum(range(1000))
    assert all(work.done() for work in (*works, total)), "nothing moves unless it is waited for"
    check_same(room, parts[(me - 1) % p], "the message")
    check_same(total.wait(), np.full(3, float(p)), "the collective")


def in_pieces(backend: fc.Backend) -> None:
    """Messages and collectives of more bytes than MPI is given at once."""
    from fsdpcore.transports.mpi import engine, native

    me, p = backend.rank, backend.world_size
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((engine, "_PIECE"), (native, "PIECE")):
            patch.setattr(module, name, 50_000)
        for number, size in enumerate((50_001, 3_000_000, 100_000)):
            parts = arrays_of(p, (size,), np.uint8, salt=str(number))
            works = [backend.isend(parts[me], dst) for dst in range(p) if dst != me]
            for src in range(p):
                if src != me:
                    got = backend.recv(np.zeros(size, np.uint8), src)
                    check_same(got, parts[src], f"a message of {size} bytes")
            for work in works:
                work.wait()
        parts = arrays_of(p, (70_000,), np.int64)
        total, keywords = oracle.reduced(parts, "sum"), {"algorithm": NATIVE}
        check_same(fc.all_reduce(parts[me], backend, **keywords), total, "all_reduce")
        mine = oracle.pieces(total, p)[me]
        check_same(fc.reduce_scatter(parts[me], backend, **keywords), mine, "reduce_scatter")
        check_same(fc.broadcast(parts[me], backend, **keywords), parts[0], "broadcast")
        arriving = oracle.joined([oracle.pieces(part, p)[me] for part in parts])
        check_same(fc.all_to_all(parts[me], backend, **keywords), arriving, "all_to_all")
        whole = oracle.joined(parts)
        check_same(fc.all_gather(parts[me], backend, **keywords), whole, "all_gather")


def late_data(backend: Any) -> None:
    """What a peer sends of a message after its receive has failed does not reach the array."""
    engine, progress = backend.engine, backend.progress_thread
    room = np.zeros(2000, np.uint8)
    if backend.rank == 0:
        meet()
        work = backend.irecv(room, 1)
        granted = lambda: any(each.pending is work._pending for each in engine._transfers)  # noqa: E731
        assert progress.until(granted, SOON), "the message is not offered"
        backend.abort("enough")
        expect(fc.CommunicationError, work.wait)
        meet()
        meet()  # the data is on its way
        progress.until(room.any, 0.5)
        assert not room.any()
    else:
        backend.isend(np.ones(2000, np.uint8), 0)
        with engine.lock:  # who holds it sees no grant
            meet()
            meet()
        assert progress.until(lambda: backend.failure, SOON)  # it has seen the grant before
        meet()
    meet()


def large(backend: fc.Backend) -> None:
    """More bytes than 31 bits can count, which MPI takes in pieces."""
    me, p = backend.rank, backend.world_size
    size = 2**31 + 11
    data = np.full(size, me + 1, np.uint8)
    fc.all_reduce(data, backend, op="max", out=data, algorithm=NATIVE)
    assert int(data[0]) == int(data[-1]) == p
    assert (data == data[0]).all()
    data[-1] = 200 + me
    fc.broadcast(data, backend, out=data, root=p - 1, algorithm=NATIVE)
    assert int(data[-1]) == 200 + p - 1
    del data
    joined = fc.all_gather(np.full(2**30 + 7, me, np.uint8), backend, algorithm=NATIVE)
    assert joined.size == p * (2**30 + 7)
    assert int(joined[-1]) == p - 1
    assert int(np.count_nonzero(joined == 0)) == 2**30 + 7
