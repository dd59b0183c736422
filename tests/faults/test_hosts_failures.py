"""Ranks on several hosts that die: what the others get to know of it, and what is left."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest
from support.hosts.lab import Lab
from support.hosts.ranks import on_hosts
from support.zmq_ranks import Line, Outcome, RankProcess

import fsdpcore as fc

pytestmark = pytest.mark.usefixtures("needs_hosts")
waits = pytest.mark.side_by_side(4)

VICTIM = 2


def exchanging(backend: fc.Backend, line: Line) -> None:
    """All reduce now and then until something happens."""
    fc.all_reduce(np.ones(3), backend)
    line.tell("ready")
    while True:
        fc.all_reduce(np.ones(1000), backend)
        time.sleep(0.02)


def ready(ranks: list[RankProcess]) -> None:
    for rank in ranks:
        assert rank.hear() == "ready"


def outcomes(lab: Lab, ranks: list[RankProcess], since: float) -> list[Outcome]:
    """What became of ranks; none of them may be left, or have taken long."""
    found = [rank.outcome() for rank in ranks]
    assert not {rank.pid for rank in ranks} & set(lab.pids()), "orphans"
    assert max(one.ended for one in found) - since < 2.0, found
    return found


@waits
@pytest.mark.parametrize("all_of_host", [False, True])
def test_a_killed_rank_is_named_on_both_hosts(all_of_host: bool) -> None:
    with Lab(2) as lab, on_hosts(exchanging, lab, 2) as ranks:
        ready(ranks)
        since = time.monotonic()
        if all_of_host:
            lab.kill(1)
        else:
            ranks[VICTIM].send_signal(signal.SIGKILL)
        survivors = ranks[:2] if all_of_host else [*ranks[:2], ranks[3]]
        for one in outcomes(lab, survivors, since):
            assert one.error == "PeerFailedError", one
            assert one.culprit in ((2, 3) if all_of_host else (VICTIM,)), one
            assert f"rank {one.culprit} is lost" in one.text
