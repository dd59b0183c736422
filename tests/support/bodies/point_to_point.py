"""Bodies: send, recv, isend, irecv. Each rank sends to the next one and receives from the last."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from support import oracle
from support.arrays import (
    LAYOUTS,
    WRITABLE,
    Array,
    array_of,
    check_same,
    check_surroundings,
)
from support.bodies.reductions import expect_refusal
from support.spmd_job import meet

import fsdpcore as fc

# More than any transport buffers, and than one segment of a message.
LARGE = 400_000


def _neighbours(backend: fc.Backend) -> tuple[int, int]:
    p = backend.world_size
    return (backend.rank + 1) % p, (backend.rank - 1) % p


def every_kind_of_array(backend: fc.Backend) -> None:
    """All dtypes, shapes and layouts, small and large."""
    right, left = _neighbours(backend)
    if right == backend.rank:
        return
    shapes: list[tuple[int, ...]] = [(), (0,), (1,), (7, 3), (2, 0, 3)]
    kinds: list[tuple[tuple[int, ...], Any]] = [((5, 2), dtype) for dtype in oracle.DTYPES]
    kinds += [(shape, np.float32) for shape in shapes]
    kinds += [((LARGE + 1,), np.float32), ((2 * LARGE + 1,), np.int8)]
    for shape, dtype in kinds:
        room = np.empty(shape, dtype)
        work = backend.isend(array_of(backend.rank, shape, dtype), right)
        assert backend.recv(room, left) is room
        assert work.wait() is None
        check_same(room, array_of(left, shape, dtype), f"a message of {np.dtype(dtype)} {shape}")
    for number, (name, make) in enumerate(LAYOUTS.items()):
        layout = list(WRITABLE)[number % len(WRITABLE)]
        shape = (300, 5, 3) if number % 2 else (3, 2)
        work = backend.isend(make(array_of(backend.rank, shape)), right)
        room = WRITABLE[layout](np.zeros(shape, np.float32))
        backend.recv(room, left)
        work.wait()
        what = f"a {name} array into a {layout} one"
        check_same(room, array_of(left, shape), what)
        check_surroundings(room, what)


def beyond_32_bits(backend: fc.Backend) -> None:
    """A message, and a collective, of more bytes than 32 bits with a sign can count."""
    me, size = backend.rank, 2**31 + 5
    if me == 0:
        array = np.zeros(size, np.uint8)
        array[-3:] = 7
        backend.send(array, 1)
    else:
        room = backend.recv(np.ones(size, np.uint8), 0)
        assert (room[-3:] == 7).all()
        assert not room[:-3].any()
        del room
    joined = fc.all_gather(np.full(2**30 + 3, me, np.uint8), backend)
    assert int(np.count_nonzero(joined)) == 2**30 + 3
    assert joined[2**30 + 2 : 2**30 + 4].tolist() == [0, 1]


def tags_in_any_order(backend: fc.Backend) -> None:
    """A receive takes the message with its tag, however many others came before."""
    right, left = _neighbours(backend)
    if right == backend.rank:
        return
    for size in (3, LARGE // 8):
        sent = [
            backend.isend(array_of(backend.rank, (size + tag,)), right, tag=tag)
            for tag in range(12)
        ]
        for tag in (11, 0, 5, 4, 10, 1, 9, 2, 8, 3, 7, 6):
            room = np.empty(size + tag, np.float32)
            backend.recv(room, left, tag=tag)
            check_same(room, array_of(left, (size + tag,)), f"the message with tag {tag}")
        for work in sent:
            work.wait()
    highest = 2**31 - 1
    work = backend.isend(np.float32(right), right, tag=highest)
    check_same(backend.recv(np.empty((), np.float32), left, tag=highest), _scalar(backend), "max")
    work.wait()


def _scalar(backend: fc.Backend) -> Any:
    return np.asarray(np.float32(backend.rank))


def one_tag_keeps_order(backend: fc.Backend) -> None:
    """Messages with equal tags come in the order of their sending, large between small ones."""
    right, left = _neighbours(backend)
    if right == backend.rank:
        return
    sizes = [(number, LARGE // 20 if number % 5 == 2 else 4) for number in range(40)]
    sent = [backend.isend(np.full(size, number, np.int32), right) for number, size in sizes]
    for number, size in sizes:
        room = np.empty(size, np.int32)
        backend.recv(room, left)
        check_same(room, np.full(size, number, np.int32), f"message number {number}")
    for work in sent:
        work.wait()


def many_outstanding(backend: fc.Backend) -> None:
    """Hundreds of messages between all pairs, receives before and after the sends."""
    me, p = backend.rank, backend.world_size
    others = [rank for rank in range(p) if rank != me]
    received, works = [], []
    for number in range(30):
        if number == 15:
            meet()
        for rank in others:
            size = 3000 if number % 7 == 3 else 2
            room = np.empty(size, np.float64)
            received.append((room, rank, number))
            post_receive = number % 2 == 0
            if post_receive:
                works.append(backend.irecv(room, rank, tag=number))
            works.append(backend.isend(np.full(size, 1000.0 * me + number), rank, tag=number))
            if not post_receive:
                works.append(backend.irecv(room, rank, tag=number))
    for work in reversed(works):
        work.wait()
    for room, rank, number in received:
        check_same(room, np.full(room.size, 1000.0 * rank + number), f"{number} from {rank}")
    assert all(work.done() for work in works)


def sender_reuses_its_array(backend: fc.Backend) -> None:
    """After send has returned, the sender may write to its array."""
    me, p = backend.rank, backend.world_size
    if p == 1:
        return
    for size in (1, 100, LARGE):
        if me == 0:
            array = np.ones(size)
            if size == LARGE:
                backend.send(array, 1)
                array[:] = 2.0
                meet()
            else:
                work = backend.isend(array, 1)
                work.wait()
                array[:] = 2.0
                meet()
        elif me == 1:
            if size != LARGE:
                meet()  # the message has been sent, and its array was overwritten
            room = np.empty(size)
            backend.recv(room, 0)
            check_same(room, np.ones(size), f"{size} elements")
            if size == LARGE:
                meet()
        else:
            meet()


def bad_arguments(backend: fc.Backend) -> None:
    """Refused on the rank, before anything is sent."""
    me, p = backend.rank, backend.world_size
    ones, room = np.ones(3), np.empty(3)
    for peer in (p, -1, "next", 1.5, None):
        for send in (backend.send, backend.isend):
            expect_refusal(send, ones, peer)
        for receive in (backend.recv, backend.irecv):
            expect_refusal(receive, room, peer)
    if p > 1:
        peer = (me + 1) % p
        read_only = np.empty(3)
        read_only.flags.writeable = False
        for tag in (-1, 2**31, "a"):
            expect_refusal(backend.send, ones, peer, tag=tag)
            expect_refusal(backend.recv, room, peer, tag=tag)
        for bad in (ones.astype(object), ones.astype(">f8"), np.array(["a"])):
            expect_refusal(backend.send, bad, peer)
            expect_refusal(backend.recv, bad, peer)
        for out in (read_only, [0.0], 3.0, None):
            expect_refusal(backend.recv, out, peer)
        for timeout in (-1.0, float("nan"), "soon"):
            expect_refusal(backend.send, ones, peer, timeout=timeout)
            expect_refusal(backend.recv, room, peer, timeout=timeout)
    backend.barrier()


def timeout_leaves_all_well(backend: fc.Backend, size: int) -> None:
    """A receive that timed out takes nothing; the message can be received later."""
    me, p = backend.rank, backend.world_size
    if p == 1:
        return
    message, room = array_of(1, (size,)), np.zeros(size, np.float32)
    if me == 0:
        error = expect(fc.CommTimeoutError, backend.recv, room, 1, tag=5, timeout=0.05)
        check_words(error, "recv", "rank 1", "tag 5", "0.05 s", "rank 0")
    meet()
    if me == 1:
        work = backend.isend(message, 0, tag=5)
        backend.send(np.float32(1), 0, tag=6)  # when this is there, so is the first
        meet()
        work.wait()
    elif me == 0:
        backend.recv(np.empty((), np.float32), 1, tag=6)
        check_same(room, np.zeros(size, np.float32), "the array of the receive that timed out")
        other = np.empty(size, np.float32)
        meet()
        backend.recv(other, 1, tag=5)
        check_same(other, message, "the message that came late")
    else:
        meet()
    backend.barrier()


def waiting_for_work(backend: fc.Backend) -> None:
    """wait() with a timeout gives up waiting only; wait() again gives the same result."""
    me, p = backend.rank, backend.world_size
    if p == 1:
        return
    room = WRITABLE["strided"](np.zeros(4, np.float32))
    if me == 0:
        work = backend.irecv(room, 1)
        assert not work.done()
        for call in (lambda: work.wait(0.01), lambda: work.wait(timeout=0)):
            expect(fc.CommTimeoutError, call)
        expect(fc.StateError, work.result)
        meet()
        assert work.wait() is room
        check_same(room, array_of(1, (4,)), "what was waited for again")
        assert work.done()
        room[:] = 0
        assert work.wait(float("inf")) is room
        assert work.result() is room
        check_same(room, np.zeros(4, np.float32), "what was changed between two wait()")
    else:
        meet()
        if me == 1:
            backend.isend(array_of(1, (4,)), 0).wait()
    backend.barrier()


def expect(kind: type[BaseException], function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call, and return the error that it must raise."""
    try:
        function(*args, **kwargs)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def check_words(error: BaseException, *words: str) -> None:
    """Raise unless the error's message has all these words."""
    for word in words:
        assert word in str(error), f"{word!r} is not in: {error}"


