"""Bodies: messages between ranks that share memory. Each rank sends to all others."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fsdpcore.transports.zmq import memory as zmq_memory
from support import oracle
from support.arrays import check_same
from support.bodies import memory_failures, soak
from support.published import OUTS, SOURCES, values_of

import fsdpcore as fc

# What one rank sends to another besides data: headers, signatures, acknowledgements.
FRAME_BYTES = 100


@contextlib.contextmanager
def small_pieces() -> Iterator[None]:
    """In this process, short messages go through memory as well, in many pieces and turns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq_memory, "_LEAST_BYTES", -1)
        patch.setattr(zmq_memory, "_PIECE_BYTES", 1000)
        patch.setattr(zmq_memory, "_AHEAD_BYTES", 2000)
        patch.setattr(zmq_memory, "_COPY_BYTES", 5000)
        yield


def in_small_pieces(backend: fc.Backend, body: Callable[..., None], *args: Any) -> None:
    """Run another body so."""
    with small_pieces():
        body(backend, *args)


def any_place(backend: fc.Backend, seed: int, count: int, largest: int, *, small: bool) -> None:
    """Messages of all dtypes, from arrays and into arrays in any place, many at once."""
    with small_pieces() if small else contextlib.nullcontext():
        for number in range(count):
            _round(backend, random.Random(f"{seed}/{number}"), largest, f"{number}")


