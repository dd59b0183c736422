"""Deadlocks on purpose: every one is reported within its deadline, with the culprit named."""

from __future__ import annotations

import contextvars
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bodies.point_to_point import check_words, expect
from support.cases import NOT_MPI, bodies, jobs
from support.spmd import meet, run

import fsdpcore as fc
from fsdpcore.core.clock import WALL
from fsdpcore.diagnostics.status import Status

# Nearly all of the time they wait.
pytestmark = pytest.mark.side_by_side(16)
# Time for every rank to begin a call after a meeting, with all cores busy.
PATIENCE = 1.0
MODULE = re.escape(Path(__file__).name)
ONES = np.ones(3)


def _times_out(call: Any, *args: Any, **options: Any) -> str:
    """The message of a call that has to end in a timeout, in time."""
    begin = time.monotonic()
    error = expect(fc.CommTimeoutError, call, *args, timeout=PATIENCE, **options)
    assert time.monotonic() - begin < PATIENCE + 15, "far beyond the deadline"
    return str(error)


def _check(message: str, *words: str) -> None:
    for word in words:
        assert word in message, f"{word!r} is not in:\n{message}"


def _check_stuck(message: str, rank: int, operation: str) -> None:
    """The message says that a rank is in an operation; that may just have timed out as well."""
    found = (f"rank {rank} is missing: {verb} {operation}" for verb in ("in", "failed in"))
    assert any(text in message for text in found), message


# Collectives of one group.


def skipped_by_one(backend: fc.Backend) -> None:
    fc.broadcast(ONES, backend)
    meet()
    if backend.rank != 1:
        message = _times_out(fc.all_reduce, ONES, backend)
        _check(message, "all_reduce #2", "rank 1 is missing: finished broadcast #1 of all ranks")
        _check(message, "busy elsewhere since")
        assert message.count("is missing") == 1
        assert "likely cause" not in message, "nothing is known but that it has not come"
        inner, outer = (rf"faults/{MODULE}:\d+ in {name}" for name in ("_naps", "skipped_by_one"))
        if backend.root.clock is WALL:  # in virtual time nobody is elsewhere while others wait
            stack = rf"busy elsewhere since \(at {inner}, called from {outer}[,)]"
            assert re.search(stack, message), message
    if backend.rank == 1 and backend.root.clock is WALL:
        _naps()
    else:
        meet()


def _naps() -> None:
    """Be elsewhere, on this thread, until the others meet: on a busy host they may come late."""
    over = False

    def come() -> None:
        nonlocal over
        try:
            meet()
        finally:
            over = True

    threading.Thread(target=contextvars.copy_context().run, args=(come,)).start()
    while not over:
        time.sleep(0.05)


def skipped_in_a_group(backend: fc.Backend) -> None:
    backend.barrier()
    group = backend.sub([2, 1]) if backend.rank else None
    meet()
    if backend.rank == 2:
        assert group is not None
        message = _times_out(fc.all_reduce, ONES, group)
        _check(message, "all_reduce #1 on ranks [2, 1]")
        _check(message, "rank 1 is missing: finished barrier #1 of all ranks")
        assert "rank 0" not in message
    meet()


def in_different_order(backend: fc.Backend) -> None:
    """Two ranks call two collectives of one group in different orders: that is a mismatch."""
    meet()
    first, second = fc.all_reduce, fc.broadcast
    if backend.rank == 1:
        first, second = second, first
    error = expect(fc.MismatchError, first, ONES, backend)
    check_words(error, "collective #1", "all_reduce(", "broadcast(", "rank 1: broadcast")
    meet()


def long_computation(backend: fc.Backend) -> None:
    """A rank that computes, and never lets go of the interpreter for long, is called busy."""
    backend.barrier()
    meet()
    if backend.rank == 0:
        message = _times_out(backend.barrier)
        _check(message, "rank 1 is missing: finished barrier #1", "busy elsewhere since")
        meet()
        return
    end, number = time.monotonic() + PATIENCE + 1.0, 0
    while time.monotonic() < end:
        number += 1
    meet()


