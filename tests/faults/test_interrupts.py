"""A signal's exception that the program catches: a collective was left, or never began."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest

import fsdpcore as fc

CALLS = 20_000  # more than fit the time until the interrupt


def _interrupted(backend: fc.Backend) -> str:
    def raise_it(*ignored: Any) -> None:
        raise KeyboardInterrupt

    values = np.zeros(1, np.int64)
    fc.all_reduce(values, backend)
    if backend.rank == 1:
        signal.signal(signal.SIGALRM, raise_it)
        signal.setitimer(signal.ITIMER_REAL, 0.02)
    before = backend.order.issued
    try:
        while backend.order.issued < CALLS:
            before = backend.order.issued
            fc.all_reduce(values, backend)
    except KeyboardInterrupt:
        if backend.root.failure is not None:
            return "broken"
        if backend.order.issued == before or backend.root.recorder._entries[-1].end:
            return "between two calls"
        return "left, and nobody knows"
    except fc.PeerFailedError:
        return "told"
    return "done"


@pytest.mark.parametrize("attempt", range(2))
def test_a_caught_interrupt_leaves_nothing_half_done(attempt: int) -> None:
    """The rank goes on to its end: with the other, or with the job broken for both."""
    told, interrupted = fc.launch(_interrupted, world_size=2, transport="zmq", timeout=60)
    assert (told, interrupted) in [
        ("told", "broken"),
        ("told", "between two calls"),  # it leaves the job then
        ("done", "done"),
        ("told", "done"),
    ]


def _interrupted_send(backend: fc.Backend) -> str:
    def raise_it(*ignored: Any) -> None:
        raise KeyboardInterrupt

    large = np.zeros(3 << 20, np.uint8)
    backend.barrier()
    if backend.rank == 0:
        signal.signal(signal.SIGALRM, raise_it)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            backend.send(large, 1)
        except KeyboardInterrupt:
            assert backend.root.failure is not None, "the other one has half of a message"
            return str(backend.root.failure)
        return "sent"
    try:
        backend.recv(large, 0, tag=1)  # which is never sent
    except fc.PeerFailedError as error:
        return str(error)
    return "received"


@pytest.mark.parametrize("shm", ["auto", "off"])
def test_a_message_that_is_left_half_done_ends_the_job(shm: str) -> None:
    """Nobody waits for the rest of it, nor takes its offer for the next message."""
    options = {"transport": "zmq", "timeout": 60, "shm": shm}
    sender, receiver = fc.launch(_interrupted_send, world_size=2, **options)
    assert "was left half done: KeyboardInterrupt" in sender
    assert receiver.startswith("rank 0 failed: ")
