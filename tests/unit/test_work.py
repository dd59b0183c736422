from __future__ import annotations

import functools
import gc
import math
import threading
import time
import traceback
import weakref
from typing import Any

import numpy as np
import pytest

from fsdpcore.core.errors import (
    ArgumentError,
    ClosedError,
    CommTimeoutError,
    CommunicationError,
    PeerFailedError,
    StateError,
)
from fsdpcore.core.work import Deadline, OrderedExecutor, Pending, TaskWork, fresh


@pytest.mark.parametrize("seconds", [-1, -0.001, math.nan, "1", None, [1]])
def test_deadlines_that_make_no_sense(seconds: Any) -> None:
    with pytest.raises(ArgumentError, match="number of seconds"):
        Deadline(seconds)


def test_deadline() -> None:
    assert Deadline(0).remaining() == 0
    assert 0 < Deadline(1000).remaining() <= 1000
    assert Deadline(math.inf).remaining() == math.inf
    assert Deadline(5).seconds == 5


def test_fresh_copies_everything_but_the_traceback() -> None:
    cause = ValueError("why")
    error = PeerFailedError("rank 3 failed", 3)
    error.__cause__ = cause
    again = fresh(error)
    assert again is not error
    assert isinstance(again, PeerFailedError)
    assert (str(again), again.rank, again.__cause__) == ("rank 3 failed", 3, cause)


def test_errors_raised_often_do_not_grow() -> None:
    pending = Pending()
    pending.finish(CommunicationError("broken"))
    depths = []
    for _ in range(5):
        with pytest.raises(CommunicationError) as caught:
            pending.join(0)
        depths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(set(depths)) == 1


def test_pending() -> None:
    pending = Pending()
    assert not pending.join(0)
    assert not pending.settle(0.001)
    assert not pending.cancel()
    pending.finish()
    pending.finish(CommunicationError("too late"))
    assert pending.join(0)
    assert pending.settle(math.inf)
    assert pending.cancel()


def test_pending_that_failed() -> None:
    pending = Pending()
    pending.finish(CommunicationError("first"))
    pending.finish(CommunicationError("second"))
    assert pending.settle(0)
    with pytest.raises(CommunicationError, match="first"):
        pending.join(math.inf)


def test_pending_wakes_all_who_wait() -> None:
    pending = Pending()
    seen: list[bool] = []
    threads = [threading.Thread(target=lambda: seen.append(pending.join(60))) for _ in range(5)]
    for thread in threads:
        thread.start()
    pending.finish()
    for thread in threads:
        thread.join()
    assert seen == [True] * 5


@pytest.fixture
def executor() -> Any:
    made = OrderedExecutor("test-executor")
    yield made
    made.close(60)
    assert not any(thread.name == "test-executor" for thread in threading.enumerate())


def test_tasks_run_in_order_on_one_thread(executor: OrderedExecutor) -> None:
    log: list[tuple[int, str]] = []

    def task(number: int) -> int:
        log.append((number, threading.current_thread().name))
        return number

    works = [executor.submit(functools.partial(task, n), "task") for n in range(20)]
    assert [work.wait() for work in reversed(works)] == list(reversed(range(20)))
    assert log == [(number, "test-executor") for number in range(20)]
    assert executor.idle


def test_work_of_a_task(executor: OrderedExecutor) -> None:
    gate = threading.Event()
    work = executor.submit(lambda: gate.wait(60), "the task")
    assert not work.done()
    assert not executor.idle
    with pytest.raises(CommTimeoutError, match=r"the task is not finished after waiting 0\.01 s"):
        work.wait(0.01)
    with pytest.raises(StateError, match="wait"):
        work.result()
    with pytest.raises(ArgumentError):
        work.wait(-1)
    gate.set()
    assert work.wait(math.inf) is True
    assert work.wait() is True
    assert work.result() is True
    assert work.done()


def test_task_that_raises(executor: OrderedExecutor) -> None:
    def fail(error: Exception) -> None:
        raise error

    broken = executor.submit(lambda: fail(CommunicationError("broken")), "task")
    wrong = executor.submit(lambda: fail(KeyError("wrong")), "task")
    fine = executor.submit(lambda: 3, "task")
    assert fine.wait() == 3
    for _ in range(2):
        with pytest.raises(CommunicationError, match="broken"):
            broken.wait()
        with pytest.raises(KeyError):
            wrong.result()


def test_arrays_of_a_task_are_freed(executor: OrderedExecutor) -> None:
    array = np.zeros(3)
    gone = weakref.ref(array)

    def task(held: Any = array) -> int:
        return int(held.size)

    work = executor.submit(task, "task")
    work.wait()
    executor.submit(lambda: None, "the next").wait()
    del array, task
    gc.collect()
    assert gone() is None
    assert work.wait() == 3


def test_the_last_result_is_freed(executor: OrderedExecutor) -> None:
    """The thread has no next task that would take its place."""
    work = executor.submit(lambda: np.zeros(3), "task")
    gone = weakref.ref(work.wait())
    del work
    end = time.monotonic() + 5
    while gone() is not None and time.monotonic() < end:
        time.sleep(0.001)  # the thread has woken this one before it let go
    assert gone() is None


def test_closing_runs_what_was_submitted() -> None:
    executor = OrderedExecutor("closing")
    works = [executor.submit(functools.partial(int, n), "task") for n in range(10)]
    executor.close(60)
    assert [work.done() for work in works] == [True] * 10
    executor.close(60)
    late = executor.submit(lambda: 1, "the late task")
    with pytest.raises(ClosedError, match="the late task"):
        late.wait()


def test_work_that_never_ran() -> None:
    work = TaskWork(lambda: 1, "task")
    work._fail(CommunicationError("closed before"))
    with pytest.raises(CommunicationError, match="closed before"):
        work.wait()
