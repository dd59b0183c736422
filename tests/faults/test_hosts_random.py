"""Random failures at random moments of random programs: an error for all, and no wrong sum."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from support.hosts.lab import Lab
from support.hosts.ranks import on_hosts
from support.zmq_ranks import Line, Outcome, RankProcess, ready

import fsdpcore as fc

pytestmark = [pytest.mark.usefixtures("needs_hosts"), pytest.mark.campaign]

COUNT = int(os.environ.get("TEST_FAILURES", "50"))
SEED = int(os.environ.get("TEST_SEED", "0"))
HEARTBEAT, PATIENCE = 0.5, 10.0
SIZES = [1, 1, 100, 10_000, 300_000]


def working(backend: fc.Backend, line: Line) -> None:
    """Carry out calls that all ranks draw from one seed, and look at every result."""
    drawn = random.Random(line.ask())
    rank, size = backend.rank, backend.world_size
    total = size * (size + 1) // 2
    fc.all_reduce(np.ones(3), backend)
    line.tell("ready")
    for number in itertools.count():
        kind = drawn.choice(["all_reduce", "all_gather", "broadcast", "ring", "pause", "sums"])
        count, root = drawn.choice(SIZES), drawn.randrange(size)
        pause = drawn.random() * 0.1
        mine = np.full(count, (rank + 1) * (number % 7), np.int64)
        if kind == "all_reduce":
            assert (fc.all_reduce(mine, backend) == total * (number % 7)).all(), "wrong sum"
        elif kind == "sums":
            works = [fc.all_reduce(mine, backend, async_op=True) for _ in range(3)]
            for work in works:
                assert (work.wait() == total * (number % 7)).all(), "wrong sum"
        elif kind == "all_gather":
            expected = np.repeat(np.arange(1, size + 1), count) * (number % 7)
            assert (fc.all_gather(mine, backend).ravel() == expected).all(), "wrong parts"
        elif kind == "broadcast":
            found = fc.broadcast(mine, backend, root=root)
            assert (found == (root + 1) * (number % 7)).all(), "wrong copy"
        elif kind == "ring":
            sent = backend.isend(mine, (rank + 1) % size)
            got = backend.recv(np.empty_like(mine), (rank - 1) % size)
            sent.wait()
            assert (got == ((rank - 1) % size + 1) * (number % 7)).all(), "wrong message"
        else:
            time.sleep(pause * (rank == root))


class Damage(NamedTuple):
    """What a failure has done.

    Attributes:
        lost: the ranks of which one is to be named.
        told: those that are to be told.
        how: "rank" names one of the lost, "other host" one of a host that the rank told is not on.
    """

    lost: set[int]
    told: set[int]
    how: str = "rank"


Fail = Callable[[Lab, list[RankProcess], random.Random], Damage]
EVERYBODY = {0, 1, 2, 3}


def kill(lab: Lab, ranks: list[RankProcess], drawn: random.Random) -> Damage:
    victim = drawn.randrange(4)
    ranks[victim].send_signal(signal.SIGKILL)
    return Damage({victim}, EVERYBODY - {victim})


def stop(lab: Lab, ranks: list[RankProcess], drawn: random.Random) -> Damage:
    victim = drawn.randrange(4)
    ranks[victim].send_signal(signal.SIGSTOP)
    return Damage({victim}, EVERYBODY - {victim})


def kill_host(lab: Lab, ranks: list[RankProcess], drawn: random.Random) -> Damage:
    host = drawn.randrange(2)
    lab.kill(host)
    gone = {2 * host, 2 * host + 1}
    return Damage(gone, EVERYBODY - gone)


def vanish(lab: Lab, ranks: list[RankProcess], drawn: random.Random) -> Damage:
    host = drawn.randrange(2)
    lab.vanish(host)
    gone = {2 * host, 2 * host + 1}
    return Damage(gone, EVERYBODY - gone)


def cut(lab: Lab, ranks: list[RankProcess], drawn: random.Random) -> Damage:
    drawn.choice([lab.cut, lab.silence])(drawn.randrange(2))
    return Damage(EVERYBODY, EVERYBODY, "other host")


def lose(lab: Lab, ranks: list[RankProcess], drawn: random.Random) -> Damage:
    sender = drawn.randrange(2)
    lab.lose(sender, 1 - sender)
    # TCP sends nothing new to who acknowledges nothing: with two hosts that is as if one were lost.
    return Damage(EVERYBODY, EVERYBODY, "other host")


def right(rank: int, one: Outcome, damage: Damage) -> bool:
    if one.error != "PeerFailedError":
        return False
    if damage.how != "rank":
        return one.culprit is not None and one.culprit // 2 != rank // 2
    return one.culprit in damage.lost


@pytest.mark.parametrize("number", range(COUNT))
def test_a_random_failure_ends_the_job_with_the_right_error(number: int) -> None:
    drawn = random.Random(f"{SEED} {number}")
    fail: Fail = drawn.choice([kill, stop, kill_host, vanish, cut, lose])
    rate = drawn.choice([0.0, 1e9, 100e6])
    # As much of the program as there is, also while the ranks have only just joined.
    moment = drawn.choice([0.0, 0.3, 1.0]) * drawn.random()
    with Lab(2, rate=rate) as lab, on_hosts(working, lab, 2, heartbeat=HEARTBEAT) as ranks:
        for rank in ranks:
            rank.say(f"{SEED} {number}")
        ready(ranks)
        time.sleep(moment)
        since = time.monotonic()
        damage = fail(lab, ranks, drawn)
        for rank in sorted(damage.told):
            one = ranks[rank].outcome()
            assert right(rank, one, damage), (fail.__name__, damage, rank, one)
            assert one.ended - since < PATIENCE, (fail.__name__, one.ended - since, one)
        for rank in EVERYBODY - damage.told:
            with contextlib.suppress(ProcessLookupError):
                ranks[rank].send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 5
        while lab.pids() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lab.pids() == []
