"""Saves without the engine and without a backend: every rank calls, and none talks.

Each rank saves on its own: at once, one after the other, from one process or many. What they share
is the ``ShardMetadata``, which all make alike, and the storage::

    metadata = flat_shard_metadata(shapes, np.float32, 4, step=30, save_id=attempt)
    save_distributed(shards, "run/step_00000030", rank, 4, metadata)      # by every rank
    shards, metadata = load_distributed("run/step_00000030", rank, 6)     # by other six

The result is a checkpoint like any other: ``latest``, ``load`` and ``read`` find it if its folder
is named like one. A ``path`` here is the folder of one checkpoint, which has any name.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from fsdpcore.checkpoint.memory.shards import State, checked_state
from fsdpcore.checkpoint.plan.shard_specs import ShardMetadata, check_rank_of
from fsdpcore.checkpoint.save.rank_save import RankSave
from fsdpcore.checkpoint.save.shard_sources import sources_of
from fsdpcore.checkpoint.storage.opening import open_folder
from fsdpcore.checkpoint.storage.steps import StepName
from fsdpcore.checkpoint.storage.storage import Storage
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ArgumentError, CheckpointError, in_words


def save_distributed(
    state: State, path: str | os.PathLike[str], rank: int, world_size: int, metadata: ShardMetadata
) -> bool:
    """Save one rank's part of a checkpoint, and commit it if the others have saved theirs; blocks.

    There is no communication. Until the last rank has saved, the folder is no checkpoint, and what
    was saved in another one stays the newest. Where an attempt did not get that far, all ranks try
    again, into the same folder or another, with another ``save_id``: parts of different attempts
    never come together, whenever processes are killed. ``fc.checkpoint.save`` into the same run
    meanwhile would take the folder for a leftover; and of two attempts that overlap neither may be
    committed.

    Args:
        state: this rank's part of every array, by name, of the dtype and the regions in
            ``metadata.shards[rank]``: a ``ShardedArray`` for ranges, of a box or of the whole, a
            ``BoxShard`` for a box; or a plain array, for a box of its shape, for ranges flat with
            one behind the other, for all of an array of the array's shape. All of them are
            NumPy's: what is on a GPU is to be copied before. Nothing needs to be contiguous; it is
            only read.
        path: of this one checkpoint, a folder or a URL. ``step_`` and the step in eight digits,
            such as ``run/step_00000030``, make it one that ``latest("run")`` finds.
        rank: this one, from 0.
        world_size: number of ranks that save.
        metadata: what all ranks save; the same on each of them.

    Returns:
        Whether this call has committed the checkpoint, which is one then. Of all ranks only one
        call does.

    Raises:
        ArgumentError: ``state`` is not what ``metadata`` says; a checkpoint was committed there
            already; this rank has used the ``save_id`` before, for something else; or ranks have
            given different metadata under it. In the last case the part is written, otherwise
            nothing is.
        CheckpointError: it could not be written; or all ranks have, but it could not be committed,
            such as when others have read in the folder for a minute. Any rank can commit it with
            the same call again.
    """
    storage, directory = open_folder(path)
    return _save(storage, directory, state, rank, world_size, metadata)


def _save(
    storage: Storage,
    directory: str,
    state: State,
    rank: int,
    world_size: int,
    metadata: ShardMetadata,
) -> bool:
    return PreparedPart.of(storage, directory, state, rank, world_size, metadata).write()


@dataclass(frozen=True)
class PreparedPart:
    """A rank's part that makes sense, and of which nothing is written.

    Attributes:
        saving: what writes it.
        sources: the elements of every region of this rank, one after the other.
        what: is saved, for messages.
    """

    saving: RankSave
    sources: Sequence[Array]
    what: str

    @classmethod
    def of(
        cls,
        storage: Storage,
        directory: str,
        state: State,
        rank: int,
        world_size: int,
        metadata: ShardMetadata,
    ) -> PreparedPart:
        """Check the arguments of ``save_distributed``; raises as that does."""
        rank, world_size = check_rank_of(rank, world_size)
        if not isinstance(metadata, ShardMetadata):
            raise ArgumentError(f"metadata must be a ShardMetadata, got {type(metadata).__name__}")
        if metadata.world_size != world_size:
            raise ArgumentError(
                f"metadata is of {metadata.world_size} ranks, but world_size is {world_size}"
            )
        step = StepName.parse(directory)
        if step is not None and step.step != metadata.step:
            raise ArgumentError(
                f"the folder {directory} is for step {step.step}, but metadata is of "
                f"{metadata.step}; {StepName(metadata.step).name} would be for that"
            )
        sources = sources_of(checked_state(state), metadata, rank)
        what = f"save of rank {rank} to {storage.path}/{directory}"
        return cls(RankSave(storage, directory, metadata, rank), sources, what)

    def write(self) -> bool:
        """Write it, and commit if all parts are there; blocks. As ``save_distributed``."""
        try:
            self.saving.write(self.sources)
            return self.saving.commit()
        except (OSError, EOFError) as error:
            raise CheckpointError(
                f"{self.what}: {in_words(error)}; nothing was committed by it"
            ) from error
