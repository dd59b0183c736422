"""One save at a time on a thread of its own, and what is told of how it ended."""

from __future__ import annotations

import atexit
import contextlib
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Literal, TypeVar, get_args

from fsdpcore.checkpoint.memory.staging import Staging
from fsdpcore.core.checks import as_choice
from fsdpcore.core.device import HOST, Device
from fsdpcore.core.errors import StateError, in_words
from fsdpcore.core.work import OrderedExecutor, Pending, Work

_LOG = logging.getLogger("fsdpcore")

Busy = Literal["wait", "raise"]

_T = TypeVar("_T")
_Self = TypeVar("_Self", bound="BackgroundSaves")  # type: ignore[type-arg]


def check_busy(busy: object) -> None:
    """Raise ArgumentError unless it is a ``Busy``."""
    as_choice(busy, get_args(Busy), "busy")


class CheckpointFuture(Work, Generic[_T]):
    """A save in the background.

    ``AsyncCheckpointer.save`` and ``AsyncDistributedCheckpointer.save`` make it.
    """

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

    def wait(self, timeout: float | None = None) -> _T:
        """Block until it has ended and return what came of it, as often as it is called.

        Args:
            timeout: seconds to wait; by default as long as it takes.

        Returns:
            What the save would have returned that is no background one: what was saved, or, of
            ``AsyncDistributedCheckpointer``, whether this rank has committed the checkpoint.

        Raises:
            CommTimeoutError: the time is over; the save goes on.
            CheckpointError: a rank could not write; on all ranks that have a backend.
            CommunicationError: a rank is gone.
        """
        try:
            value: _T = self._work.wait(timeout)
        finally:
            self.reported = self.reported or self.done()
        return value


class BackgroundSaves(Generic[_T]):
    """What checkpointers have in common.

    Args:
        busy: what a save does while another is under way.
        executor: its thread; ended by ``_release``.
        device: where arrays may be, beside the host.
    """

    def __init__(self, busy: Busy, executor: OrderedExecutor, device: Device = HOST) -> None:
        self._busy = busy
        self._staging = Staging(device)
        self._future: CheckpointFuture[_T] | None = None
        self._closed = False
        self._executor = executor
        atexit.register(self._at_exit)

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"this {type(self).__name__} was closed; make a new one")

    def _under_way(self) -> bool:
        return self._future is not None and not self._future.done()

    def _begin(self, task: Callable[[], _T], text: str) -> CheckpointFuture[_T]:
        """Start a save; what it writes was copied."""

        def logged() -> _T:
            try:
                return task()
            except Exception as error:
                _LOG.error("A checkpoint was not written: %s", in_words(error))
                raise

        self._future = CheckpointFuture(self._executor.submit(logged, text))
        return self._future

    def _settle(self) -> None:
        """Wait for the save under way, whatever comes of it: its future and the log have that."""
        if self._future is not None:
            reported = self._future.reported
            with contextlib.suppress(Exception):
                self._future.wait()
            self._future.reported = reported

    def wait(self, timeout: float | None = None) -> _T | None:
        """Block until the last save has ended.

        Args:
            timeout: seconds to wait; by default as long as it takes.

        Returns:
            What the ``wait`` of its future returns; None if there was no save.

        Raises:
            CommTimeoutError, CheckpointError, CommunicationError: as that ``wait``.
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
            self._release()
            self._staging = Staging()

    def _release(self) -> None:
        """End the executor, on which nothing is under way."""
        self._executor.close(0)

    def _at_exit(self) -> None:
        self._settle()

    def __enter__(self: _Self) -> _Self:
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
