"""What is queued is bounded; errors of operations that nobody waits for are not lost."""

from __future__ import annotations

import _thread
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.spmd import run

import fsdpcore as fc
from fsdpcore.collectives.batch import bucketed
from fsdpcore.core.errors import ClosedError, CommTimeoutError
from fsdpcore.core.work import OrderedExecutor


class Rig:
    """An executor of three tasks or 100 bytes, whose tasks wait for ``gate``."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.executor = OrderedExecutor("bounded", max_tasks=3, max_bytes=100)

    def start(self, nbytes: int = 0, seconds: float = 60) -> fc.Work:
        self.executor.make_room(nbytes, seconds, "a task")
        return self.executor.submit(lambda: self.gate.wait(60), "a task", nbytes)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.gate.set()
    made.executor.close(60)
    assert not any(thread.name == "bounded" for thread in threading.enumerate())


def _in_background(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def call() -> None:
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    return thread, results


def test_full_by_number(rig: Rig) -> None:
    works = [rig.start() for _ in range(3)]
    with pytest.raises(CommTimeoutError, match=r"a task was not started.* behind 3 operations"):
        rig.start(seconds=0.01)
    thread, results = _in_background(rig.start)
    time.sleep(0.05)
    assert not results
    rig.gate.set()
    thread.join(60)
    assert [work.wait() for work in [*works, *results]] == [True] * 4


def test_full_by_bytes(rig: Rig) -> None:
    works = [rig.start(60), rig.start(40)]
    with pytest.raises(CommTimeoutError, match="100 bytes; at most 3 operations or 100 bytes"):
        rig.start(1, seconds=0.01)
    works.append(rig.start(0))
    rig.gate.set()
    assert all(work.wait() for work in works)
    # However large, alone it may run; and what has run does not count any more.
    assert rig.start(10_000).wait()
    assert rig.start(100).wait()


def test_closing_while_blocked(rig: Rig) -> None:
    for _ in range(3):
        rig.start()
    thread, results = _in_background(rig.start)
    time.sleep(0.02)
    rig.executor.close(0)
    thread.join(60)
    with pytest.raises(ClosedError, match="a task"):
        results[0].wait()


def test_interrupt_while_blocked(rig: Rig) -> None:
    for _ in range(3):
        rig.start()
    timer = threading.Timer(0.1, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        rig.start()
    timer.join()
    rig.gate.set()
    assert rig.start().wait()


def test_interrupt_while_waiting(rig: Rig) -> None:
    work = rig.start()
    timer = threading.Timer(0.1, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    timer.join()
    rig.gate.set()
    assert work.wait()


# Backends.


def _issue_until_full(backend: fc.Backend) -> list[Any]:
    gate, log = threading.Event(), []

    def task(sequence: int, background: bool) -> int:
        gate.wait(60)
        log.append(sequence)
        return sequence

    start = lambda nbytes: backend.order.issue("a task", task, async_op=True, nbytes=nbytes)  # noqa: E731
    works = [start(1 << 29), start(1 << 29)]
    with pytest.raises(CommTimeoutError, match="a task was not started"):
        start(1)
    gate.set()
    works += [start(1 << 28) for _ in range(20)]
    first = backend.order.issue("a blocking task", task, async_op=False)
    assert [work.wait() for work in works] == list(range(1, 23))  # none was skipped
    assert first == 23
    return log


def test_operations_are_numbered_in_order_though_some_were_refused() -> None:
    logs = run(_issue_until_full, transport="sim", world_size=1, op_timeout=1.0)
    assert logs == [list(range(1, 24))]


def _close_while_full(backend: fc.Backend) -> None:
    group = backend.sub([0])
    gate = threading.Event()
    group.order.issue("a task", lambda *_: gate.wait(60), async_op=True, nbytes=1 << 30)
    start = lambda: group.order.issue("late", lambda *_: 1, async_op=True, nbytes=1)  # noqa: E731
    thread, results = _in_background(start)
    time.sleep(0.05)
    closer = threading.Thread(target=group.close)
    closer.start()
    thread.join(60)
    gate.set()
    closer.join(60)
    assert isinstance(results[0], ClosedError)


def test_closing_a_group_while_a_call_is_blocked() -> None:
    run(_close_while_full, transport="sim", world_size=1)


# Errors.


def _fail_behind_a_bucket(backend: fc.Backend) -> None:
    gate = threading.Event()

    def add(left: Any, right: Any) -> Any:
        gate.wait(60)
        return left + right

    arrays = [np.full(size, 1.0) for size in (1000, 2000, 3000)]
    outs = [np.zeros_like(array) for array in arrays]
    opening = threading.Timer(0.2, gate.set)
    opening.start()
    with pytest.raises(MemoryError):
        op = fc.ReduceOp.create("slow_sum", add)
        fc.all_reduce_many(arrays, backend, op=op, out=outs, bucket_bytes=1)
    assert [float(out.mean()) for out in outs[:2]] == [2, 2]  # nobody writes to them any more
    opening.join()


def test_a_list_that_fails_waits_for_its_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = bucketed._Bucket.fill

    def fails(self: Any, *args: Any) -> Any:
        if self.indices == [2]:
            raise MemoryError
        return fill(self, *args)

    monkeypatch.setattr(bucketed._Bucket, "fill", fails)
    monkeypatch.setattr(bucketed, "IN_FLIGHT", 3)
    run(_fail_behind_a_bucket, transport="sim", world_size=2)


def _fail(executor: OrderedExecutor, text: str) -> fc.Work:
    def task() -> None:
        raise fc.PeerFailedError(f"no {text}", 1)

    return executor.submit(task, text)


def test_errors_that_nobody_waits_for_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    executor = OrderedExecutor("unheard")
    for text in ("all_reduce", "broadcast"):
        _fail(executor, text)
    executor.close(60)
    executor.close(60)
    (record,) = caplog.records  # the first, which the others follow from; and once
    assert (record.name, record.levelno) == ("fsdpcore", logging.ERROR)
    assert "all_reduce failed: PeerFailedError: no all_reduce" in record.getMessage()


def test_errors_that_were_raised_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    executor = OrderedExecutor("heard")
    works = [_fail(executor, "task") for _ in range(3)]
    for _ in range(2):
        with pytest.raises(fc.PeerFailedError, match="no task"):
            works[1].wait()
    executor.close(60)
    assert not caplog.records


def _ignore_a_failure(backend: fc.Backend) -> str:
    work = fc.all_reduce(np.zeros(3 + backend.rank), backend, async_op=True)
    while not work.done():
        time.sleep(0.001)
    with pytest.raises(fc.MismatchError) as caught:
        backend.barrier()
    return str(caught.value)


def test_a_failure_that_was_not_waited_for_meets_the_next_call() -> None:
    for message in run(_ignore_a_failure, transport="sim", world_size=2):
        assert "rank 1: all_reduce(sum, float64 of shape (4,))" in message