def slow_to_answer(backend: fc.Backend) -> None:
    """A rank that gets no time for a while, on a busy host, is heard nevertheless."""
    backend.barrier()
    if backend.rank == 1:
        status = backend.root.recorder.status

        def late(channel: int, sequence: int = 0) -> Status:
            time.sleep(1.0)
            return status(channel, sequence)

        backend.root.recorder.status = late  # type: ignore[method-assign]
    meet()
    if backend.rank == 0:
        message = _times_out(backend.barrier)
        _check(message, "rank 1 is missing: finished barrier #1 of all ranks")
    meet()


def left_early(backend: fc.Backend) -> None:
    backend.barrier()
    meet()  # or who is slow to see that all have come to the barrier hears of the end in it
    if backend.rank == 1:
        backend.root.recorder.end_program()  # as launch does
        backend.close()
    else:
        error = expect(fc.PeerFailedError, fc.all_reduce, ONES, backend)
        check_words(error, "rank 1 has left the job (it has returned from ", " waits in all_reduce")
        check_words(error, "all_reduce #2 of all ranks")
        assert error.rank == 1
    meet()


def failed_before(backend: fc.Backend) -> None:
    """A rank that has given up already says what it was that it could not finish."""
    backend.barrier()
    meet()
    if backend.rank == 0:
        expect(fc.CommTimeoutError, fc.broadcast, ONES, backend.sub([0, 1]), timeout=0.05)
        meet()
    else:
        meet()
        message = _times_out(fc.all_reduce, ONES, backend)
        _check(message, "rank 0 is missing: failed in broadcast #1 of group [0, 1]")
        _check(message, "for rank 1: the ranks call these operations in different orders")
    meet()


