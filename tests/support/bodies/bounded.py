"""Bodies: very many operations under way, waited for in any order."""

from __future__ import annotations

import random

import numpy as np
from support.arrays import check_same

import fsdpcore as fc
from fsdpcore.core.work import MAX_QUEUED


def more_than_fit(backend: fc.Backend) -> None:
    """More collectives than may be queued: starting them waits, and all come to their end."""
    p, count = backend.world_size, MAX_QUEUED + 200
    works = [fc.all_reduce(np.int32(number), backend, async_op=True) for number in range(count)]
    order = list(range(count))
    random.Random(backend.rank).shuffle(order)
    for number in order:
        check_same(works[number].wait(), np.asarray(np.int32(p * number)), f"number {number}")


def not_waited_for(backend: fc.Backend) -> None:
    """Works that are dropped; what they wrote is there after the next call."""
    p = backend.world_size
    outs = [np.zeros(3) for _ in range(100)]
    for number, out in enumerate(outs):
        fc.all_reduce(np.full(3, float(number)), backend, out=out, async_op=True)
    backend.barrier()
    check_same(np.array(outs), np.arange(100.0).repeat(3).reshape(100, 3) * p, "outs")


def hundreds_of_messages(backend: fc.Backend) -> None:
    """Receives and sends of all ranks to all, several tags and sizes, waited for in any order."""
    me, p = backend.rank, backend.world_size
    chance = random.Random(me)
    others = [rank for rank in range(p) if rank != me]
    sizes = [0, 1, 50, 2000, 20_000]
    each = 400 // max(1, len(others))
    calls = [(rank, number) for rank in others for number in range(each)]

    def array(src: int, dst: int, number: int) -> np.ndarray:
        return np.full(sizes[number % len(sizes)], 100 * src + 10 * dst + number)

    works, arriving = [], []
    for rank, number in calls:
        tag = number % 3
        room = np.zeros(sizes[number % len(sizes)], np.int64)
        receive = backend.irecv(room, rank, tag=tag)
        works += [receive, backend.isend(array(me, rank, number), rank, tag=tag)]
        arriving.append((receive, room, rank, number))
    chance.shuffle(works)
    chance.shuffle(arriving)
    for work in works[::2]:
        work.wait()
    for receive, room, rank, number in arriving:
        assert receive.wait() is room
        check_same(room, array(rank, me, number), f"number {number} from rank {rank}")
    for work in works:
        work.wait()
        assert work.done()


def sent_before_received(backend: fc.Backend) -> None:
    """Hundreds of sends before the first receive, taken by tag in the reverse order."""
    me, p = backend.rank, backend.world_size
    if p == 1:
        return
    right, left = (me + 1) % p, (me - 1) % p
    sends = [backend.isend(np.full(1 + 3000 * (n % 2), n), right, tag=n) for n in range(300)]
    backend.barrier()
    for number in reversed(range(300)):
        size = 1 + 3000 * (number % 2)
        room = backend.recv(np.zeros(size, np.int64), left, tag=number)
        check_same(room, np.full(size, number), f"tag {number}")
    for send in reversed(sends):
        send.wait()


def messages_between_collectives(backend: fc.Backend) -> None:
    """Started collectives go on while messages are waited for, and the reverse."""
    me, p = backend.rank, backend.world_size
    if p == 1:
        return
    right, left = (me + 1) % p, (me - 1) % p
    for turn in range(10):
        sums = [fc.all_reduce(np.full(500, k), backend, async_op=True) for k in range(8)]
        receive = backend.irecv(np.zeros(3000, np.int64), left, tag=turn)
        more = [fc.all_gather(np.int64(me), backend, async_op=True) for _ in range(8)]
        backend.send(np.full(3000, turn), right, tag=turn)
        check_same(receive.wait(), np.full(3000, turn), "message")
        for work in more:
            check_same(work.wait(), np.arange(p), "all_gather")
        for number, work in enumerate(sums):
            check_same(work.wait(), np.full(500, p * number), "all_reduce")
