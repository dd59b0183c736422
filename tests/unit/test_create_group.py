"""``SimBackend.create_group``: ranks for threads of one's own."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from fsdpcore.transports.simulated import SimBackend

import fsdpcore as fc


def outcomes(ranks: list[SimBackend], work: Any, threads: int = 0) -> list[Any]:
    """What ``work`` returns or raises on each rank, a thread of a pool."""

    def one(backend: SimBackend) -> Any:
        try:
            with backend:
                return work(backend)
        except Exception as error:
            return error

    with ThreadPoolExecutor(threads or len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_ranks_work_on_any_threads() -> None:
    ranks = SimBackend.create_group(4, hosts=2)
    assert [(rank.rank, rank.world_size, type(rank)) for rank in ranks] == [
        (n, 4, SimBackend) for n in range(4)
    ]

    def work(backend: SimBackend) -> Any:
        pair = backend.split(backend.rank % 2)
        work = fc.all_reduce(np.full(5, backend.rank), pair, async_op=True)
        return fc.all_reduce(backend.rank, backend).item(), work.wait()[0]

    assert outcomes(ranks, work) == [(6, 2), (6, 4)] * 2
    for rank in ranks:
        with pytest.raises(fc.ClosedError):
            fc.barrier(rank)
        rank.close()


def test_a_rank_that_fails_takes_the_others_along() -> None:
    def work(backend: SimBackend) -> None:
        if backend.rank == 1:
            raise KeyError("its own error")
        fc.barrier(backend)

    found = outcomes(SimBackend.create_group(3), work)
    assert type(found[1]) is KeyError
    for each in (found[0], found[2]):
        assert (type(each), each.rank) == (fc.PeerFailedError, 1)
        assert "its own error" in str(each)


def test_a_rank_that_aborts_and_one_that_leaves() -> None:
    first, second = SimBackend.create_group(2)
    first.abort("enough")
    with second, pytest.raises(fc.PeerFailedError, match="enough"):
        fc.barrier(second)
    first.close()
    first, second = SimBackend.create_group(2)
    first.close()
    with second, pytest.raises(fc.PeerFailedError, match="rank 0 has left"):
        fc.barrier(second)


def test_deadlocks_are_explained() -> None:
    def work(backend: SimBackend) -> None:
        peer = 1 - backend.rank
        backend.recv(np.empty(1), peer, tag=backend.rank)
        backend.send(np.ones(1), peer)

    begun = time.monotonic()
    found = outcomes(SimBackend.create_group(2, timeout=0.2), work)
    assert time.monotonic() - begun < 10
    assert {type(each) for each in found} <= {fc.CommTimeoutError, fc.PeerFailedError}
    for each in found:
        assert "timed out after 0.2 s" in str(each)
        assert "the ranks call these operations in different orders" in str(each)
    # One thread for two ranks: the second one never begins.
    found = outcomes(SimBackend.create_group(2, timeout=0.2), fc.barrier, threads=1)
    assert type(found[0]) is fc.CommTimeoutError
    assert "rank 1" in str(found[0])


@pytest.mark.parametrize(
    ("size", "options", "words"),
    [
        (0, {}, "world_size must be at least 1, got 0"),
        (2, {"host": 1}, r"sim has no option 'host' \(did you mean 'hosts'\?\)"),
        (2, {"hosts": 3}, "hosts=3 is not in 1..2"),
        (2, {"shm": "on"}, "shm must be 'auto' or 'off'"),
        (2, {"clock": "virtual"}, "no virtual time; use launch"),
        (2, {"timeout": 0}, "timeout must be more than 0"),
    ],
)
def test_what_is_refused(size: int, options: dict[str, Any], words: str) -> None:
    with pytest.raises(fc.ConfigError, match=words):
        SimBackend.create_group(size, **options)
