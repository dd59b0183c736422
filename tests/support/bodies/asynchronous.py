"""Bodies: collectives that return a ``Work``."""

from __future__ import annotations

import numpy as np
from support import oracle
from support.arrays import array_of, arrays_of, check_same
from support.spmd_job import meet

import fsdpcore as fc


def many_outstanding(backend: fc.Backend) -> None:
    """Dozens under way, of all sizes, waited for in another order, and twice."""
    me, p = backend.rank, backend.world_size
    works = []
    for number in range(24):
        parts = arrays_of(p, (1 + 997 * (number % 3), 2), salt=str(number))
        work = fc.all_reduce(parts[me].copy(), backend, async_op=True)
        assert isinstance(work, fc.Work)
        works.append((work, oracle.reduced(parts, "sum"), number))
    for work, expected, number in works[::-2] + works[::2]:
        result = work.wait()
        check_same(result, expected, f"number {number}")
        assert work.wait() is result
        assert work.wait(timeout=float("inf")) is result
        assert work.result() is result
        assert work.done()


def between_blocking_calls(backend: fc.Backend) -> None:
    """Blocking calls take their turn behind those that were started before."""
    me, p = backend.rank, backend.world_size
    works = []
    for number in range(10):
        parts = arrays_of(p, (50,), salt=str(number))
        expected = oracle.reduced(parts, "sum")
        if number % 3:
            work = fc.all_reduce(parts[me], backend, async_op=True)
            works.append((work, expected))
        else:
            check_same(fc.all_reduce(parts[me], backend), expected, f"blocking, {number}")
    for work, expected in works:
        check_same(work.wait(), expected, "started")


def every_collective(backend: fc.Backend) -> None:
    """All of them can be started; the result is what the blocking call returns."""
    me, p = backend.rank, backend.world_size
    parts = arrays_of(p, (2 * p, 3))
    mine = parts[me]
    total, joined = oracle.reduced(parts, "sum"), oracle.joined(parts)
    piece = oracle.pieces(total, p)[me]
    arriving = oracle.joined([oracle.pieces(part, p)[me] for part in parts])
    two = [2] * p
    at_root = me == p - 1
    started = [
        (fc.all_reduce(mine, backend, async_op=True), total),
        (fc.reduce_scatter(mine, backend, async_op=True), piece),
        (fc.all_gather(mine, backend, async_op=True), joined),
        (fc.broadcast(mine, backend, root=p - 1, async_op=True), parts[p - 1]),
        (fc.reduce(mine, backend, root=p - 1, async_op=True), total if at_root else None),
        (fc.gather(mine, backend, root=p - 1, async_op=True), joined if at_root else None),
        (fc.scatter(mine, backend, async_op=True), oracle.pieces(parts[0], p)[me]),
        (fc.all_to_all(mine, backend, async_op=True), arriving),
        (fc.all_gather_v(mine, backend, async_op=True), joined),
        (fc.reduce_scatter_v(mine, backend, two, async_op=True), piece),
        (fc.all_to_all_v(mine, backend, two, async_op=True), arriving),
        (fc.barrier(backend, async_op=True), None),
    ]
    for number, (work, expected) in enumerate(started):
        result = work.wait()
        if expected is None:
            assert result is None
        else:
            check_same(result, expected, f"number {number}")


def into_out(backend: fc.Backend) -> None:
    """With ``out``, in place too; the arrays are the caller's again after wait()."""
    me, p = backend.rank, backend.world_size
    room, mine = np.zeros((p, 4), np.float32), array_of(me, (4,))
    gather = fc.all_gather(mine[None], backend, out=room, async_op=True)
    assert gather.wait() is room
    check_same(room, np.stack(arrays_of(p, (4,))), "all_gather")
    work = fc.all_reduce(mine, backend, out=mine, async_op=True)
    assert work.wait() is mine
    check_same(mine, oracle.reduced(arrays_of(p, (4,)), "sum"), "all_reduce in place")
    mine[:] = 0
    assert work.wait() is mine
    check_same(mine, np.zeros(4, np.float32), "what was changed after wait()")


def not_done_before_all_came(backend: fc.Backend) -> None:
    """No rank gets past a barrier that one has not reached."""
    me, p = backend.rank, backend.world_size
    late = p - 1
    for group in (backend, backend.sub(range(p))):
        work = fc.barrier(group, async_op=True) if me != late else None
        meet()
        backend.clock.sleep(0.02)  # a barrier that does not wait would be done by then
        assert work is None or not work.done(), f"rank {me} did not wait for rank {late}"
        meet()
        if work is None:
            group.barrier()
        else:
            work.wait()
            assert work.done()
