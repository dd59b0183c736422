"""Bodies: deadlines, ranks that leave or fail, and what comes after the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from support.bodies.point_to_point import check_words, expect
from support.spmd_job import meet

import fsdpcore as fc

Call = Callable[[fc.Backend], Any]

# Time for every rank to begin a call after a meeting, with all cores busy.
PATIENCE = 2.0


def skipped_collective(backend: fc.Backend) -> None:
    """A rank that does not come is named, with the call, its number, and what it did last."""
    me, p = backend.rank, backend.world_size
    backend.barrier()
    fc.broadcast(np.ones(3), backend)
    meet()
    if me != p - 1:
        error = expect(fc.CommTimeoutError, fc.all_reduce, np.ones(5), backend, timeout=PATIENCE)
        check_words(error, "all_reduce #3", f"{PATIENCE:g} s", f"on rank {me}")
        check_words(error, f"rank {p - 1} is missing: finished broadcast #2")
        assert isinstance(error, TimeoutError)
        for rank in range(p - 1):
            assert f"rank {rank} is missing" not in str(error), str(error)
        assert str(expect(fc.CommTimeoutError, backend.barrier)) == str(error)
        assert str(expect(fc.CommTimeoutError, backend.sub([me]).barrier)) == str(error)
    meet()


def skipped_in_a_group(backend: fc.Backend) -> None:
    """In a group, the ranks are named by their numbers in the whole job, others left alone."""
    me, p = backend.rank, backend.world_size
    members = list(reversed(range(1, p)))
    if me == 0:
        meet()
        meet()
        return
    group = backend.sub(members)
    group.barrier()
    meet()
    if me != 1:
        error = expect(fc.CommTimeoutError, group.barrier, timeout=PATIENCE)
        check_words(error, "barrier #2", "rank 1 is missing: finished barrier #1", str(members))
        assert "rank 0 is missing" not in str(error)
    meet()


def started_and_skipped(backend: fc.Backend) -> None:
    """The deadline of a started collective holds without anybody waiting for it."""
    me, p = backend.rank, backend.world_size
    meet()
    if me != p - 1:
        work = fc.all_reduce(np.ones(5), backend, timeout=PATIENCE, async_op=True)
        error = expect(fc.CommTimeoutError, work.wait)
        check_words(error, "all_reduce #1", f"rank {p - 1} is missing: no collective so far")
        assert work.done()
    meet()


def timeout_then_failure(backend: fc.Backend) -> None:
    """A rank that fails because of a timeout takes the others with it, and says why."""
    me = backend.rank
    room = np.empty(1)
    meet()
    if me == 0:
        error = expect(fc.CommTimeoutError, backend.barrier, timeout=0.1)
        backend.abort(f"gave up: {type(error).__name__}")
    else:
        error = expect(fc.PeerFailedError, backend.recv, room, 0)
        check_words(error, "rank 0", "gave up: CommTimeoutError")
    meet()


def swallowed_failure(backend: fc.Backend) -> None:
    """A rank that catches its failure and leaves takes the others with it all the same."""
    meet()
    if backend.rank == 0:
        expect(fc.CommTimeoutError, backend.barrier, timeout=0.1)
        backend.close()
        meet()
    else:
        meet()
        error = expect(fc.PeerFailedError, backend.barrier)
        check_words(error, "rank 0 failed", "barrier #1", "timed out")
    meet()


CALLS_OF_A_LEAVER: dict[str, Call] = {
    "barrier": lambda b: b.barrier(),
    "all_reduce": lambda b: fc.all_reduce(np.ones(100_000), b, algorithm="direct"),
    "broadcast": lambda b: fc.broadcast(np.ones(3), b, root=b.world_size - 1),
    "started": lambda b: fc.all_reduce(np.ones(3), b, async_op=True).wait(),
    "recv": lambda b: b.recv(np.ones(3), b.world_size - 1),
    "send": lambda b: b.send(np.ones(100_000), b.world_size - 1),
}


def early_leaver(backend: fc.Backend, call: str) -> None:
    """A rank that leaves while others need it is named by all of them."""
    me, last = backend.rank, backend.world_size - 1
    meet()
    if me == last:
        backend.close()
    else:
        error = expect(fc.PeerFailedError, CALLS_OF_A_LEAVER[call], backend)
        check_words(error, f"rank {last}")
        assert error.rank == last
        assert str(expect(fc.PeerFailedError, backend.barrier)) == str(error)
    meet()


def left_before(backend: fc.Backend) -> None:
    """The same for calls that begin when the rank has left already, and what it sent is kept."""
    me, p = backend.rank, backend.world_size
    last = p - 1
    if me == last:
        for rank in range(last):
            backend.send(np.float32(rank), rank)
        backend.close()
        meet()
        meet()
    else:
        meet()
        room = backend.recv(np.empty((), np.float32), last)
        assert room == me
        meet()
        error = expect(fc.PeerFailedError, backend.recv, room, last)
        check_words(error, f"rank {last} has left")
        assert error.rank == last
        assert str(expect(fc.PeerFailedError, backend.barrier)) == str(error)
    meet()


def left_without_receiving(backend: fc.Backend) -> None:
    """Large messages to a rank that leaves fail when it does, not at their deadline."""
    me, last = backend.rank, backend.world_size - 1
    work = backend.isend(np.ones(200_000), last) if me != last else None
    meet()
    if work is None:
        backend.close()
    else:
        error = expect(fc.PeerFailedError, work.wait)
        check_words(error, f"rank {last} has left")
        assert error.rank == last
    meet()


def failed_send(backend: fc.Backend) -> None:
    """A send that has failed is received by nobody: its array is the caller's again."""
    room = np.zeros(200_000)
    if backend.rank == 0:
        data = np.ones(200_000)
        work = backend.isend(data, 1)
        expect(fc.CommTimeoutError, backend.barrier, timeout=0.1)  # which the others do not hear
        expect(fc.CommTimeoutError, work.wait)
        data[:] = 2
        meet()
    else:
        meet()
        expect(fc.CommTimeoutError, backend.recv, room, 0, timeout=0.2)
        assert not (room == 2).any(), "what was written after the failure has come"
    meet()


