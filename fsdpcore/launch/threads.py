"""Ranks as threads of this process."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from fsdpcore.comm.transport import Transport
from fsdpcore.core.clock import Task
from fsdpcore.core.errors import RankFailedError, RankStopped, StateError, in_words, is_misuse
from fsdpcore.core.text import name_ranks
from fsdpcore.launch.config import Config
from fsdpcore.launch.failure_report import is_consequence
from fsdpcore.launch.rank import run_rank
from fsdpcore.launch.supervision import SLICE_SECONDS

# What the other ranks get to notice that one has failed, and then to heed an exception that is
# raised in them wherever they are.
GRACE_SECONDS = 1.0
STOP_SECONDS = 0.5


class _RankThread:
    """One rank's thread and what became of it."""

    def __init__(
        self,
        backend: Transport,
        fn: Callable[..., Any],
        args: Sequence[Any],
        ended: queue.SimpleQueue[_RankThread],
    ) -> None:
        self.backend = backend
        self.result: Any = None
        self.error: BaseException | None = None
        self._fn = fn
        self._args = args
        self._ended = ended
        self.task: Task | None = None  # once it is started

    def start(self) -> Task:
        """Let the rank begin."""
        self.task = self.backend.clock.start(self._run, f"rank-{self.backend.rank}")
        return self.task

    def _run(self) -> None:
        try:
            self.result = run_rank(self._fn, self.backend, self._args)
        except SystemExit as error:
            self.error = None if error.code in (None, 0) else error
        except BaseException as error:  # raised again by launch, on the caller's thread
            self.error = error
        finally:
            self._ended.put(self)

    def interrupt(self) -> None:
        """Raise an exception in the thread, at the next step of Python code that it makes."""
        if isinstance(self.task, threading.Thread):  # of virtual time, none computes meanwhile
            identifier = ctypes.c_ulong(self.task.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(identifier, ctypes.py_object(RankStopped))


def run_threads(
    fn: Callable[..., Any], args: Sequence[Any], world_size: int, config: Config
) -> list[Any]:
    """Run ``fn`` on ``world_size`` threads; see ``launch``."""
    ended: queue.SimpleQueue[_RankThread] = queue.SimpleQueue()
    backends = config.transport_class.threads(world_size, config)
    for backend in backends:
        backend.recorder.configure(config.trace, config.trace_operations)
    ranks = [_RankThread(backend, fn, args, ended) for backend in backends]
    first: _RankThread | None = None
    clock = backends[0].clock
    try:
        clock.run([rank.start() for rank in ranks])
        for _ in ranks:
            rank = _next(ended)
            if rank.error is not None:
                first = rank
                break
    except BaseException as error:
        for rank in ranks:
            rank.backend.abort(f"the launching thread was interrupted: {type(error).__name__}")
        with contextlib.suppress(StateError):  # which is why it ends, perhaps
            clock.run([rank.task for rank in ranks if rank.task is not None])
        _join(ranks)
        raise
    stuck = _join(ranks)
    if first is not None:
        raise _failure(ranks, first, stuck)
    return [rank.result for rank in ranks]


def _next(ended: queue.SimpleQueue[_RankThread]) -> _RankThread:
    """The next rank to end. Waits in slices, for which see ``supervision.SLICE_SECONDS``."""
    while True:
        with contextlib.suppress(queue.Empty):
            return ended.get(timeout=SLICE_SECONDS)


def _join(ranks: list[_RankThread]) -> list[int]:
    """Let all threads end, and make them; return the ranks that did not."""
    started = [rank for rank in ranks if rank.task is not None]
    for rank in _alive(started, GRACE_SECONDS):
        rank.interrupt()
    return [rank.backend.rank for rank in _alive(started, STOP_SECONDS)]


def _alive(ranks: list[_RankThread], seconds: float) -> list[_RankThread]:
    """Return the ranks whose threads have not ended after ``seconds``."""
    end = time.monotonic() + seconds
    tasks = [(rank, rank.task) for rank in ranks if rank.task is not None]
    for _, task in tasks:
        task.join(max(0.0, end - time.monotonic()))
    return [rank for rank, task in tasks if task.is_alive()]


def _failure(ranks: list[_RankThread], first: _RankThread, stuck: list[int]) -> RankFailedError:
    """The error to raise: about the rank that failed by itself, not one that it took along."""
    culprit = next((rank for rank in (first, *ranks) if _failed_by_itself(rank)), first)
    error = culprit.error
    assert error is not None
    if isinstance(error, KeyboardInterrupt):  # which comes to whichever rank goes on just then
        raise error
    message = f"rank {culprit.backend.rank} failed: {in_words(error)}"
    if stuck:
        message += (
            f" (the threads of {name_ranks(stuck)} are busy outside of Python and did not stop)"
        )
    failure = RankFailedError(message, culprit.backend.rank, misuse=is_misuse(error))
    failure.__cause__ = error
    return failure


def _failed_by_itself(rank: _RankThread) -> bool:
    error = rank.error
    return error is not None and not isinstance(error, RankStopped) and not is_consequence(error)