def several_threads(backend: fc.Backend) -> None:
    """Threads of one rank send and receive at the same time, each with its own tag."""
    right, left = _neighbours(backend)
    if right == backend.rank:
        return
    errors: list[BaseException] = []

    def exchange(tag: int) -> None:
        try:
            for number in range(20):
                size = 2000 if number % 4 == 0 else 3
                work = backend.isend(np.full(size, 100 * tag + number), right, tag=tag)
                room = backend.recv(np.empty(size, np.int64), left, tag=tag)
                work.wait()
                check_same(room, np.full(size, 100 * tag + number), f"tag {tag}, {number}")
        except BaseException as error:  # raised again below, on the rank's own thread
            errors.append(error)

    start = backend.clock.start
    threads = [start(functools.partial(exchange, tag), f"exchange {tag}") for tag in range(4)]
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


# What rank 0 sends, and what rank 1 receives into.
MISMATCHES: dict[str, Callable[[], tuple[Array, Array]]] = {
    "shape": lambda: (np.ones(3), np.empty(4)),
    "same bytes": lambda: (np.ones((2, 3)), np.empty((3, 2))),
    "dtype": lambda: (np.ones(3, np.float32), np.empty(3, np.int32)),
    "dimensions": lambda: (np.ones(1), np.empty(())),
    "large": lambda: (np.ones(LARGE), np.empty(LARGE + 1)),
    "large for small": lambda: (np.ones(LARGE), np.empty(1)),
    "nothing": lambda: (np.ones(0), np.empty(1)),
}


def mismatched_message(backend: fc.Backend, kind: str) -> None:
    """Another shape or dtype than expected: both sides learn of it."""
    me, p = backend.rank, backend.world_size
    if p == 1:
        return
    sent, room = MISMATCHES[kind]()
    if me == 0:
        error = expect(fc.MismatchError, _send_and_wait, backend, sent)
    elif me == 1:
        error = expect(fc.MismatchError, backend.recv, room, 0, tag=3)
    else:
        meet()
        return
    shapes = (str(sent.shape), str(room.shape))
    check_words(error, "rank 0 sent", "rank 1 receives", *shapes, sent.dtype.name, room.dtype.name)
    again = expect(fc.MismatchError, backend.barrier)
    assert str(again) == str(error)
    meet()


def _send_and_wait(backend: fc.Backend, array: Any) -> None:
    """Send; a buffered send ends well, and the next call raises."""
    backend.send(array, 1, tag=3)
    backend.recv(np.empty(1), 1, tag=4)
