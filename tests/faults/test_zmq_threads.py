"""Threads of a rank that wait at the same time, and messages that flow both ways at once."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsdpcore.transports.zmq.backend import ZmqBackend
from support.zmq_ranks import PATIENCE, Line, Outcome, processes, run_threads

import fsdpcore as fc
from fsdpcore.core.errors import CommTimeoutError


def results(outcomes: list[Outcome]) -> list[Any]:
    assert [outcome.error for outcome in outcomes] == [""] * len(outcomes), outcomes
    return [outcome.result for outcome in outcomes]


def in_threads(count: int, task: Any) -> None:
    """Call ``task(number)`` in threads at the same time; raise what the first of them raised."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            task(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("size", [10, 50_000])
@pytest.mark.parametrize("count", [2, 5])
def test_threads_that_play_ping_pong_at_the_same_time(size: int, count: int) -> None:
    def body(backend: ZmqBackend) -> None:
        def play(tag: int) -> None:
            data, other = np.zeros(size), 1 - backend.rank
            for step in range(100):
                if backend.rank == step % 2:
                    backend.send(data + step, other, tag=tag)
                else:
                    backend.recv(data, other, tag=tag)
                    assert (data == step).all()
                    data = np.zeros(size)

        in_threads(count, play)

    results(run_threads(body, 2))


def test_a_thread_that_waits_long_does_not_hold_up_one_that_waits_short() -> None:
    # The first one polls the sockets; the others' messages come through it, or after its end.
    def body(backend: ZmqBackend) -> None:
        other = 1 - backend.rank

        def task(number: int) -> None:
            if number == 0:
                backend.recv(np.empty(3), other, tag=99)
                return
            for _ in range(50):
                backend.send(np.full(3, number), other, tag=number)
                out = np.empty(3, np.int64)
                backend.recv(out, other, tag=number)
                assert (out == number).all()
            if number == 1:
                backend.send(np.empty(3), other, tag=99)

        in_threads(4, task)

    results(run_threads(body, 2))


def test_messages_that_another_thread_sends_wake_the_one_that_polls() -> None:
    # Every send looks at the socket, too, and finds the message that the other thread waits for.
    def body(backend: ZmqBackend) -> None:
        other, done = 1 - backend.rank, threading.Event()

        def task(number: int) -> None:
            if number == 0:
                for _ in range(300):
                    backend.recv(np.empty(3), other, tag=1)
                done.set()
            elif number == 1:
                for _ in range(300):
                    backend.send(np.empty(3), other, tag=1)
            else:
                while not done.is_set():
                    backend.send(np.empty(0), other, tag=2)
                    time.sleep(0.0001)

        in_threads(3, task)
        backend.barrier()

    results(run_threads(body, 2))


def test_data_moves_while_nobody_waits() -> None:
    def body(backend: ZmqBackend) -> bool:
        other = 1 - backend.rank
        out = np.empty(5_000_000)
        works = [
            backend.irecv(out, other),
            backend.isend(np.full(5_000_000, float(backend.rank)), other),
        ]
        end = time.monotonic() + PATIENCE
        while not all(work.done() for work in works) and time.monotonic() < end:
            time.sleep(0.001)  # no call into the library but this one, which only looks
        backend.barrier()
        return bool((out == other).all())

    assert results(run_threads(body, 2)) == [True, True]


def test_a_wait_that_ends_at_its_deadline_leaves_the_rest_working() -> None:
    def body(backend: ZmqBackend) -> None:
        other = 1 - backend.rank
        work = backend.irecv(np.empty(3), other, tag=1)
        for limit in (0.0, 0.01, 0.1):
            with pytest.raises(CommTimeoutError):
                work.wait(timeout=limit)
        backend.barrier()
        backend.send(np.ones(3), other, tag=1)
        work.wait()

    results(run_threads(body, 2))


# Memory.

MIB = 1 << 20
EACH = 32 * MIB
AT_ONCE = 2  # messages from one rank to another


def memory(field: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if field in line]
    return int(line.split()[1]) * 1024


def exchange(backend: fc.Backend, line: Line) -> tuple[bool, int]:
    """Send large messages between all pairs, both ways; the memory that it took at its worst."""
    others = [rank for rank in range(backend.world_size) if rank != backend.rank]
    sent = np.full(EACH, backend.rank + 1, np.uint8)
    outs = {(rank, tag): np.ones(EACH, np.uint8) for rank in others for tag in range(AT_ONCE)}
    backend.barrier()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    works = [backend.isend(sent, rank, tag=tag) for rank, tag in outs]
    works += [backend.irecv(out, rank, tag=tag) for (rank, tag), out in outs.items()]
    for work in works:
        work.wait()
    worst = memory("VmHWM") - before
    return all((out == rank + 1).all() for (rank, _), out in outs.items()), worst


def test_large_messages_between_all_pairs_take_no_more_memory_than_the_windows() -> None:
    with processes(exchange, 3) as ranks:
        for rank in ranks:
            outcome = rank.outcome()
            assert outcome.error == "", outcome
            right, worst = outcome.result
            assert right
            window = 8 * MIB  # on each of two connections; of 128 MiB that come in all
            assert worst < 2 * window + 24 * MIB
