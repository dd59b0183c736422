"""Bodies: messages from any rank and with any tag, larger buffers, probes, messages to oneself."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from support.arrays import WRITABLE, Array, array_of, check_same
from support.bodies.point_to_point import LARGE, check_words, expect
from support.bodies.reductions import expect_refusal
from support.spmd_job import meet

import fsdpcore as fc

# More than any transport buffers, where that is the default.
MEDIUM = 30_000
SHAPES = [(), (0,), (1,), (7, 3), (40,), (2, 0, 3), (MEDIUM,)]
# Time for every rank to come, with all cores busy.
PATIENCE = 2.0


def _shape(number: int) -> tuple[int, ...]:
    return SHAPES[number % len(SHAPES)]


def _message(sender: int, number: int) -> Array:
    return array_of(sender, _shape(number), salt=str(number))


def _check_room(room: Array, status: fc.MessageStatus, expected: Array, what: str) -> None:
    """The message is at the beginning of ``room``, and the rest is as it was: sevens."""
    check_same(room[: status.count].reshape(status.shape), expected, what)
    assert (room[status.count :] == 7).all(), f"{what}: written behind its end"
    assert (status.dtype, status.shape) == (expected.dtype, expected.shape), what


def from_any_rank(backend: fc.Backend) -> None:
    """Each message of each rank comes once, those of one sender in order, and says what it is."""
    me, p, count = backend.rank, backend.world_size, 20
    if me != 0:
        for number in range(count):
            backend.send(_message(me, number), 0, tag=number % 3)
    next_one = dict.fromkeys(range(1, p), 0)
    for number in range(count * (p - 1) if me == 0 else 0):
        room = WRITABLE["strided"](np.full(MEDIUM + 5, 7, np.float32)) if number % 2 else None
        room = np.full(MEDIUM + 5, 7, np.float32) if room is None else room
        status = fc.MessageStatus()
        if number % 3:
            assert backend.recv(room, fc.ANY, tag=fc.ANY, status=status) is room
        else:
            assert backend.irecv(room, fc.ANY, tag=fc.ANY, status=status).wait() is room
        expected = next_one[status.source]
        next_one[status.source] += 1
        what = f"message {expected} of rank {status.source}"
        assert status.tag == expected % 3, what
        _check_room(room, status, _message(status.source, expected), what)
    assert set(next_one.values()) <= {count if me == 0 else 0}
    backend.barrier()


def older_receive_first(backend: fc.Backend) -> None:
    """A message goes to the oldest receive that takes it, whatever that leaves open."""
    me, p = backend.rank, backend.world_size
    if p == 1:
        return
    if me == 0:
        asked: list[tuple[Any, Any]] = [
            (1, 4), (fc.ANY, 4), (1, fc.ANY), (fc.ANY, fc.ANY), (1, 4), (fc.ANY, 4),
        ]  # fmt: skip
        rooms = [np.empty(1, np.int64) for _ in asked]
        works = [
            backend.irecv(room, src, tag=tag) for room, (src, tag) in zip(rooms, asked, strict=True)
        ]
        meet()
        fc.wait_all(works)
        # Tags 4, 9, 4, 4, 4, 4 are sent in this order.
        assert [int(room[0]) for room in rooms] == [0, 2, 1, 3, 4, 5]
    else:
        meet()
        if me == 1:
            for number, tag in enumerate((4, 9, 4, 4, 4, 4)):
                backend.send(np.array([number]), 0, tag=tag)
    backend.barrier()


def older_message_first(backend: fc.Backend) -> None:
    """A receive of any tag takes what was sent first, with large messages between small ones."""
    me, p, tags = backend.rank, backend.world_size, (5, 0, 5, 3, 0, 5, 3, 3, 0)
    sizes = [MEDIUM if number % 3 == 1 else 2 for number in range(len(tags))]
    if p == 1:
        return
    if me == 1:
        sent = [
            backend.isend(np.full(size, number), 0, tag=tag)
            for number, (tag, size) in enumerate(zip(tags, sizes, strict=True))
        ]
        backend.send(np.zeros(()), 0, tag=99)  # when this is there, so are all others
        fc.wait_all(sent)
    elif me == 0:
        backend.recv(np.empty(()), 1, tag=99)
        taken = []
        for asked in (3, fc.ANY, 0, *[fc.ANY] * 6):
            room, status = np.full(MEDIUM, 7), fc.MessageStatus()
            backend.recv(room, 1, tag=asked, status=status)
            number = int(room[0])
            taken.append(number)
            assert status == fc.MessageStatus(1, tags[number], np.dtype(int), (sizes[number],))
        assert taken == [3, 0, 1, 2, 4, 5, 6, 7, 8]
    backend.barrier()


def any_rank_of_a_group(backend: fc.Backend) -> None:
    """ANY stands for the ranks of the group, which number them their own way."""
    me, p = backend.rank, backend.world_size
    if p == 1:
        return
    group = backend.sub(range(p)[::-1])
    other = backend.sub(range(p))
    if me == p - 1:
        backend.send(np.array([1.0]), 0)
        group.send(np.array([2.0]), p - 1)
        other.send(np.array([3.0]), 0)
    elif me == 0:
        room = np.empty(1)
        for where, value, source in ((group, 2, 0), (other, 3, p - 1), (backend, 1, p - 1)):
            status = fc.MessageStatus()
            assert where.recv(room, fc.ANY, tag=fc.ANY, status=status) == value
            assert status.source == source
        assert group.iprobe(fc.ANY, tag=fc.ANY) is None
    backend.barrier()


def probing(backend: fc.Backend) -> None:
    """A probe says what is there, as often as it is asked, and leaves it there."""
    me, p = backend.rank, backend.world_size
    if p == 1:
        assert backend.iprobe(fc.ANY, tag=fc.ANY) is None
        return
    message = array_of(1, (3, MEDIUM))
    if me == 0:
        assert backend.iprobe(fc.ANY, tag=fc.ANY) is None
        error = expect(fc.CommTimeoutError, backend.probe, fc.ANY, tag=fc.ANY, timeout=0.05)
        check_words(error, "probe from any rank (any tag)", "0.05 s")
        assert re.search(r"\n  ranks? 1\b", str(error)), error
        error = expect(fc.CommTimeoutError, backend.probe, 1, tag=5, timeout=0)
        check_words(error, "probe from rank 1 (tag 5)")
    meet()
    if me == 1:
        backend.clock.sleep(0.05)
        work = backend.isend(np.ones(()), 0, tag=8)
        large = backend.isend(message, 0, tag=5)
        meet()
        fc.wait_all([work, large])
    elif me == 0:
        found = backend.probe(1, tag=5)
        assert found == fc.MessageStatus(1, 5, message.dtype, message.shape)
        assert found.count == message.size
        assert backend.probe(fc.ANY, tag=5) == backend.iprobe(1, tag=5) == found
        assert backend.probe(1, tag=fc.ANY) == fc.MessageStatus(1, 8, np.dtype(float), ())
        assert backend.iprobe(1, tag=6) is None
        meet()
        assert found.dtype is not None
        room = np.empty(found.shape, found.dtype)
        check_same(backend.recv(room, found.source, tag=found.tag), message, "what was probed")
        backend.recv(np.empty(()), fc.ANY, tag=fc.ANY)
        assert backend.iprobe(fc.ANY, tag=fc.ANY) is None
    else:
        meet()
    backend.barrier()


def to_oneself(backend: fc.Backend) -> None:
    """A rank's messages to itself never wait, keep their order, and match as any others."""
    me, array = backend.rank, np.arange(LARGE, dtype=np.float64)
    for size in (0, 3, LARGE):
        data = array[:size].copy()
        backend.send(data, me, timeout=10)
        data[:] = -1
        backend.send(data, me)
        check_same(backend.recv(np.empty(size), me), array[:size], "the first of two")
        assert backend.probe(fc.ANY) == fc.MessageStatus(me, 0, data.dtype, (size,))
        check_same(backend.recv(np.empty(size), fc.ANY), data, "the second of two")
    rooms = [np.empty(2), np.empty(2)]
    works = [backend.irecv(rooms[0], me, tag=3), backend.irecv(rooms[1], fc.ANY, tag=fc.ANY)]
    assert backend.isend(np.full(2, 1.0), me, tag=4).done()
    assert backend.isend(np.full(2, 2.0), me, tag=3).done()
    fc.wait_all(works)
    assert (rooms[0] == 2).all()
    assert (rooms[1] == 1).all()
    got = backend.sendrecv(array, me, np.empty(LARGE), me)
    check_same(got, array, "exchanged with oneself")

    def send_later() -> None:
        backend.clock.sleep(0.05)
        backend.send(np.ones(1), me)

    waiting = backend.clock.start(send_later, "later")
    assert backend.recv(np.zeros(1), me) == 1, "sent by another thread while this one waits"
    waiting.join(60)
    error = expect(fc.CommTimeoutError, backend.recv, np.empty(1), me, timeout=0.01)
    check_words(error, f"recv of float64 (1,) from rank {me}", f"nobody but rank {me} itself")
    backend.isend(array, me)  # which nobody receives, and which closing does not wait for
    meet()


