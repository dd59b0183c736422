"""Waits for any rank that end at their deadline say who could have sent, and what they do."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from support.bodies.point_to_point import check_words, expect
from support.cases import bodies, jobs
from support.spmd import meet, run

import fsdpcore as fc

pytestmark = pytest.mark.side_by_side(8)
# Time for every rank to begin a call after a meeting, with all cores busy.
PATIENCE = 1.0


def nobody_sends(backend: fc.Backend) -> None:
    """All ranks receive: each is told so, with what the others wait in."""
    me, room = backend.rank, np.empty(3)
    works = [backend.irecv(room, fc.ANY, tag=me)]
    meet()
    if me == 0:
        error = expect(fc.CommTimeoutError, fc.wait_any, works, timeout=PATIENCE)
        check_words(error, "recv of float64 (3,) from any rank (tag 0) on rank 0 of 3 timed out")
        check_words(error, "rank 1: in recv of float64 (3,) from any rank (tag 1) for")
        check_words(error, "rank 2: in probe from any rank (any tag) for")
        check_words(error, "likely cause: rank 0 waits here for rank 1, rank 1 waits in recv")
    elif me == 1:
        expect(fc.CommTimeoutError, fc.wait_any, works, timeout=PATIENCE + 2)
    else:
        expect(fc.CommTimeoutError, backend.probe, fc.ANY, tag=fc.ANY, timeout=PATIENCE + 2)
    meet()


def somebody_still_may(backend: fc.Backend) -> None:
    """As long as one rank waits for nothing, no cause is named; what it has sent is."""
    me = backend.rank
    backend.barrier()
    if me == 2:
        backend.send(np.ones(3), 0, tag=7)
    meet()
    if me == 0:
        error = expect(
            fc.CommTimeoutError, backend.recv, np.empty(3), fc.ANY, tag=1, timeout=PATIENCE
        )
        check_words(error, "rank 1: in recv of float64 (3,) from rank 0 (any tag) for")
        check_words(error, "rank 2: finished send of float64 (3,) to rank 0 (tag 7)")
        check_words(error, "rank 2 has sent messages that nobody receives, with tag 7")
        assert "likely cause" not in str(error)
    elif me == 1:
        expect(fc.CommTimeoutError, backend.recv, np.empty(3), 0, tag=fc.ANY, timeout=PATIENCE + 2)
    meet()


def on_its_way(backend: fc.Backend) -> None:
    """A sender whose message a rank asks for with any tag is no culprit: the two have met."""
    if backend.rank == 1:
        works = [backend.isend(np.ones(100_000), 0, tag=6)]
        meet()
        expect(fc.CommTimeoutError, fc.wait_any, works, timeout=PATIENCE)
    else:
        meet()
        time.sleep(PATIENCE / 2)
        error = expect(
            fc.CommTimeoutError, backend.recv, np.empty(3), 1, tag=5, timeout=PATIENCE / 4
        )
        check_words(error, "rank 1: in send of float64 (100000,) to rank 0 (tag 6) for")
        check_words(error, "rank 1 has sent messages that nobody receives, with tag 6")
    meet()


@jobs(3)
@bodies(nobody_sends, somebody_still_may)
def test_reports(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(2)
@bodies(on_its_way)
def test_reports_of_a_sender(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


def _recorded(backend: fc.Backend) -> list[tuple[str, int, int]]:
    if backend.rank == 1:
        for _ in range(3):
            backend.send(np.ones(3), 0, tag=6)
    else:
        backend.probe(fc.ANY, tag=fc.ANY)
        for source, tag in ((fc.ANY, fc.ANY), (fc.ANY, 6), (1, fc.ANY)):
            backend.recv(np.empty(3), source, tag=tag)
        work = backend.irecv(np.empty(3), fc.ANY)
        expect(fc.CommTimeoutError, work.wait, 0)
    entries = backend.root.recorder.entries()
    meet()
    return [(entry.words(), entry.call.peer, entry.call.tag) for entry in entries]


def test_a_record_says_who_it_was() -> None:
    found = run(_recorded, transport="sim", world_size=2)[0]
    assert found == [
        ("probe from rank 1 (tag 6)", 1, 6),
        *[("recv of float64 (3,) from rank 1 (tag 6)", 1, 6)] * 3,
        ("recv of float64 (3,) from any rank (tag 0)", -1, 0),
    ]
