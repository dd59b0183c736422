"""Ranks that are threads of the test's process."""

from __future__ import annotations

import dataclasses
import math
import sys
import threading
import time
import traceback
from typing import Any

from support.spmd_job import Job, Meeting, Outcome, expect_all, perform

import fsdpcore as fc
from fsdpcore.core.work import Pending
from fsdpcore.launch.config import resolve
from fsdpcore.launch.threads import run_threads

# After the deadline the backends are aborted, and the ranks get this long to end.
_LAST_SECONDS = 1.0


class ThreadRanks:
    """Runs every job with ``fsdpcore.launch``, or on a class derived from the transport's own."""

    def __init__(self, transport: str, backend_class: type[Any] | None = None) -> None:
        self._transport = transport
        self._class = backend_class

    def run(self, job: Job) -> list[Outcome]:
        state = _State(job)
        thread = threading.Thread(target=self._launch, args=(job, state), daemon=True)
        thread.start()
        thread.join(job.timeout)
        if thread.is_alive() and state.give_up():
            thread.join()
        if state.launch_error is not None:
            raise state.launch_error
        missing = Outcome(error="did not start")
        return [state.outcomes.get(rank, missing) for rank in range(job.world_size)]

    def close(self) -> None:
        """Nothing is kept."""

    def _launch(self, job: Job, state: _State) -> None:
        try:
            if self._class is None:
                options = {"transport": self._transport, **job.options}
                fc.launch(state.rank_main, world_size=job.world_size, **options)
            else:
                config = resolve({"transport": self._transport, **job.options}, {})
                config = dataclasses.replace(config, transport_class=self._class)
                run_threads(state.rank_main, (), job.world_size, config)
        except BaseException as error:  # raised again on the test's thread
            state.launch_error = error


class _State:
    """What the ranks of one job have in common."""

    def __init__(self, job: Job) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.launch_error: BaseException | None = None
        self._job = job
        self._backends: dict[int, Any] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._meeting = Meeting(job.world_size)
        self._changed = threading.Lock()
        self._waiting: dict[int, Pending] = {}  # in the meeting
        self._complete: dict[int, bool] = {}  # how it was for those that are released
        self._over = False

    def rank_main(self, backend: Any) -> None:
        """The program of every rank."""
        rank = backend.rank
        self._backends[rank] = backend
        self._threads[rank] = threading.current_thread()
        outcome = perform(self._job, backend, lambda: self._meet(rank))
        with self._changed:
            if not self._over:
                self.outcomes[rank] = outcome
            self._release(self._meeting.leave(rank))

    def _meet(self, rank: int) -> None:
        with self._changed:
            released = self._waiting[rank] = Pending(self._backends[rank].clock.lock)
            self._release(self._meeting.arrive(rank))
            if self._over:
                self._release({rank: False})
        released.settle(math.inf)
        expect_all(self._complete.pop(rank))

    def _release(self, ranks: dict[int, bool]) -> None:
        for rank, complete in ranks.items():
            if rank in self._waiting:  # the deadline has not released it
                self._complete[rank] = complete
                self._waiting.pop(rank).finish()

    def give_up(self) -> bool:
        """Note where every rank is, then break its backend; return whether all threads ended."""
        with self._changed:
            self._over = True
            for rank, thread in self._threads.items():
                if rank not in self.outcomes:
                    error = f"not finished after {self._job.timeout:g} s"
                    self.outcomes[rank] = Outcome(traceback=_stack(thread), error=error)
            self._release(dict.fromkeys([*self._waiting], False))
        for backend in self._backends.values():
            backend.root.abort("the test's deadline has passed")
        end = time.monotonic() + _LAST_SECONDS
        for thread in self._threads.values():
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads.values())


def _stack(thread: threading.Thread) -> str:
    """Where a rank's thread is, and the threads that its backend started."""
    rank = thread.name.partition("-")[2]
    frames = sys._current_frames()
    lines = []
    for other in threading.enumerate():
        mine = other is thread or f"{other.name}-".startswith(f"fsdpcore-rank{rank}-")
        if mine and other.ident in frames:
            lines.append(f"thread {other.name}:\n")
            lines += traceback.format_stack(frames[other.ident])
    return "".join(lines) or "its thread has ended"
