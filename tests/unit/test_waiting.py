"""Waiting for several operations: who ends first is noticed at once, and nothing stays behind."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from fsdpcore.transports.simulated.backend import SimBackend
from support import spmd
from support.spmd_job import meet

import fsdpcore as fc
from fsdpcore.core.waiting import AllOf
from fsdpcore.core.work import SLICE_SECONDS, OrderedExecutor, Pending, Work

# A thread that is woken runs sooner, one that looks again in slices of its wait does not.
SOON = SLICE_SECONDS / 2


class Told(Work):
    """Ends when it is told to, and tells who waits."""

    def __init__(self, limit: float = 60.0) -> None:
        self.pending = Pending()
        self.limit = limit

    def done(self) -> bool:
        return self.pending.finished

    def wait(self, timeout: float | None = None) -> Any:
        assert self.pending.join(60 if timeout is None else timeout)
        return self

    def _ends(self) -> list[Pending]:
        return [self.pending]

    def _limit(self) -> float:
        return self.limit


class Silent(Told):
    """Ends when it is told to, and tells nobody, as work of a GPU."""

    def _ends(self) -> list[Pending]:
        return []


def latency(works: list[Work], end: Any, place: int) -> float:
    """Seconds from the end of a work to that of the wait for any."""
    ended = []

    def later() -> None:
        time.sleep(0.02)
        ended.append(time.monotonic())
        end()

    thread = threading.Thread(target=later)
    thread.start()
    assert fc.wait_any(works) == place
    seconds = time.monotonic() - ended[0]
    thread.join()
    return seconds


@pytest.mark.parametrize("kind", [Told, Silent])
def test_the_first_that_ends_is_noticed_at_once(kind: type[Told]) -> None:
    seconds = []
    for _ in range(3):  # a busy machine may keep a thread waiting, but not every time
        works = [Told(), kind(), Told()]
        seconds.append(latency([*works], works[1].pending.finish, 1))
    assert min(seconds) < SOON


def test_several_as_one_end_with_the_last_of_them() -> None:
    parts = [Told(), Told(), Told()]
    works: list[Work] = [Told(), AllOf(parts)]
    parts[1].pending.finish()
    threading.Timer(0.01, parts[0].pending.finish).start()
    latency(works, parts[2].pending.finish, 1)
    assert parts[0].done()
    assert works[1].wait() is parts[2]


def test_tasks_of_a_thread_end_one_after_the_other() -> None:
    executor = OrderedExecutor("test")
    gate = threading.Event()
    works = [executor.submit(gate.wait, "first"), executor.submit(lambda: 7, "second")]
    latency([*works], gate.set, 0)
    assert fc.wait_all(works) == [True, 7]
    executor.close(10)


def test_nothing_stays_with_what_has_not_ended() -> None:
    work = Told()
    for _ in range(10):
        with pytest.raises(fc.CommTimeoutError, match=r"not finished after waiting 0\.001 s"):
            fc.wait_any([work], timeout=0.001)
    assert work.pending._watchers == ()


def test_by_default_it_waits_as_long_as_the_most_patient() -> None:
    works = [Told(0.01), Told(0.1), Told(0.02)]
    begin = time.monotonic()
    with pytest.raises(fc.CommTimeoutError, match=r"none of 3 operations .* after waiting 0\.1 s"):
        fc.wait_any(works)
    assert time.monotonic() - begin > 0.09


def test_what_ended_first_in_the_list_comes_first() -> None:
    works = [Told(), Told(), Told()]
    for place in (2, 1):
        works[place].pending.finish()
        assert fc.wait_any(works, timeout=0) == place


def _waits_by_message(backend: fc.Backend) -> list[float]:
    """How long rank 0 takes to notice each message of the other, beside a collective."""
    seconds = []
    stamp = np.empty(1)
    slow = fc.all_reduce(np.ones(2), backend, async_op=True) if backend.rank == 0 else None
    for _ in range(3):
        if backend.rank == 1:
            meet()
            time.sleep(0.02)
            backend.send(np.array([time.monotonic()]), 0)
        else:
            works = [slow, backend.irecv(np.empty(1), 1, tag=5), backend.irecv(stamp, 1)]
            meet()
            assert fc.wait_any(works) == 2
            seconds.append(time.monotonic() - stamp[0])
        meet()
    for _ in range(3 if backend.rank == 1 else 0):
        backend.send(np.ones(1), 0, tag=5)
    if backend.rank == 1:
        fc.all_reduce(np.ones(2), backend)
    else:
        assert slow is not None
        slow.wait()
    return seconds


@pytest.mark.parametrize("transport", spmd.TRANSPORTS)
def test_a_message_is_noticed_at_once(transport: str) -> None:
    seconds = spmd.run(_waits_by_message, transport=transport, world_size=2)[0]
    assert min(seconds) < SOON


def _exchanges_half(backend: fc.Backend) -> float:
    """Rank 0 gets what it receives late, and nobody takes what it sends; how long it waits."""
    if backend.rank == 1:
        meet()
        time.sleep(0.8)
        backend.send(np.ones(1), 0)
        meet()
        return 0.0
    large = np.ones(1_000_000)
    meet()
    since = time.monotonic()
    with pytest.raises(fc.CommTimeoutError, match=r"^(send|recv) of .* timed out after 1 s"):
        backend.sendrecv(large, 1, np.empty(1), 1, timeout=1.0)
    took = time.monotonic() - since
    meet()
    return took


def test_both_messages_of_an_exchange_have_one_deadline() -> None:
    assert spmd.run(_exchanges_half, transport="sim", world_size=2)[0] < 1.6


def test_a_message_that_ends_as_the_time_is_over_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    join, late = Pending.join, list[Pending]()

    def look_too_early(self: Pending, seconds: float) -> bool:
        if seconds > 1 or late:
            return join(self, seconds)
        late.append(self)
        assert join(self, 60)
        return False

    def body(backend: fc.Backend) -> float:
        if backend.rank == 1:
            backend.send(np.ones(3), 0)
            return 3.0
        return float(backend.recv(np.zeros(3), 1, timeout=0.5).sum())

    monkeypatch.setattr(Pending, "join", look_too_early)
    assert spmd.run_on(SimBackend, body, world_size=2) == [3.0, 3.0]
    assert late
