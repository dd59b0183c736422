"""Ranks that die, leave or give up while messages between them go through memory."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from fsdpcore.transports.memory.shared import SharedMemory
from fsdpcore.transports.zmq import memory as zmq_memory
from fsdpcore.transports.zmq.backend import ZmqBackend
from support.jobs import SOON
from support.zmq_ranks import Line, processes, ready, run_threads

import fsdpcore as fc

pytestmark = pytest.mark.skipif(
    not SharedMemory.available, reason="this system has no memfd_create"
)

VICTIM = 1
SIZE = 10_000_000


def exchanging(backend: fc.Backend, line: Line) -> None:
    """Send and receive in both ways, through blocks and from lent arrays, for ever."""
    peer = 1 - backend.rank
    arrays = [np.zeros(SIZE, np.uint8), backend.empty(SIZE, np.uint8)]
    arrays[1][...] = 0
    out = np.empty(SIZE, np.uint8)
    for number in range(10**9):
        works = [backend.isend(array, peer) for array in arrays]
        for _ in arrays:
            backend.recv(out, peer)
        for work in works:
            work.wait()
        if number == 1:
            line.tell("ready")


def test_a_rank_killed_while_messages_go_both_ways() -> None:
    with processes(exchanging, 2, shm="on") as ranks:
        ready(ranks)
        ranks[VICTIM].send_signal(signal.SIGKILL)
        outcome = ranks[0].outcome()
        assert (outcome.error, outcome.culprit) == ("PeerFailedError", VICTIM), outcome
        assert f"rank {VICTIM} is lost" in outcome.text


def dies_between(backend: fc.Backend, line: Line) -> None:
    """The victim has offered arrays and is gone before anybody looks for its memory."""
    if backend.rank == VICTIM:
        works = [
            backend.isend(array, 0, tag=tag)
            for tag, array in enumerate((np.zeros(SIZE), backend.empty(SIZE, np.float64)))
        ]
        backend.send(np.zeros(3), 0, tag=9)  # when this is there, so are the offers
        line.tell("sent")
        line.ask()
        assert works
        return
    backend.recv(np.empty(3), VICTIM, tag=9)
    line.tell("offered")
    pid = int(line.ask())
    end = time.monotonic() + SOON
    while os.path.exists(f"/proc/{pid}/fd/0") and time.monotonic() < end:
        time.sleep(0.01)
    backend.recv(np.empty(SIZE), VICTIM, tag=int(line.ask()))


@pytest.mark.parametrize("tag", [0, 1], ids=["blocks", "lent"])
def test_a_rank_killed_before_its_memory_was_mapped(tag: int) -> None:
    with processes(dies_between, 2, shm="auto") as ranks:
        assert ranks[VICTIM].hear() == "sent"
        assert ranks[0].hear() == "offered"
        ranks[VICTIM].send_signal(signal.SIGKILL)
        ranks[0].say(ranks[VICTIM].pid)
        ranks[0].say(tag)
        outcome = ranks[0].outcome()
        assert (outcome.error, outcome.culprit) == ("PeerFailedError", VICTIM), outcome


def receiver_dies(backend: fc.Backend, line: Line) -> None:
    """The victim wants a message of many pieces, and is gone before it has read them."""
    if backend.rank == VICTIM:
        zmq_memory.Borrowing.read = _die  # type: ignore[method-assign, assignment]
        backend.recv(np.empty(SIZE), 0)
        return
    backend.send(np.zeros(SIZE), VICTIM)


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_receiver_that_dies_in_the_middle() -> None:
    with processes(receiver_dies, 2, shm="on") as ranks:
        outcome = ranks[0].outcome()
        assert (outcome.error, outcome.culprit) == ("PeerFailedError", VICTIM), outcome
        assert f"rank {VICTIM} is lost" in outcome.text


@pytest.mark.parametrize("lent", [True, False])
def test_an_array_that_changes_after_its_send_has_timed_out_is_not_received(lent: bool) -> None:
    def body(backend: ZmqBackend) -> str:
        if backend.rank == 0:
            data = backend.empty(SIZE, np.uint8) if lent else np.empty(SIZE, np.uint8)
            data[...] = 1
            backend.send(np.zeros(3), 1, tag=9)
            told = "sent in time"
            try:
                backend.send(data, 1, timeout=0.05)
            except fc.CommTimeoutError as error:
                told = str(error)
            data[...] = 2
            return told
        backend.recv(np.empty(3), 0, tag=9)
        time.sleep(0.06)  # the receive comes around the time at which the send is given up
        out = np.zeros(SIZE, np.uint8)
        try:
            backend.recv(out, 0)
        except fc.PeerFailedError as error:
            return str(error)
        assert (out == 1).all()
        return "in time"

    for _ in range(3):
        first, second = run_threads(body, 2)
        assert (first.error, second.error) == ("", ""), (first, second)
        if second.result != "in time":
            assert "rank 0 failed" in second.result, second
            assert "timed out" in first.result, first


def test_a_receiver_that_leaves_in_the_middle_of_a_lent_array(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_memory, "_COPY_BYTES", 100)

    def body(backend: ZmqBackend) -> str:
        if backend.rank == 0:
            data = backend.empty(SIZE, np.uint8)
            data[...] = 1
            with pytest.raises(fc.PeerFailedError) as error:
                backend.send(data, 1)
            return str(error.value)
        out = np.zeros(SIZE, np.uint8)
        backend.irecv(out, 0)
        while out[0] == 0:
            time.sleep(0.001)
        backend.close()
        seen = out.sum(dtype=np.int64)
        time.sleep(0.1)
        assert out.sum(dtype=np.int64) == seen, "written to after close()"
        return ""

    first, second = run_threads(body, 2)
    waiting = f"rank 0 waits in send of uint8 ({SIZE},) to rank 1 (tag 0)"
    assert first.result == f"rank 1 has left the job while {waiting}", first
    assert second.error == "", second


def test_two_that_leave_with_lent_arrays_for_each_other_do_not_wait_for_ever() -> None:
    both = threading.Barrier(2)

    def body(backend: ZmqBackend) -> None:
        lent = backend.empty(SIZE, np.uint8)
        backend.isend(lent, 1 - backend.rank)
        backend.isend(np.zeros(SIZE, np.uint8), 1 - backend.rank, tag=1)
        backend.barrier()
        both.wait(10)  # who is still in the barrier would hear that its messages are not taken

    assert [outcome.error for outcome in run_threads(body, 2)] == ["", ""]


@pytest.mark.parametrize("lent", [True, False])
def test_close_waits_until_what_was_sent_is_taken(lent: bool) -> None:
    def body(backend: ZmqBackend) -> bool:
        if backend.rank == 0:
            data = backend.empty(SIZE, np.uint8) if lent else np.empty(SIZE, np.uint8)
            data[...] = np.arange(SIZE, dtype=np.uint32)
            backend.isend(data, 1)
            return True
        time.sleep(0.2)  # the sender closes meanwhile
        out = np.zeros(SIZE, np.uint8)
        backend.recv(out, 0)
        return bool((out == np.arange(SIZE, dtype=np.uint32).astype(np.uint8)).all())

    outcomes = run_threads(body, 2)
    assert [outcome.result for outcome in outcomes] == [True, True], outcomes
