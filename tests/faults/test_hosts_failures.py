"""Ranks, hosts and links that are lost: who is told, how soon, and whom it is laid to."""

from __future__ import annotations

import ctypes
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.hosts.lab import Lab
from support.hosts.middle import Flow, Middle
from support.hosts.ranks import on_hosts
from support.zmq_ranks import Line, Outcome, RankProcess, ready

import fsdpcore as fc

pytestmark = pytest.mark.usefixtures("needs_hosts")
waits = pytest.mark.side_by_side(4)

VICTIM = 2  # the first rank of the second host
HEARTBEAT = 1.0
# Seconds in which all survivors have an error: 2, and half of one in which a rank that closes waits
# for others to read what it said of it. As much again is for a busy machine.
SOON = 2 * (2.0 + 0.5)


def exchanging(backend: fc.Backend, line: Line) -> None:
    """All reduce now and then until something happens."""
    fc.all_reduce(np.ones(3), backend)
    line.tell("ready")
    while True:
        fc.all_reduce(np.ones(1000), backend)
        time.sleep(0.02)


def streaming(backend: fc.Backend, line: Line) -> None:
    """The same with arrays that travel in segments."""
    array = np.ones(500_000)
    fc.all_reduce(array, backend)
    line.tell("ready")
    while True:
        fc.all_reduce(array, backend, out=array, op="max")


def receiving(backend: fc.Backend, line: Line) -> None:
    """Wait for a message of the other host that never comes."""
    backend.barrier()
    line.tell("ready")
    backend.recv(np.empty(3), (backend.rank + 2) % 4)


def idle(backend: fc.Backend, line: Line) -> None:
    """Call nothing until long after the failure, then a barrier."""
    backend.barrier()
    line.tell("ready")
    line.ask()
    backend.barrier()


def outcomes(ranks: list[RankProcess], since: float, limit: float = SOON) -> list[Outcome]:
    """What became of ranks; none of them may have taken long, or be left."""
    found = [rank.outcome() for rank in ranks]
    assert {one.error for one in found} == {"PeerFailedError"}, found
    took = max(one.ended for one in found) - since
    assert took < limit, (took, found)
    return found


def blamed(found: list[Outcome]) -> set[int | None]:
    for one in found:
        assert f"rank {one.culprit}" in one.text, one
    return {one.culprit for one in found}


def await_introduction(ranks: Sequence[RankProcess]) -> None:
    """Wait until rank 1 has told rank 0 who it is: it is connected, and both only wait.

    Who waits sleeps whenever one looks. Who is short of a processor does not.
    """
    table = Path(f"/proc/{ranks[1].pid}/net/tcp")
    while all(line.split()[3] != "01" for line in table.read_text().splitlines()[1:]):
        time.sleep(0.05)
    quiet = 0
    while quiet < 20:
        time.sleep(0.05)
        quiet = quiet + 1 if all(rank.sleeps for rank in ranks[:2]) else 0


@waits
@pytest.mark.parametrize("all_of_host", [False, True])
def test_a_killed_rank_is_named_on_both_hosts(all_of_host: bool) -> None:
    with Lab(2) as lab, on_hosts(exchanging, lab, 2, heartbeat=HEARTBEAT) as ranks:
        since = ready(ranks)
        if all_of_host:
            lab.kill(1)
            assert blamed(outcomes(ranks[:2], since)) <= {2, 3}
        else:
            ranks[VICTIM].send_signal(signal.SIGKILL)
            assert blamed(outcomes([*ranks[:2], ranks[3]], since)) == {VICTIM}
        assert lab.pids() == []


@waits
@pytest.mark.parametrize(
    ("how", "body"),
    [("cut", exchanging), ("silence", streaming), ("silence", receiving), ("vanish", receiving)],
)
def test_a_lost_host_is_named(body: object, how: str) -> None:
    with Lab(2) as lab, on_hosts(body, lab, 2, heartbeat=HEARTBEAT) as ranks:  # type: ignore[arg-type]
        since = ready(ranks)
        getattr(lab, how)(1)
        culprits = blamed(outcomes(ranks[:2], since))
        assert len(culprits) == 1, "both say the same"
        assert culprits <= {2, 3}
        if how != "vanish":  # to those that are cut off, it is the others who are lost
            assert blamed(outcomes(ranks[2:], since)) <= {0, 1}
        assert lab.pids() == []


@waits
def test_a_host_that_is_lost_while_nobody_calls_is_known_to_the_next_call() -> None:
    with Lab(2) as lab, on_hosts(idle, lab, 2, heartbeat=HEARTBEAT) as ranks:
        ready(ranks)
        lab.silence(1)
        time.sleep(2.5 * HEARTBEAT)
        for rank in ranks:
            rank.say("go on")
        since = time.monotonic()
        at_once = 0.9 * HEARTBEAT  # who only finds out then has to miss a heartbeat first
        assert blamed(outcomes(ranks[:2], since, at_once)) <= {2, 3}
        assert blamed(outcomes(ranks[2:], since, at_once)) <= {0, 1}


@waits
def test_a_stopped_rank_is_named_by_all() -> None:
    with Lab(2) as lab, on_hosts(exchanging, lab, 2, heartbeat=HEARTBEAT) as ranks:
        since = ready(ranks)
        ranks[VICTIM].send_signal(signal.SIGSTOP)
        found = outcomes([*ranks[:2], ranks[3]], since)
        assert blamed(found) == {VICTIM}
        assert all("stopped" in one.text for one in found), found


