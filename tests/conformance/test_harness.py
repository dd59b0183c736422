"""The harness itself: no body makes it hang, and a failure shows where every rank was."""

from __future__ import annotations

import os
import threading

import pytest
from support.cases import COSTLY, NOT_VIRTUAL, jobs
from support.spmd import RanksFailed, meet, run

import fsdpcore as fc

_let_go = threading.Event()


def _results(backend: fc.Backend, factor: int) -> int:
    meet()
    return backend.rank * factor


def _two_culprits(backend: fc.Backend) -> None:
    if backend.rank == 0:
        raise ValueError("the first culprit")
    if backend.rank == 2:
        raise KeyError("the other culprit")
    meet()


def _one_stays_away(backend: fc.Backend) -> None:
    if backend.rank:
        meet()


def _sleep_forever(backend: fc.Backend) -> None:
    if backend.rank == 1:
        _deep_inside()
    backend.recv(fc.all_gather(1, backend), 0)


def _deep_inside() -> None:
    while not _let_go.wait(0.02):
        pass


def _vanish(backend: fc.Backend) -> None:
    if backend.rank == 1:
        os._exit(3)
    backend.barrier()


@jobs(1, 3)
def test_results_come_in_rank_order(transport: str, world_size: int) -> None:
    results = run(_results, transport=transport, world_size=world_size, args=(10,))
    assert results == [10 * rank for rank in range(world_size)]


@jobs(3)
def test_every_traceback_is_shown(transport: str, world_size: int) -> None:
    with pytest.raises(RanksFailed) as caught:
        run(_two_culprits, transport=transport, world_size=world_size)
    report = str(caught.value)
    assert "_two_culprits failed on ranks [0, 1, 2] of 3" in report
    for words in ("rank 0: ValueError: the first", "rank 2: KeyError", "rank 1: AssertionError"):
        assert words in report
    assert report.count("in _two_culprits") == 3


@jobs(2)
def test_a_meeting_that_one_rank_misses(transport: str, world_size: int) -> None:
    with pytest.raises(RanksFailed, match="has ended without coming"):
        run(_one_stays_away, transport=transport, world_size=world_size)


@pytest.mark.side_by_side(5)
@jobs(2, on=NOT_VIRTUAL)  # where a rank's stack is that of no thread
def test_deadline_shows_where_every_rank_is(transport: str, world_size: int) -> None:
    with pytest.raises(RanksFailed) as caught:
        run(_sleep_forever, transport=transport, world_size=world_size, timeout=4.0)
    if transport == "sim":
        _let_go.set()  # or the thread would stay
    report = str(caught.value)
    assert "failed on ranks [0, 1] of 2" in report
    assert "rank 0: not finished after 4 s" in report
    assert "in all_gather" in report
    assert "in _deep_inside" in report
    assert run(_results, transport=transport, world_size=2, args=(3,)) == [0, 3]


@pytest.mark.side_by_side(5)
@pytest.mark.parametrize("transport", COSTLY)
def test_death_of_a_process(transport: str) -> None:
    with pytest.raises(RanksFailed, match="rank 1: its process has died"):
        run(_vanish, transport=transport, world_size=2)
    assert run(_results, transport=transport, world_size=2, args=(3,)) == [0, 3]
