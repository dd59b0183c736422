"""Saving while training goes on: copy, return, write in the background."""

from __future__ import annotations

import atexit
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, get_args

from fsdpcore.checkpoint.format.generators import Generators
from fsdpcore.checkpoint.memory.staging import Staging
from fsdpcore.checkpoint.plan.describe import StatefulEngine
from fsdpcore.checkpoint.plan.kinds import Stateful
from fsdpcore.checkpoint.save.commit import PreparedSave
from fsdpcore.checkpoint.save.saver import Saver
from fsdpcore.checkpoint.save.step_folder import Saved
from fsdpcore.checkpoint.storage.opening import DISK_TIMEOUT, StoragePath
from fsdpcore.checkpoint.storage.retention import Retention
from fsdpcore.collectives.consensus import agree
from fsdpcore.comm.backend import Backend
from fsdpcore.core.checks import as_choice
from fsdpcore.core.errors import StateError, in_words
from fsdpcore.core.work import Pending, Work

_LOG = logging.getLogger("fsdpcore")

Busy = Literal["wait", "raise"]


class CheckpointFuture(Work):
    """A save in the background; made by ``AsyncCheckpointer.save``."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.reported = False

    def done(self) -> bool:
        """Return whether it has ended, well or badly; never blocks."""
        return self._work.done()

    def _words(self) -> str:
        return self._work._words()

    def _ends(self) -> list[Pending]:
        return self._work._ends()

    def wait(self, timeout: float | None = None) -> Saved:
        """Block until it has ended and return what was saved, as often as it is called.

        Args:
            timeout: seconds to wait; by default as long as it takes.

        Raises:
            CommTimeoutError: the time is over; the save goes on.
            CheckpointError: a rank could not write; on all ranks.
            CommunicationError: a rank is gone.
        """
        try:
            saved: Saved = self._work.wait(timeout)
        finally:
            self.reported = self.reported or self.done()
        return saved


class AsyncCheckpointer:
    """Saves one checkpoint at a time in the background.

    ``save`` copies what this rank writes before it returns, so that the training may change its
    arrays at once. A thread of this rank writes the copy, and speaks with those of the other
    ranks in a group of their own: no collective of the training ever waits for it.

    It holds memory of the host for one copy; its thread has nothing to do with a GPU, from which
    arrays are copied before ``save`` returns. Use it in a ``with`` statement, or call ``close``:
    both wait for the save under way, as does the end of the process (or of ``backend``, for up to
    its ``timeout``).

    Args:
        path: see ``save``.
        backend: all ranks, each with a checkpointer of its own; making one is no communication.
        retention: which steps to keep; without it, all.
        busy: what a ``save`` does while another is under way: "wait" until that has ended, or
            "raise" StateError, on all ranks.
        timeout: seconds to wait for the slowest rank's disk.

    Raises:
        ArgumentError: an argument makes no sense.
    """

    def __init__(
        self,
        path: StoragePath,
        backend: Backend,
        *,
        retention: Retention | None = None,
        busy: Busy = "wait",
        timeout: float = DISK_TIMEOUT,
    ) -> None:
        as_choice(busy, get_args(Busy), "busy")
        self._saver = Saver(path, backend, retention=retention, timeout=timeout)
        self._backend = backend
        self._busy = busy
        self._staging = Staging(backend.device)
        self._future: CheckpointFuture | None = None
        self._closed = False
        self._group = backend.sub(range(backend.world_size), name="checkpoint")
        self._executor = backend.root.new_executor(f"fsdpcore-checkpoint-{backend.root.rank}")
        atexit.register(self._at_exit)

    def save(
        self,
        state: StatefulEngine | Stateful | Mapping[str, Any],
        *,
        step: int | None = None,
        extra: Any = None,
        generators: Generators | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> CheckpointFuture:
        """Begin a save; a collective, which returns when the arrays are copied.

        All of the arguments are copied, so that whatever is done to the arrays from then on, or
        enqueued on a GPU, does not change what is saved.

        Args:
            state, step, extra, generators, metrics: as of ``checkpoint.save``.

        Returns:
            A ``Work``, whose ``wait`` returns what ``checkpoint.save`` would, and raises likewise.

        Raises:
            ArgumentError, MismatchError: as ``checkpoint.save``.
            StateError: the last save is under way and ``busy`` is "raise", or this is closed.
        """
        if self._closed:
            raise StateError("this AsyncCheckpointer was closed; make a new one")
        if self._busy == "raise":
            under_way = self._future is not None and not self._future.done()
            error = StateError("the one before is still under way") if under_way else None
            hint = "Wait for its future, or make the checkpointer with busy='wait'"
            # With a label of its own: a rank whose "busy" differs gets an error that says so.
            what = "save unless busy"
            agree(self._backend, what, error, timeout=self._backend.timeout, ending=hint)
        self._settle()
        prepared = self._saver.prepare(
            state, step=step, extra=extra, generators=generators, metrics=metrics
        )
        try:
            prepared = replace(prepared, sources=self._staging.copy(prepared.sources))
        except Exception as error:  # no memory: the other ranks hear of it in the background
            prepared = replace(prepared, sources=(), failed=error)
        text = f"save of step {prepared.step}"
        work = self._executor.submit(lambda: self._write(prepared), text)
        self._future = CheckpointFuture(work)
        return self._future

    def _write(self, prepared: PreparedSave) -> Saved:
        try:
            return self._saver.write(prepared, self._group)
        except Exception as error:
            _LOG.error("A checkpoint was not written: %s", in_words(error))
            raise

    def _settle(self) -> None:
        """Wait for the save under way, whatever comes of it: its future and the log have that."""
        if self._future is not None:
            reported = self._future.reported
            with contextlib.suppress(Exception):
                self._future.wait()
            self._future.reported = reported

    def wait(self, timeout: float | None = None) -> Saved | None:
        """Wait for the last save and return what it saved; None if there was none.

        Raises what the future's ``wait`` raises.
        """
        return None if self._future is None else self._future.wait(timeout)

    def close(self) -> None:
        """Wait for the save under way, then release everything. May be called twice.

        Raises:
            CheckpointError, CommunicationError: the last save failed, and nobody has waited for it.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        try:
            if self._future is not None and not self._future.reported:
                self._future.wait()
        finally:
            self._backend.root.end_executor(self._executor)
            self._group.close()
            self._staging = Staging()

    def _at_exit(self) -> None:
        self._settle()

    def __enter__(self) -> AsyncCheckpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._future is not None:
            self._settle()
            self._future.reported = True  # what ended the block is what matters
        self.close()
