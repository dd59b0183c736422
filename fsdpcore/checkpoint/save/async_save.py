"""Saving while training goes on: copy, return, write in the background."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fsdpcore.checkpoint.format.generators import Generators
from fsdpcore.checkpoint.plan.describe import StatefulEngine
from fsdpcore.checkpoint.plan.kinds import Stateful
from fsdpcore.checkpoint.save.background import (
    BackgroundSaves,
    Busy,
    CheckpointFuture,
    check_busy,
)
from fsdpcore.checkpoint.save.saver import Saver
from fsdpcore.checkpoint.save.step_folder import Saved
from fsdpcore.checkpoint.storage.opening import DISK_TIMEOUT, StoragePath
from fsdpcore.checkpoint.storage.retention import Retention
from fsdpcore.collectives.consensus import agree
from fsdpcore.comm.backend import Backend
from fsdpcore.core.errors import StateError


class AsyncCheckpointer(BackgroundSaves[Saved]):
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

    Example::

        with fc.checkpoint.AsyncCheckpointer("run", backend) as saver:
            for batch in batches:
                train(engine, batch)
                saver.save(engine)
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
        check_busy(busy)
        self._saver = Saver(path, backend, retention=retention, timeout=timeout)
        self._backend = backend
        self._group = backend.sub(range(backend.world_size), name="checkpoint")
        root = backend.root
        executor = root.new_executor(f"fsdpcore-checkpoint-{root.rank}")
        super().__init__(busy, executor, backend.device)

    def save(
        self,
        state: StatefulEngine | Stateful | Mapping[str, Any],
        *,
        step: int | None = None,
        extra: Any = None,
        generators: Generators | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> CheckpointFuture[Saved]:
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
        self._check_open()
        if self._busy == "raise":
            error = StateError("the one before is still under way") if self._under_way() else None
            hint = "Wait for its future, or make the checkpointer with busy='wait'"
            # With a label of its own: a rank whose "busy" differs gets an error that says so.
            what = "save unless busy"
            agree(self._backend, what, error, timeout=self._backend.timeout, ending=hint)
        self._settle()
        own = self._saver.describe(
            state, step=step, extra=extra, generators=generators, metrics=metrics
        )
        prepared = self._saver.prepare(own)
        try:
            prepared = replace(prepared, sources=self._staging.copy(prepared.sources))
        except Exception as error:  # no memory: the other ranks hear of it in the background
            prepared = replace(prepared, sources=(), failed=error)
        return self._begin(
            lambda: self._saver.write(prepared, self._group), f"save of step {prepared.step}"
        )

    def _release(self) -> None:
        self._backend.root.end_executor(self._executor)
        self._group.close()