@jobs(2)
@bodies(long_computation, failed_before)
def test_two_ranks(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(2, on=["zmq", "mpi"])
@bodies(slow_to_answer)
def test_who_answers_by_message(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(3)
@bodies(skipped_by_one, in_different_order, left_early)
def test_one_group(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(3, on=NOT_MPI)
@bodies(skipped_in_a_group)
def test_one_group_besides(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


# Collectives of several groups.


def groups_in_different_order(backend: fc.Backend) -> None:
    """Rank 0 calls A then B, rank 1 calls B then A: each sees where the other is."""
    me = backend.rank
    a = backend.sub([0, 1, 2])
    b = backend.sub([0, 1]) if me < 2 else None
    meet()
    if me == 1:
        assert b is not None
        message = _times_out(fc.broadcast, ONES, b)
        _check_stuck(message, 0, "all_reduce #1 of group [0, 1, 2]")
        _check(
            message, "broadcast #1 on ranks [0, 1]", "likely cause: rank 1 waits here for rank 0"
        )
        _check(message, "rank 0 waits in all_reduce #1 of group [0, 1, 2] for rank 1")
        _check(message, "in different orders")
    else:
        message = _times_out(fc.all_reduce, ONES, a)
        _check_stuck(message, 1, "broadcast #1 of group [0, 1]")
        _check(message, "all_reduce #1 on ranks [0, 1, 2]", "in different orders")
        _check(message, "rank 1 waits in broadcast #1 of group [0, 1] for rank 0")
        assert message.count("is missing") == 1
    if me == 0:
        _check(message, "likely cause: rank 0 waits here for rank 1")
    meet()


def cycle(backend: fc.Backend) -> None:
    """Each rank waits for the next one, in a group of the two; no two ranks see it all."""
    me, p = backend.rank, backend.world_size
    following = (me + 1) % p
    mine = backend.sub([me, following], name="pair")
    backend.sub([(me - 1) % p, me], name="pair")
    meet()
    message = _times_out(mine.barrier)
    _check_stuck(message, following, "barrier #1 of group")
    _check(message, f"rank {me} waits here for rank {following}", "in different orders")
    for step in range(1, p):
        rank, awaited = (me + step) % p, (me + step + 1) % p
        text = f"rank {rank} waits in barrier #1 of group [{rank}, {awaited}] 'pair' for"
        _check(message, f"{text} rank {awaited}")
    meet()


def culprit_at_the_end_of_a_chain(backend: fc.Backend) -> None:
    """Rank 0 waits for 1, which waits for 2, which does not come: 2 is named."""
    me = backend.rank
    backend.barrier()
    first = backend.sub([0, 1]) if me < 2 else None
    second = backend.sub([1, 2]) if me else None
    meet()
    if me == 0:
        assert first is not None
        message = _times_out(first.barrier)
        _check_stuck(message, 1, "all_reduce #1 of group [1, 2]")
        _check(message, "rank 1 waits in all_reduce #1 of group [1, 2] for rank 2;")
        _check(message, "rank 2: finished barrier #1 of all ranks", "busy elsewhere")
        assert "different orders" not in message
    elif me == 1:
        message = _times_out(fc.all_reduce, ONES, second)
        _check(message, "rank 2 is missing: finished barrier #1 of all ranks")
    meet()


def made_in_different_order(backend: fc.Backend) -> None:
    """Two groups of the same ranks: what is the first for one rank is the second for another."""
    me = backend.rank
    one, two = backend.sub([0, 1]), backend.sub([0, 1])
    meet()
    message = _times_out(fc.all_reduce, ONES, two if me == 1 else one)
    other = 1 - me
    _check_stuck(message, other, "all_reduce #1 of group [0, 1]")
    there, here = ("2nd", "1st") if me == 0 else ("1st", "2nd")
    _check(message, f"rank {other} is in another group of the same ranks")
    _check(message, f"the {there} made there and the {here} made here", "in the same order")
    meet()


def made_once_more(backend: fc.Backend) -> None:
    """One rank has made a group too many before."""
    if backend.rank == 1:
        backend.sub([0, 1])
    group = backend.sub([0, 1])
    meet()
    message = _times_out(group.barrier)
    _check(message, f"rank {1 - backend.rank} is in another group of the same ranks")
    meet()


def made_with_another_numbering(backend: fc.Backend) -> None:
    me = backend.rank
    group = backend.sub([me, 1 - me])
    meet()
    message = _times_out(group.barrier)
    _check(message, f"[{1 - me}, {me}] there and [{me}, {1 - me}] here", "in the same order")
    meet()


def made_with_other_names(backend: fc.Backend) -> None:
    me = backend.rank
    group = backend.sub([0, 1], name=f"of rank {me}")
    meet()
    message = _times_out(group.barrier)
    _check(message, f"named 'of rank {1 - me}' there and 'of rank {me}' here")
    meet()


@jobs(3)
@bodies(groups_in_different_order)
def test_several_groups(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(3, on=NOT_MPI)
@bodies(cycle, culprit_at_the_end_of_a_chain)
def test_several_groups_besides(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(2)
@bodies(made_in_different_order)
def test_groups_that_are_not_the_same(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(2, on=NOT_MPI)
@bodies(made_once_more, made_with_another_numbering, made_with_other_names)
def test_groups_that_are_not_the_same_besides(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


# Messages.


def never_sent(backend: fc.Backend) -> None:
    """The peer is named, what it does, and what it has sent instead."""
    backend.barrier()
    if backend.rank == 1:
        backend.send(ONES, 0, tag=9)
        backend.send(ONES, 0, tag=7)
        meet()
    else:
        meet()
        message = _times_out(backend.recv, np.empty(3), 1, tag=8)
        _check(message, "recv of float64 (3,) from rank 1 (tag 8)")
        _check(message, "rank 1: finished send of float64 (3,) to rank 0 (tag 7)")
        _check(message, "rank 1 has sent messages that nobody receives, with tag 7, 9")
    meet()


def sent_in_another_group(backend: fc.Backend) -> None:
    """A message of another group is not this group's, whatever its tag."""
    group = backend.sub([1, 0])
    if backend.rank == 1:
        group.send(ONES, 1, tag=8)
    meet()
    if backend.rank == 0:
        message = _times_out(backend.recv, np.empty(3), 1, tag=8)
        assert "nobody receives" not in message
        assert (group.recv(np.empty(3), 0, tag=8) == ONES).all()
    meet()


def both_receive(backend: fc.Backend) -> None:
    me, other = backend.rank, 1 - backend.rank
    meet()
    message = _times_out(backend.recv, np.empty(3), other, tag=me)
    if f"rank {other}: in recv" in message:  # it may have given up just before
        _check(message, f"rank {other}: in recv of float64 (3,) from rank {me} (tag {other}) for")
        _check(message, f"rank {me} waits here for rank {other}", "in different orders")
    meet()


def receives_instead(backend: fc.Backend) -> None:
    """One rank is in a collective while the other waits for a message of it."""
    me, other = backend.rank, 1 - backend.rank
    backend.barrier()
    meet()
    if me == 0:
        message = _times_out(backend.barrier)
        _check(message, "rank 1 is missing: in recv of float64 (3,) from rank 0 (tag 5) for")
        _check(message, "rank 1 waits in recv of float64 (3,) from rank 0 (tag 5) for rank 0")
        meet()
    else:
        work = backend.irecv(np.empty(3), other, tag=5)
        error = expect(fc.CommTimeoutError, work.wait, PATIENCE + 6)  # until rank 0 has given up
        _check(str(error), "rank 0: failed in barrier #2 of all ranks")
        meet()


def never_received(backend: fc.Backend) -> None:
    """A large message waits for its receiver, which is named."""
    backend.barrier()
    meet()
    if backend.rank == 0:
        message = _times_out(backend.send, np.ones(300_000), 1, tag=3)
        _check(message, "send of float64 (300000,) to rank 1 (tag 3)")
        _check(message, "rank 1: finished barrier #1 of all ranks", "busy elsewhere")
    meet()


@jobs(2)
@bodies(never_sent, both_receive)
def test_messages(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(2, on=NOT_MPI)
@bodies(receives_instead, sent_in_another_group, never_received)
def test_messages_besides(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


# Asynchronous operations.


def started_and_never_joined(backend: fc.Backend) -> None:
    """What one rank has started in the background is what the other one names."""
    me = backend.rank
    a, b = backend.sub([0, 1]), backend.sub([0, 1], name="other")
    meet()
    if me == 0:
        work = fc.all_reduce(ONES, a, timeout=PATIENCE + 20, async_op=True)
        message = _times_out(b.barrier)
        _check(message, "rank 1 is missing: no collective so far, busy elsewhere")
        meet()
        expect(fc.CommunicationError, work.wait)
    else:
        meet()
    meet()


def groups_in_different_order_but_in_the_background(backend: fc.Backend) -> None:
    """What the message advises is true: started in the background, this is no deadlock."""
    a, b = backend.sub([0, 1]), backend.sub([0, 1], name="other")
    groups = [a, b] if backend.rank == 0 else [b, a]
    works = [fc.all_reduce(ONES, group, async_op=True) for group in groups]
    for work in works:
        assert (work.wait() == 2).all()


@jobs(2)
@bodies(started_and_never_joined)
def test_background(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(2, on=NOT_MPI)
@bodies(groups_in_different_order_but_in_the_background)
def test_background_besides(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("body", "world_size"),
    [
        (skipped_in_a_group, 3),
        (cycle, 3),
        (culprit_at_the_end_of_a_chain, 3),
        (made_once_more, 2),
        (made_with_another_numbering, 2),
        (made_with_other_names, 2),
        (receives_instead, 2),
        (sent_in_another_group, 2),
        (never_received, 2),
        (groups_in_different_order_but_in_the_background, 2),
    ],
)
def test_everything_under_mpi(body: Any, world_size: int) -> None:
    run(body, transport="mpi", world_size=world_size)


def test_the_reports_are_found_by_whoever_reads_the_failure() -> None:
    """Through launch(), without anything around it."""
    with pytest.raises(fc.RankFailedError, match=r"rank 1 is missing: finished barrier #1"):
        fc.launch(_skips, world_size=2, timeout=0.5)


def _skips(backend: fc.Backend) -> None:
    backend.barrier()
    if backend.rank == 0:
        backend.barrier()
    else:
        time.sleep(1.5)