CALLS_BEFORE_AN_ABORT: dict[str, Call] = {
    "recv": lambda b: b.recv(np.empty(3), b.world_size - 1),
    "all_reduce": lambda b: fc.all_reduce(np.ones(3), b),
    "started": lambda b: fc.all_reduce(np.ones(3), b, async_op=True).wait(),
    "irecv": lambda b: b.irecv(np.empty(3), b.world_size - 1).wait(),
    "isend": lambda b: b.isend(np.ones(200_000), b.world_size - 1).wait(),
    "group": lambda b: b.sub(range(b.world_size)).barrier(),
}


def aborted(backend: fc.Backend, call: str) -> None:
    """The reason of an abort reaches what the peers are waiting in, and what they call later."""
    me, last = backend.rank, backend.world_size - 1
    reason = "out of memory in layer 7"
    meet()
    if me == last:
        backend.abort(reason)
        backend.abort("again")
        assert reason in str(expect(fc.CommunicationError, backend.barrier))
    else:
        error = expect(fc.PeerFailedError, CALLS_BEFORE_AN_ABORT[call], backend)
        check_words(error, f"rank {last}", reason)
        assert error.rank == last
        for later in (backend.barrier, lambda: backend.recv(np.empty(3), last)):
            assert str(expect(fc.PeerFailedError, later)) == str(error)
    meet()


def abort_of_a_group(backend: fc.Backend) -> None:
    """Aborting a group ends the job, for ranks outside of the group too."""
    me = backend.rank
    meet()
    if me == 0:
        backend.sub([0]).abort("no more")
    else:
        error = expect(fc.PeerFailedError, backend.recv, np.empty(1), 0)
        check_words(error, "rank 0", "no more")
    assert "no more" in str(expect(fc.CommunicationError, backend.barrier))
    meet()


def raised_in_a_block(backend: fc.Backend) -> None:
    """An exception that leaves a with block aborts the job with its type and message."""
    me, p = backend.rank, backend.world_size
    meet()
    if me == p - 1:
        expect(KeyError, _fail_in_a_block, backend)
    else:
        error = expect(fc.PeerFailedError, backend.barrier)
        check_words(error, f"rank {p - 1}", "KeyError", "layer")
        assert error.rank == p - 1
    meet()


def _fail_in_a_block(backend: fc.Backend) -> None:
    with backend:
        raise KeyError("layer")


def after_close(backend: fc.Backend) -> None:
    """Closing twice is fine; every later call says that the backend was closed."""
    me, p = backend.rank, backend.world_size
    group, peer, ones = backend.sub(range(p)), (me + 1) % p, np.ones(3)
    last_word = fc.all_reduce(ones, backend, async_op=True)
    backend.close()
    backend.close()
    assert last_word.wait()[0] == p, "close() did not wait for what was started"
    calls: list[Callable[[], Any]] = [
        backend.barrier,
        lambda: fc.all_reduce(ones, backend),
        lambda: fc.all_reduce(ones, backend, async_op=True),
        group.barrier,
    ]
    if p > 1:
        calls += [
            lambda: backend.send(ones, peer),
            lambda: backend.recv(ones, peer),
            lambda: backend.isend(ones, peer),
            lambda: group.irecv(ones, peer),
        ]
    for call in calls:
        check_words(expect(fc.ClosedError, call), f"rank {me}", "closed")
    backend.abort("too late to matter")
    group.close()
    meet()


def left_at_different_times(backend: fc.Backend) -> None:
    """Ranks that are done may close while others still have messages of theirs to take."""
    me, p = backend.rank, backend.world_size
    for rank in range(p):
        if rank != me:
            backend.isend(np.full(50, me), rank)
    fc.all_reduce(np.ones(3), backend)
    if me % 2:
        backend.close()
    meet()
    if me % 2 == 0:
        for rank in range(p):
            if rank != me:
                assert (backend.recv(np.empty(50, np.int64), rank) == rank).all()
    meet()