def _round(backend: fc.Backend, chance: random.Random, largest: int, salt: str) -> None:
    """All draw the same: which messages there are, and whether receives are posted first."""
    me, p = backend.rank, backend.world_size
    messages = []
    for tag in range(chance.randrange(1, 12)):
        src, dst = chance.sample(range(p), 2)
        dtype = chance.choice(oracle.DTYPES)
        size = chance.choice([0, 1, 7, chance.randrange(largest), chance.randrange(largest)])
        places = chance.choice(list(SOURCES)), chance.choice(list(OUTS))
        messages.append((src, dst, tag // 2, (size // dtype.itemsize,), dtype, places, tag))
    sends, receives = [m for m in messages if m[0] == me], [m for m in messages if m[1] == me]
    rooms, works = [], []
    for first in chance.choice([(True, False), (False, True)]):
        if first:
            for _, dst, tag, shape, dtype, places, number in sends:
                values = values_of(me, shape, dtype, f"{salt}/{number}")
                works.append(backend.isend(SOURCES[places[0]](backend, values), dst, tag=tag))
            continue
        for src, _, tag, shape, dtype, places, number in receives:
            room = OUTS[places[1]](backend, np.zeros(shape, dtype))
            rooms.append((room, src, number))
            works.append(backend.irecv(room, src, tag=tag))
    for work in works:
        work.wait()
    for room, src, number in rooms:
        expected = values_of(src, room.shape, room.dtype, f"{salt}/{number}")
        check_same(np.array(room), expected, f"message {number} of rank {src}")


def both_ways_at_once(backend: fc.Backend, size: int = 700_001) -> None:
    """More than fits into the memory for pieces, from all to all, before anybody receives."""
    me, p = backend.rank, backend.world_size
    others = [rank for rank in range(p) if rank != me]
    tags = (3, 1, 4, 0, 5, 2)
    works = [
        backend.isend(values_of(me, (size + tag,), oracle.DTYPES[1], f"{dst}"), dst, tag=tag)
        for tag in range(len(tags))
        for dst in others
    ]
    backend.barrier()
    for tag in tags:
        for src in others:
            room = backend.recv(np.zeros(size + tag, oracle.DTYPES[1]), src, tag=tag)
            check_same(room, values_of(src, room.shape, room.dtype, f"{me}"), f"{tag} of {src}")
    for work in works:
        work.wait()


class _Counting:
    """Counts the bytes that go over the link to a rank."""

    def __init__(self, backend: Any, rank: int) -> None:
        self._outlet = backend.control.peer(rank).channel.outlet
        self._original = self._outlet._send
        self._outlet._send = self._send
        self.sent = 0

    def _send(self, header: bytes, payload: Any, copy: bool = True) -> Any:
        self.sent += len(header) + (0 if payload is None else len(payload))
        return self._original(header, payload, copy)

    def stop(self) -> None:
        self._outlet._send = self._original


def bytes_on_the_socket(backend: Any, shm: bool) -> None:
    """The payload of large messages goes through memory, or with ``shm=off`` the socket."""
    peer = 1 - backend.rank
    counting = _Counting(backend, peer)
    sizes = (300_000, 1 << 20, (5 << 20) + 3)
    for size in sizes:
        for make in (np.empty, backend.empty):
            data, out = make(size, np.uint8), make(size, np.uint8)
            data[...] = np.resize(np.arange(251, dtype=np.uint8), size)
            before = counting.sent
            work = backend.isend(data, peer)
            backend.recv(out, peer)
            work.wait()
            backend.barrier()
            sent = counting.sent - before
            check_same(out, data, f"{size} bytes")
            if shm:
                assert sent <= 12 * FRAME_BYTES, sent
            else:
                assert sent >= size, sent
    small = np.zeros(60_000, np.uint8)  # goes at once, whoever receives it
    before = counting.sent
    backend.send(small, peer)
    assert counting.sent - before >= small.size
    backend.recv(small, peer)
    counting.stop()


def leave_nothing(backend: Any, count: int) -> dict[str, list[int]]:
    """Very many messages; returns what this process had after the first tenth, and at the end."""
    with small_pieces():
        _many(backend, count // 10)
        before = soak._settled(backend, threads=1000)
        pool = backend.memory._pool.nbytes
        _many(backend, count)
        after = soak._settled(backend, before["threads"])
    for peer in backend.control.peers.values():
        lending = peer.channel._lending
        end = time.monotonic() + 20
        while not lending.flushed and time.monotonic() < end:
            time.sleep(0.01)  # the last acknowledgement may be on its way
        assert lending.flushed
        assert (lending._first, lending._ahead, lending._withdrawn) == ({}, 0, set())
        assert not peer.channel._sending
        assert not peer.channel._receiving
    assert backend.memory._pool.nbytes == pool
    return {name: [before[name], after[name]] for name in before}


def _many(backend: fc.Backend, count: int) -> None:
    p = backend.world_size
    right, left = (backend.rank + 1) % p, (backend.rank - 1) % p
    for number in range(count // 2):
        size = 37 * (number % 97)
        lent = backend.empty(size, np.uint8)
        works = [backend.isend(lent, right), backend.isend(np.zeros(size, np.uint8), right)]
        for _ in works:
            backend.recv(np.empty(size, np.uint8), left)
        for work in works:
            work.wait()


def far_inside(backend: fc.Backend) -> None:
    """From behind the second GiB of a segment, of which only the end is ever touched."""
    if backend.rank == 0:
        room = backend.empty((1 << 31) + (1 << 20), np.uint8)
        data = room[(1 << 31) + 5 :]
        data[...] = np.arange(data.size, dtype=np.uint32)
        backend.send(data, 1)
    else:
        out = backend.recv(np.empty((1 << 20) - 5, np.uint8), 0)
        check_same(out, np.arange(out.size, dtype=np.uint32).astype(np.uint8), "far inside")


def without(backend: fc.Backend, culprit: int, call: str, error: OSError) -> list[str]:
    """One rank can map or make no memory; returns what went wrong, if that is an error."""
    peer = 1 - backend.rank
    with (
        memory_failures.without(call, error)
        if backend.rank == culprit
        else contextlib.nullcontext()
    ):
        try:
            for size in (400_000, 5_000_000):
                work = backend.isend(values_of(backend.rank, (size,), oracle.DTYPES[1]), peer)
                out = backend.recv(np.zeros(size, oracle.DTYPES[1]), peer)
                work.wait()
                check_same(out, values_of(peer, (size,), oracle.DTYPES[1]), f"{size} bytes")
        except (fc.ConfigError, fc.PeerFailedError, fc.CommunicationError) as caught:
            return [f"{type(caught).__name__}: {caught}"]
    return []
