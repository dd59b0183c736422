"""Ranks on GPUs that do not come, die or differ: an error in bounded time; all processes end."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from support import gpu_failures as bodies
from support.gpu_ranks import TRANSPORT, Together
from support.zmq_ranks import listener, place, processes, ready

import fsdpcore as fc
from fsdpcore.comm.place import RankPlace
from fsdpcore.launch.config import resolve

# Failure, abort of the communicators and the end of a process, with much to spare.
BOUND = 45.0


@pytest.mark.parametrize(
    "body",
    [
        bodies.missing_from_known_call,
        bodies.missing_from_new_call,
        bodies.differing_in_known_calls,
        bodies.differing_in_new_calls,
        bodies.raising,
    ],
)
def test_errors_reach_all_ranks(two_ranks: Together, body: Any) -> None:
    two_ranks.run(body, 2)


@pytest.mark.parametrize("body", [bodies.collectives, bodies.started])
def test_a_rank_killed_in_a_collective_is_named_and_all_processes_end(
    two_ranks: Together, body: Any
) -> None:
    options = {"transport": TRANSPORT, "share_gpu": two_ranks.share_gpu}
    with processes(body, 2, **options) as ranks:
        ready(ranks)
        start = time.monotonic()
        ranks[bodies.VICTIM].send_signal(signal.SIGKILL)
        outcome = ranks[0].outcome()  # its process has ended well, too
        assert (outcome.error, outcome.culprit) == ("PeerFailedError", bodies.VICTIM), outcome
        assert time.monotonic() - start < BOUND


def test_two_ranks_on_one_gpu_are_refused_unless_asked_for(gpus: int) -> None:
    """Before NCCL hangs on them or says something obscure; on both ranks."""
    with processes(bodies.nothing, 2, transport=TRANSPORT, device=0) as ranks:
        outcomes = [rank.outcome() for rank in ranks]
    assert [outcome.error for outcome in outcomes] == ["RendezvousError"] * 2, outcomes
    for outcome in outcomes:
        for word in ("GPU", "ranks 0", "1", "share_gpu=true"):
            assert word in outcome.text, outcome


def test_the_start_has_a_deadline() -> None:
    config = resolve({"transport": TRANSPORT, "rendezvous_timeout": 2.0}, {})
    start = time.monotonic()
    with listener() as meeting, pytest.raises(fc.RendezvousError):
        here = place(0, 2, meeting.getsockname()[1], "token", meeting)
        config.transport_class.join(here, config)
    assert time.monotonic() - start < BOUND


def test_a_gpu_that_is_not_there_is_an_error_that_says_how_many_are(gpus: int) -> None:
    config = resolve({"transport": TRANSPORT, "device": gpus}, {})
    with pytest.raises(fc.ConfigError, match=str(gpus)):
        config.transport_class.join(RankPlace(0, 1, 0, 1, "a test"), config)
