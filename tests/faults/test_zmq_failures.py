"""Ranks that are killed, stopped, interrupted or that raise: what the others get to know of it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time

import numpy as np
import pytest
from fsdpcore.transports.zmq.backend import ZmqBackend
from support.zmq_ranks import Line, Outcome, RankProcess, processes, ready, run_threads

import fsdpcore as fc

# They wait: for a death to be seen, for deadlines.
waits = pytest.mark.side_by_side(5)

VICTIM = 1


def collectives(backend: fc.Backend, line: Line) -> None:
    """All reduce until something happens."""
    array = np.ones(1000, np.float32)
    fc.all_reduce(array, backend)
    line.tell("ready")
    while True:
        fc.all_reduce(array, backend, out=array, op="max")


def large_collectives(backend: fc.Backend, line: Line) -> None:
    """The same with arrays that travel in segments."""
    array = np.ones(3_000_000, np.float32)
    fc.all_reduce(array, backend)
    line.tell("ready")
    while True:
        fc.all_reduce(array, backend, out=array, op="max")


def lonely_receive(backend: fc.Backend, line: Line) -> None:
    """Wait for a message from the victim that it never sends."""
    backend.barrier()
    line.tell("ready")
    if backend.rank == VICTIM:
        line.ask()
    backend.recv(np.empty(3), VICTIM)


def lonely_send(backend: fc.Backend, line: Line) -> None:
    """Wait for the victim to receive a large message."""
    backend.barrier()
    line.tell("ready")
    if backend.rank == VICTIM:
        line.ask()
    backend.send(np.ones(1_000_000), VICTIM)


def idle(backend: fc.Backend, line: Line) -> None:
    """Do nothing until the test says so, then a barrier."""
    backend.barrier()
    line.tell("ready")
    line.ask()
    backend.barrier()


def survivors(ranks: list[RankProcess]) -> list[Outcome]:
    return [rank.outcome() for number, rank in enumerate(ranks) if number != VICTIM]


@waits
@pytest.mark.parametrize("body", [collectives, large_collectives, lonely_receive, lonely_send])
def test_a_killed_rank_is_named_by_all_others(body: object) -> None:
    with processes(body, 3) as ranks:  # type: ignore[arg-type]
        ready(ranks)
        ranks[VICTIM].send_signal(signal.SIGKILL)
        for outcome in survivors(ranks):
            assert (outcome.error, outcome.culprit) == ("PeerFailedError", VICTIM), outcome
            assert f"rank {VICTIM} is lost" in outcome.text


@waits
def test_a_rank_killed_while_all_are_idle_is_named_at_the_next_call() -> None:
    with processes(idle, 3) as ranks:
        ready(ranks)
        ranks[VICTIM].send_signal(signal.SIGKILL)
        for number, rank in enumerate(ranks):
            if number != VICTIM:
                rank.say("go on")
        for outcome in survivors(ranks):
            assert (outcome.error, outcome.culprit) == ("PeerFailedError", VICTIM), outcome


def raising(backend: fc.Backend, line: Line) -> None:
    fc.all_reduce(np.ones(3), backend)
    if backend.rank == VICTIM:
        raise ValueError("the loss is not a number: ñ")
    fc.all_reduce(np.ones(3), backend)


@waits
def test_the_reason_of_a_rank_that_raises_reaches_all() -> None:
    with processes(raising, 3) as ranks:
        assert ranks[VICTIM].outcome().error == "ValueError"
        for outcome in survivors(ranks):
            assert (outcome.error, outcome.culprit) == ("PeerFailedError", VICTIM), outcome
            assert f"rank {VICTIM} failed: ValueError: the loss is not a number: ñ" in outcome.text


def test_a_link_that_is_cut_while_both_ranks_live_names_the_two_everywhere() -> None:
    told = threading.Barrier(4)

    def body(backend: ZmqBackend) -> tuple[int, int] | None:
        backend.barrier()
        if backend.rank == 0:
            descriptors = backend.control.links._inbound.ranks
            (descriptor,) = [found for found, rank in descriptors.items() if rank == 1]
            with socket.socket(fileno=os.dup(descriptor)) as cut:
                cut.shutdown(socket.SHUT_RDWR)
        with pytest.raises(fc.PeerFailedError) as error:
            backend.recv(np.empty(3), (backend.rank + 2) % 4)
        told.wait(15)  # nobody hears of it from ranks that leave: they stay
        assert "the connection between rank 0 and rank 1 is lost" in str(error.value)
        return error.value.pair

    assert run_threads(body, 4) == [Outcome((0, 1))] * 4


def hanging(backend: fc.Backend, line: Line) -> None:
    backend.barrier()
    line.tell("ready")
    line.ask()
    fc.all_reduce(np.ones(3), backend, timeout=1.5)


@waits
def test_a_rank_that_hangs_is_named_at_the_deadline() -> None:
    with processes(hanging, 3) as ranks:
        ready(ranks)
        ranks[VICTIM].send_signal(signal.SIGSTOP)
        for number, rank in enumerate(ranks):
            if number != VICTIM:
                rank.say("go on")
        outcomes = survivors(ranks)
        # Who is second may hear of the other's timeout first, if the machine is busy.
        assert {outcome.error for outcome in outcomes} <= {"CommTimeoutError", "PeerFailedError"}
        assert "CommTimeoutError" in {outcome.error for outcome in outcomes}
        for outcome in outcomes:
            assert f"rank {VICTIM} is missing: no answer" in outcome.text, outcome
            assert "all_reduce #2 on ranks [0, 1, 2]" in outcome.text


def hanging_receive(backend: fc.Backend, line: Line) -> None:
    backend.barrier()
    line.tell("ready")
    line.ask()
    if backend.rank == 0:
        backend.recv(np.empty(3), VICTIM, tag=5, timeout=1.0)


@waits
def test_a_receive_from_a_rank_that_hangs_names_it() -> None:
    with processes(hanging_receive, 2) as ranks:
        ready(ranks)
        ranks[VICTIM].send_signal(signal.SIGSTOP)
        ranks[0].say("go on")
        (outcome,) = survivors(ranks)
        assert outcome.error == "CommTimeoutError", outcome
        assert f"from rank {VICTIM} (tag 5) on rank 0 of 2 timed out after 1 s" in outcome.text
        assert f"rank {VICTIM}: no answer" in outcome.text


@waits
@pytest.mark.parametrize("body", [collectives, large_collectives])
def test_a_rank_interrupted_in_a_collective_tells_the_others(body: object) -> None:
    with processes(body, 3) as ranks:  # type: ignore[arg-type]
        ready(ranks)
        ranks[VICTIM].send_signal(signal.SIGINT)
        check_interrupted(ranks)


@waits
def test_a_rank_interrupted_outside_of_the_library_tells_the_others() -> None:
    with processes(idle, 3) as ranks:
        ready(ranks)
        ranks[0].say("go on")  # and waits in the library when the news come
        ranks[VICTIM].send_signal(signal.SIGINT)
        ranks[2].say("go on")
        check_interrupted(ranks)


def check_interrupted(ranks: list[RankProcess]) -> None:
    assert ranks[VICTIM].outcome().error == "KeyboardInterrupt"
    for outcome in survivors(ranks):
        assert (outcome.error, outcome.culprit) == ("PeerFailedError", VICTIM), outcome
        assert "KeyboardInterrupt" in outcome.text


def computing(backend: fc.Backend, line: Line) -> None:
    backend.barrier()
    line.tell("ready")
    if backend.rank == VICTIM:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:  # holds the interpreter lock
            sum(range(1000))
    backend.barrier()


@waits
def test_a_rank_that_computes_is_not_taken_for_dead() -> None:
    with processes(computing, 2) as ranks:
        ready(ranks)
        assert [rank.outcome().error for rank in ranks] == ["", ""]


@waits
def test_a_rank_that_was_stopped_names_itself_when_it_goes_on() -> None:
    with processes(collectives, 3, heartbeat=0.5) as ranks:
        ready(ranks)
        ranks[VICTIM].send_signal(signal.SIGSTOP)
        survivors(ranks)
        ranks[VICTIM].send_signal(signal.SIGCONT)
        outcome = ranks[VICTIM].outcome()
        assert (outcome.error, outcome.culprit) == ("PeerFailedError", VICTIM), outcome
        assert "its process was stopped" in outcome.text


def holding(backend: fc.Backend, line: Line) -> None:
    """The victim lets none of its threads have the interpreter."""
    backend.barrier()
    line.tell("ready")
    if backend.rank == VICTIM:
        ctypes.PyDLL(None).usleep(900_000)
    backend.recv(np.empty(1), 1 - backend.rank)


@waits
def test_a_rank_that_computed_while_another_one_died_names_that() -> None:
    with processes(holding, 2, heartbeat=0.5) as ranks:
        ready(ranks)
        ranks[0].send_signal(signal.SIGKILL)
        outcome = ranks[VICTIM].outcome()
        assert (outcome.error, outcome.culprit) == ("PeerFailedError", 0), outcome


def not_closing(backend: fc.Backend, line: Line) -> None:
    backend.barrier()
    line.tell("ready")
    if backend.rank == VICTIM:
        # What it has sent may die with it, so it waits until nobody needs that any more.
        for rank in set(range(backend.world_size)) - {VICTIM}:
            backend.recv(np.empty(1), rank)
        line.tell(Outcome("gone"))
        os._exit(0)
    backend.send(np.zeros(1), VICTIM)
    backend.barrier()


@waits
def test_a_rank_that_exits_without_closing_is_lost() -> None:
    with processes(not_closing, 3) as ranks:
        ready(ranks)
        for outcome in survivors(ranks):
            assert (outcome.error, outcome.culprit) == ("PeerFailedError", VICTIM), outcome


def many(backend: fc.Backend, line: Line) -> int:
    backend.barrier()
    total = fc.all_reduce(np.array([backend.rank]), backend)
    threads = sum(thread.name.startswith("fsdpcore") for thread in threading.enumerate())
    assert threads == 1
    return int(total[0])


@waits
def test_sixteen_ranks() -> None:
    with processes(many, 16) as ranks:
        assert [rank.outcome() for rank in ranks] == [Outcome(120)] * 16


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (True, "rank 3 failed: ValueError: it is unwell"),
        (
            False,
            "rank 3 has left the job while rank 0 waits in recv of float64 (1,) from rank 3 "
            "(tag 0)",
        ),
    ],
)
def test_ranks_that_have_no_link_hear_of_each_others_end(fails: bool, words: str) -> None:
    """By way of others, who are not taken for the one that it is about."""
    heard = threading.Event()

    def body(backend: ZmqBackend) -> tuple[str, int | None] | None:
        assert 3 not in backend.control.watch.neighbours or backend.rank != 0
        if backend.rank == 3 and fails:
            raise ValueError("it is unwell")
        if backend.rank == 0:
            try:
                backend.recv(np.empty(1), 3)
            except fc.PeerFailedError as error:
                return str(error), error.rank
            finally:
                heard.set()
        elif backend.rank != 3:
            assert heard.wait(15)
        return None

    assert run_threads(body, 8, timeout=15)[0] == Outcome((words, 3))