@waits
def test_a_direction_lost_between_two_hosts_is_noticed_on_both() -> None:
    """Who is not heard cannot be told so: TCP sends nothing new to who acknowledges nothing."""
    with Lab(2) as lab, on_hosts(exchanging, lab, 2, heartbeat=HEARTBEAT) as ranks:
        since = ready(ranks)
        lab.lose(1, 0)
        for rank, one in enumerate(outcomes(ranks, since)):
            assert one.culprit is not None, one
            assert one.culprit // 2 != rank // 2, one
            assert "network between" in one.text, one


@waits
def test_of_a_direction_lost_between_two_of_three_hosts_all_name_the_pair() -> None:
    """The third host has both, and says who it is."""
    with Lab(3) as lab, on_hosts(exchanging, lab, 1, heartbeat=HEARTBEAT) as ranks:
        since = ready(ranks)
        lab.lose(0, 2)
        found = outcomes(ranks, since)
        assert {one.pair for one in found} == {(0, 2)}, found


@waits
def test_of_a_connection_that_somebody_breaks_the_pair_is_named() -> None:
    broken = []

    def change(flow: Flow, data: bytes) -> bytes | None:
        if broken and flow.connection == broken[0]:
            return None
        return data

    with (
        Lab(4) as lab,
        Middle(lab, change),
        # Long, so that who waits for a processor of a busy machine does not look stopped.
        on_hosts(exchanging, lab.hosts[:2], 1, heartbeat=4 * HEARTBEAT) as ranks,
    ):
        since = ready(ranks)
        for number in range(20):  # whichever of them the ranks still use
            broken[:] = [number]
            time.sleep(0.03)
        for one in outcomes(ranks, since):
            assert one.pair == (0, 1), one


@waits
def test_measuring_a_slow_link_does_not_look_like_its_loss() -> None:
    with Lab(2, rate=1e6) as lab, on_hosts(idle, lab, 1, heartbeat=HEARTBEAT) as ranks:
        ready(ranks)
        for rank in ranks:
            rank.say("go on")
        assert [rank.outcome() for rank in ranks] == [Outcome()] * 2


@waits
def test_an_outage_of_a_quarter_of_a_heartbeat_is_no_loss() -> None:
    """TCP tries again 0.2, 0.6, 1.4 and 3 s after it began: a busy machine may mend it late."""
    with Lab(2) as lab, on_hosts(idle, lab, 2, heartbeat=4 * HEARTBEAT) as ranks:
        ready(ranks)
        lab.silence(1)
        time.sleep(HEARTBEAT)
        lab.mend()
        for rank in ranks:
            rank.say("go on")
        assert [rank.outcome() for rank in ranks] == [Outcome()] * 4


@waits
def test_a_rank_that_dies_while_another_one_is_still_to_come_ends_the_joining() -> None:
    with Lab(3) as lab:
        lab.silence(2)
        with on_hosts(idle, lab, 1, heartbeat=HEARTBEAT) as ranks:
            await_introduction(ranks)
            since = time.monotonic()
            ranks[1].send_signal(signal.SIGKILL)
            found = ranks[0].outcome()
            assert found.error in ("RendezvousError", "PeerFailedError"), found
            assert "rank 1" in found.text, found
            assert found.ended - since < SOON, found


@waits
def test_who_waits_for_others_hears_that_the_host_of_rank_0_is_gone() -> None:
    with Lab(3) as lab:
        lab.silence(2)
        with on_hosts(idle, lab, 1, rendezvous_timeout=12) as ranks:
            await_introduction(ranks)
            since = time.monotonic()
            lab.silence(0)
            found = ranks[1].outcome()
            assert found.error == "RendezvousError", found
            assert "rank 0 ended the rendezvous" in found.text, found
            assert found.ended - since < 10, found


def rude(backend: fc.Backend, line: Line) -> int:
    """Rank 1 computes with the interpreter's lock, then with all that the others sent queued."""
    fc.all_reduce(np.ones(3), backend)
    line.tell("ready")
    if backend.rank == 1:
        ctypes.PyDLL(None).sleep(line.ask())
    works = []
    if backend.rank != 1:
        works = [
            backend.isend(np.full(200_000, float(number)), 1, tag=number) for number in range(40)
        ]
    else:
        ctypes.PyDLL(None).sleep(2)
        out = np.empty(200_000)
        for source in (0, 2, 3):
            for number in range(40):
                assert (backend.recv(out, source, tag=number) == number).all()
    for work in works:
        work.wait()
    return int(fc.all_reduce(np.int64(1), backend))


def check_rude(heartbeat: float, seconds: int) -> None:
    with Lab(2) as lab, on_hosts(rude, lab, 2, heartbeat=heartbeat) as ranks:
        ready(ranks)
        ranks[1].say(seconds)
        assert [rank.outcome() for rank in ranks] == [Outcome(4)] * 4


@waits
def test_who_holds_the_interpreters_lock_or_takes_nothing_is_not_called_lost() -> None:
    check_rude(0.5, 5)


@pytest.mark.campaign
def test_who_holds_the_interpreters_lock_for_long_is_not_called_lost() -> None:
    check_rude(1.0, 10)
    check_rude(0.2, 10)
