"""Saves in the background without a backend: each rank by itself, or a single process."""

from __future__ import annotations

import os
from dataclasses import replace

from fsdpcore.checkpoint.memory.shards import State
from fsdpcore.checkpoint.plan.shard_specs import ShardMetadata
from fsdpcore.checkpoint.save.background import (
    BackgroundSaves,
    Busy,
    CheckpointFuture,
    check_busy,
)
from fsdpcore.checkpoint.save.distributed import PreparedPart
from fsdpcore.checkpoint.storage.opening import open_folder
from fsdpcore.core.errors import CheckpointError, StateError
from fsdpcore.core.work import OrderedExecutor


class AsyncDistributedCheckpointer(BackgroundSaves[bool]):
    """Does what ``save_distributed`` does in the background, one save at a time.

    ``save`` copies what this rank writes before it returns, so that the training may change its
    arrays at once; a thread of this process writes the copy. The ranks do not talk: whichever
    finishes last commits. A process that is alone is rank 0 of 1. ::

        with fc.checkpoint.AsyncDistributedCheckpointer() as saver:
            for step in range(1000):
                train(state)
                meta = replace(meta, step=step, save_id=f"run7-{step}")    # of dataclasses
                saver.save(state, f"run/step_{step:08d}", rank, world_size, meta)

    It holds memory for one copy. Use it in a ``with`` statement, or call ``close``: both wait for
    the save under way, as does the end of the process.

    Args:
        busy: what a ``save`` does while another is under way: "wait" until that has ended, or
            "raise" StateError.

    Raises:
        ArgumentError: ``busy`` is neither.
    """

    def __init__(self, *, busy: Busy = "wait") -> None:
        check_busy(busy)
        super().__init__(busy, OrderedExecutor("fsdpcore-checkpoint"))

    def save(
        self,
        state: State,
        path: str | os.PathLike[str],
        rank: int,
        world_size: int,
        metadata: ShardMetadata,
    ) -> CheckpointFuture[bool]:
        """Begin a save; returns when the arrays are copied.

        Args:
            state, path, rank, world_size, metadata: as of ``save_distributed``.

        Returns:
            A ``Work``, whose ``wait`` returns what ``save_distributed`` would: whether this rank
            has committed the checkpoint. It raises likewise what could not be written.

        Raises:
            ArgumentError: the arguments make no sense; what was under way goes on.
            StateError: the last save is under way and ``busy`` is "raise", or this is closed.
            CheckpointError: there is no memory for the copy.
        """
        self._check_open()
        storage, directory = open_folder(path)
        part = PreparedPart.of(storage, directory, state, rank, world_size, metadata)
        if self._busy == "raise" and self._under_way():
            raise StateError(
                "the save before is still under way; wait for its future, or make the "
                "checkpointer with busy='wait'"
            )
        self._settle()
        try:
            copied = replace(part, sources=self._staging.copy(part.sources))
        except MemoryError as error:
            raise CheckpointError(f"{part.what}: there is no memory for a copy") from error
        return self._begin(copied.write, part.what)
