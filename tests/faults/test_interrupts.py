"""A signal's exception that the program catches: a collective was left, or never began."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from typing import Any

import numpy as np
import pytest
from fsdpcore.transports.zmq.backend import ZmqBackend
from fsdpcore.transports.zmq.outlet import FrameSource
from support.interrupts import Interrupt
from support.zmq_ranks import run_threads

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


def _overwritten(
    backend: fc.Backend, method: str, interrupt: Interrupt, caught: threading.Event
) -> Any:
    """Rank 0 overwrites what it was interrupted to send; return what rank 1 gets of it then."""
    array = np.full(1 << 20, backend.rank, np.uint8)
    if backend.rank == 1:
        assert caught.wait(10)
        try:
            return np.unique(backend.recv(array, 0, timeout=0.01)).tolist()
        except fc.CommunicationError:
            return "told"
    arguments = (array, 1) if method == "send" else (array, 1, np.empty_like(array), 1)
    with contextlib.suppress(fc.CommunicationError):
        interrupt.during(lambda: getattr(backend, method)(*arguments, timeout=0.01))
    array[:] = 2
    caught.set()
    return interrupt.raised


def _check_overwritten(method: str, interrupt: Interrupt) -> int:
    args = (method, interrupt, threading.Event())
    raised, got = fc.launch(_overwritten, world_size=2, args=args, transport="sim")
    assert got in ("told", [0]), vars(interrupt)
    return int(raised)


@pytest.mark.parametrize("method", ["send", "sendrecv"])
def test_what_was_being_sent_is_not_seen_to_change(method: str) -> None:
    moment = 0
    while _check_overwritten(method, Interrupt(moment)):
        moment += 1
    assert moment > 50


def test_nor_is_it_if_the_first_interrupt_is_being_handled() -> None:
    for begun in itertools.count():
        raised = [_check_overwritten("send", Interrupt(moment, begun)) for moment in (0, 8)]
        if not all(raised):
            break
    assert begun > 50


def test_a_withdrawal_that_is_interrupted_is_made_again() -> None:
    """Nothing may read the array any more that the program gets back."""
    calls = []

    def body(backend: ZmqBackend) -> None:
        if backend.rank == 0:
            backend.barrier()
            outlet = backend.control.peer(1).channel.outlet
            withdraw = outlet.withdraw

            def interrupted(owner: FrameSource) -> None:
                calls.append(owner)
                if len(calls) == 1:
                    raise KeyboardInterrupt
                withdraw(owner)

            outlet.withdraw = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                backend.send(np.zeros(1 << 20), 1, timeout=0.01)
        else:
            backend.barrier()
            backend.recv(np.zeros(1), 0, tag=1)

    _, told = run_threads(body, 2, shm="off")
    assert told.error == "PeerFailedError"
    assert len(calls) == 2


def _small(backend: fc.Backend, interrupt: Interrupt) -> tuple[int, bool]:
    values = np.zeros(1, np.int64)
    for _ in range(3):  # a fourth takes the short way
        fc.all_reduce(values, backend)
    with contextlib.suppress(fc.CommunicationError):
        if backend.rank == 0:
            fc.all_reduce(values, backend)
        else:
            interrupt.during(lambda: fc.all_reduce(values, backend))
    return interrupt.raised, backend.order.lock.locked()


def test_a_small_call_that_is_interrupted_leaves_no_lock_behind() -> None:
    for moment in itertools.count():
        args = (Interrupt(moment),)
        raised, locked = fc.launch(_small, world_size=2, args=args, transport="sim")[1]
        assert not locked, moment
        if not raised:
            break
    assert moment > 10