def exchanges(backend: fc.Backend) -> None:
    """All ranks exchange at once, large arrays too; what is sent may be what is written to."""
    me, p = backend.rank, backend.world_size
    left, right = (me - 1) % p, (me + 1) % p
    for shape in ((), (3, 2), (LARGE,)):
        mine, status = array_of(me, shape), fc.MessageStatus()
        room = np.empty(shape, np.float32)
        assert backend.sendrecv(mine, right, room, left, status=status) is room
        check_same(room, array_of(left, shape), f"from rank {left}")
        assert status == fc.MessageStatus(left, 0, room.dtype, shape)
        backend.sendrecv(mine, right, mine, fc.ANY, tag=me, recv_tag=left)
        check_same(mine, array_of(left, shape), "into the array that was sent")
    meet()
    error = expect(
        fc.CommTimeoutError, backend.sendrecv, np.ones(1), right, np.empty(1), left,
        tag=6, recv_tag=7, timeout=0.05,
    )  # fmt: skip
    check_words(error, f"recv of float64 (1,) from rank {left} (tag 7)", "0.05 s")
    assert backend.recv(np.empty(1), left, tag=6) == 1, "what had been sent"
    expect_refusal(backend.sendrecv, np.ones(1), p, np.empty(1), left)
    backend.barrier()


def several_works(backend: fc.Backend) -> None:
    """wait_any finds what has ended, of messages and collectives; wait_all has all results."""
    me, p = backend.rank, backend.world_size
    others = [rank for rank in range(p) if rank != me]
    for number in range(3):
        rooms = [np.empty(MEDIUM if number == 1 else 2) for _ in others]
        receives = [backend.irecv(room, rank) for room, rank in zip(rooms, others, strict=True)]
        sends = [backend.isend(np.full(rooms[0].shape, float(me)), rank) for rank in others]
        total = fc.all_reduce(np.ones(2), backend, async_op=True) if number else None
        works, found = [*receives, *([total] if total else [])], []
        # Who waits for any looks after the messages of the rank, as who waits for one does.
        ends = [end for work in receives for end in work._ends()]
        assert all(end.signal(backend.clock.lock).polled == end.polled for end in ends)
        while works:
            work = works.pop(fc.wait_any(works))
            assert work.done()
            found.append(work.wait())
        assert len(found) == len(others) + bool(total)
        assert fc.wait_all(sends, timeout=10) == [None] * len(others)
        for rank, room, got in zip(others, rooms, fc.wait_all(receives), strict=True):
            assert got is room
            assert (room == rank).all()
    if p > 1:
        _first_of_all(backend)
    for wait in (fc.wait_any, fc.wait_all):
        expect_refusal(wait, [np.ones(1)])
    expect_refusal(fc.wait_any, [])
    assert fc.wait_all([]) == []
    backend.barrier()


def _first_of_all(backend: fc.Backend) -> None:
    """Rank 0 waits for whoever comes; the others come one after the other."""
    me, p = backend.rank, backend.world_size
    room = np.empty((p, 2))
    works = [backend.irecv(room[rank], rank, tag=2) for rank in range(1, p)] if me == 0 else []
    for rank in range(p - 1, 0, -1):
        if me == 0:
            error = expect(fc.CommTimeoutError, fc.wait_any, works, timeout=0.01)
            check_words(error, "recv of float64 (2,) from rank 1 (tag 2)", "0.01 s")
            expect(fc.CommTimeoutError, fc.wait_all, works, timeout=0.01)
        meet()
        if me == rank:
            backend.clock.sleep(0.02)
            backend.send(np.full(2, float(rank)), 0, tag=2)
        elif me == 0:
            assert fc.wait_any(works, timeout=10) == len(works) - 1
            assert (works.pop().wait(0) == rank).all()
        meet()


# What rank 0 sends, and what rank 1 has room for.
TOO_LITTLE: dict[str, Callable[[], tuple[Array, Array]]] = {
    "size": lambda: (np.ones((3, 2)), np.empty(5)),
    "large": lambda: (np.ones(LARGE), np.empty(LARGE - 1)),
    "dtype": lambda: (np.ones(3, np.float32), np.empty(5)),
    "axes": lambda: (np.ones(3), np.empty((5, 1))),
}


def too_little_room(backend: fc.Backend, kind: str) -> None:
    """A message that does not fit into the room for it: both sides learn of it."""
    me = backend.rank
    sent, room = TOO_LITTLE[kind]()
    if me == 0:
        error = expect(fc.MismatchError, _send_and_receive, backend, sent)
    else:
        status = fc.MessageStatus()
        error = expect(fc.MismatchError, backend.recv, room, fc.ANY, tag=fc.ANY, status=status)
        assert status == fc.MessageStatus()
    ours = f"up to {room.size} elements of float64" if room.ndim == 1 else str(room.shape)
    check_words(error, "rank 0 sent", "rank 1 receives", str(sent.shape), ours, "(tag 3)")
    meet()


def _send_and_receive(backend: fc.Backend, array: Array) -> None:
    backend.send(array, 1, tag=3)
    backend.recv(np.empty(1), 1)


def refusals(backend: fc.Backend) -> None:
    """What stands for no rank and no tag is refused before anything is sent."""
    ones = np.ones(3)
    for send in (backend.send, backend.isend):
        expect_refusal(send, ones, fc.ANY)
        expect_refusal(send, ones, 0, tag=fc.ANY)
    for src in (-1, backend.world_size, None, "ANY"):
        expect_refusal(backend.probe, src)
        expect_refusal(backend.iprobe, src)
    expect_refusal(backend.probe, fc.ANY, tag=-1)
    expect_refusal(backend.recv, fc.ANY, 0)
    assert repr(fc.ANY) == "fc.ANY"
    backend.barrier()


def _first_of_two(backend: fc.Backend) -> None:
    works = [backend.irecv(np.empty(3), fc.ANY, tag=tag) for tag in (4, 5)]
    works[fc.wait_any(works)].wait()


def _look_again(backend: fc.Backend) -> None:
    end = backend.clock.now() + 10
    while backend.clock.now() < end:
        assert backend.iprobe(fc.ANY) is None


CALLS_FOR_ANY: dict[str, Callable[[fc.Backend], Any]] = {
    "recv": lambda b: b.recv(np.empty(3), fc.ANY),
    "wait_all": lambda b: fc.wait_all([b.irecv(np.empty(3), fc.ANY, tag=4)]),
    "wait_any": _first_of_two,
    "probe": lambda b: b.probe(fc.ANY, tag=fc.ANY),
    "iprobe": _look_again,
}


def left_alone(backend: fc.Backend, call: str) -> None:
    """Who waits for any rank goes on as long as one is left that may send, and no longer."""
    me, p, room = backend.rank, backend.world_size, np.empty(())
    if me:
        backend.send(np.float64(me), 0, tag=9)
    if me > 1:
        backend.close()
    meet()
    if me == 1:
        backend.clock.sleep(0.05)
        backend.send(np.float64(p), 0, tag=9)
        backend.clock.sleep(0.05)
        backend.close()
    elif me == 0:
        came = {float(backend.recv(room, fc.ANY, tag=9)) for _ in range(p)}
        assert came == {*range(1, p + 1)}
        error = expect(fc.PeerFailedError, CALLS_FOR_ANY[call], backend)
        check_words(error, "left the job, all that could send")
        assert str(expect(fc.PeerFailedError, backend.barrier)) == str(error)
    meet()


def alone_before(backend: fc.Backend, call: str) -> None:
    """What came before all others left can be received; what is waited for then is an error."""
    me, p, room = backend.rank, backend.world_size, np.empty(())
    if me:
        backend.send(np.float64(me), 0)
        backend.close()
    meet()
    if me == 0:
        assert backend.probe(fc.ANY).source in range(1, p)
        came = {float(backend.recv(room, fc.ANY)) for _ in range(1, p)}
        assert came == {*range(1, p)}
        error = expect(fc.PeerFailedError, CALLS_FOR_ANY[call], backend)
        check_words(error, "left the job, all that could send")
    meet()


def failed_meanwhile(backend: fc.Backend, call: str) -> None:
    """A rank that fails ends the wait for any rank, whoever else is left."""
    meet()
    if backend.rank == 1:
        backend.abort("out of memory in layer 7")
    elif backend.rank == 0:
        error = expect(fc.PeerFailedError, CALLS_FOR_ANY[call], backend)
        check_words(error, "rank 1", "out of memory in layer 7")
        assert error.rank == 1
    meet()


def random_traffic(backend: fc.Backend, seed: int) -> None:
    """Random sends, and receives that leave open what they like, keep MPI's rules.

    Every rank receives as many messages as it is sent, each in one of the ways that take it:
    whichever comes, it is the first of its sender that the receive takes and nobody has.
    """
    me, p = backend.rank, backend.world_size
    chance = random.Random(seed)
    sent = [
        (chance.randrange(p), chance.randrange(p), chance.randrange(3), chance.randrange(10**6))
        for _ in range(25 * p)
    ]
    sends = [
        backend.isend(_message(me, number), dst, tag=tag)
        for src, dst, tag, number in sent
        if src == me
    ]
    left = [(src, tag, number) for src, dst, tag, number in sent if dst == me]
    mine = random.Random(f"{seed}/{me}")
    while left:
        src, tag, _ = mine.choice(left)
        asked = [mine.choice([src, fc.ANY]), mine.choice([tag, fc.ANY])]
        status, room = fc.MessageStatus(), np.full(MEDIUM + 5, 7, np.float32)
        if mine.random() < 0.3:
            found = backend.probe(asked[0], tag=asked[1])
            asked = [found.source, found.tag]
        work = backend.irecv(room, asked[0], tag=asked[1], status=status)
        assert fc.wait_any([work]) == 0
        work.wait()
        first = next(
            each for each in left if each[0] == status.source and asked[1] in (each[1], fc.ANY)
        )
        what = f"seed {seed}: {first} on rank {me}, asked for {asked}"
        assert (status.source, status.tag) == first[:2], what
        assert asked[0] in (status.source, fc.ANY), what
        _check_room(room, status, _message(first[0], first[2]), what)
        left.remove(first)
    fc.wait_all(sends)
    assert backend.iprobe(fc.ANY, tag=fc.ANY) is None
    backend.barrier()
