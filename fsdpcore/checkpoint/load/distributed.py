"""Loads without the engine and without a backend: any rank calls, and none talks.

``save.distributed`` says how ranks save like that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np

from fsdpcore.checkpoint.format.marker import MARKER_NAME, MAX_MARKER_BYTES, Marker, is_torn
from fsdpcore.checkpoint.format.metadata import METADATA_NAME, Metadata
from fsdpcore.checkpoint.load.local_reads import read_alone
from fsdpcore.checkpoint.load.reading import FileSet, usual_threads
from fsdpcore.checkpoint.memory.shards import Shard, parts_of
from fsdpcore.checkpoint.plan.catalog import Catalog
from fsdpcore.checkpoint.plan.read_plan import WantedPart, is_covered, plan_reads
from fsdpcore.checkpoint.plan.shard_specs import (
    ShardMetadata,
    TensorShardSpec,
    check_rank_of,
    flat_shard_metadata,
)
from fsdpcore.checkpoint.storage.opening import open_folder
from fsdpcore.checkpoint.storage.steps import StepName, read_committed
from fsdpcore.checkpoint.storage.storage import Storage
from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    in_words,
)
from fsdpcore.core.geometry.boxes import BoxShard
from fsdpcore.core.geometry.regions import Box, Range
from fsdpcore.fsdp.state.state import ArrayPiece, ShardedArray


def load_distributed(
    path: str | os.PathLike[str],
    rank: int,
    world_size: int,
    *,
    layout: ShardMetadata | None = None,
    threads: int | None = None,
) -> tuple[dict[str, Shard], ShardMetadata]:
    """Load one rank's part of a checkpoint, whoever saved it and on however many ranks; blocks.

    There is no communication. Only what this rank needs is read, in whole blocks of 64 KiB, whose
    checksums are verified.

    Args:
        path: of this one checkpoint, as ``save_distributed`` has it; or one of ``save``, such as
            ``run/step_00000030``.
        rank: this one, from 0.
        world_size: number of ranks that load.
        layout: which rank is to have what; its step, ``save_id`` and ``extra`` mean nothing, and it
            may lack arrays. By default all arrays lie in flat buffers, cut into equal shares as
            ``flat_shard_metadata`` does it.
        threads: that read; by default as many as there are cores, at most 4.

    Returns:
        This rank's part of every array, by name, in new memory: a ``BoxShard`` where the layout has
        a box, else a ``ShardedArray``, maybe without pieces. And what all ranks have then, with the
        step, ``save_id`` and ``extra`` of the checkpoint: after ``replace(metadata, step=...,
        save_id=...)``, of ``dataclasses``, both go to ``save_distributed``.

    Raises:
        ArgumentError: ``rank`` is none of ``world_size``, or the layout has other ranks or arrays.
        CheckpointNotFoundError: there is no such folder, or no save into it was committed.
        CorruptCheckpointError: it is not what was committed.
        CheckpointError: it could not be read, or does not have all elements of an array.
    """
    storage, directory = open_folder(path)
    return _load(storage, directory, rank, world_size, layout=layout, threads=threads)


def reshard(
    path: str | os.PathLike[str], old_world_size: int, new_world_size: int, new_rank: int
) -> dict[str, Shard]:
    """Load what one of ``new_world_size`` ranks has of a checkpoint that others saved; blocks.

    Args:
        path: of this one checkpoint, see ``load_distributed``.
        old_world_size: number of ranks that saved; compared with what the checkpoint says.
        new_world_size: number of ranks that share it now, in flat buffers.
        new_rank: one of them, from 0.

    Returns:
        This rank's part of every array, see ``load_distributed``.

    Raises:
        ArgumentError: another number of ranks saved it, or ``new_rank`` does not exist.
        CheckpointError: as ``load_distributed``, with all kinds of it.

    Example::

        mine = fc.checkpoint.reshard("run/step_00000030", 4, 3, new_rank=0)
    """
    storage, directory = open_folder(path)
    old = as_int(old_world_size, "old_world_size", minimum=1)
    state, _ = _load(storage, directory, new_rank, new_world_size, saved_by=old)
    return state


def _load(
    storage: Storage,
    directory: str,
    rank: int,
    world_size: int,
    *,
    layout: ShardMetadata | None = None,
    threads: int | None = None,
    saved_by: int | None = None,
) -> tuple[dict[str, Shard], ShardMetadata]:
    rank, world_size = check_rank_of(rank, world_size)
    count = usual_threads() if threads is None else as_int(threads, "threads", minimum=1)
    with _committed(storage, directory) as saved:
        if saved_by not in (None, saved.world_size):
            raise ArgumentError(
                f"{storage.path}/{directory} was saved by {saved.world_size} ranks, not {saved_by}"
            )
        found = _laid_out(saved, world_size, layout)
        catalog = Catalog(saved)
        state: dict[str, Shard] = {}
        wanted: list[WantedPart] = []
        for name, (dtype, shape) in found.arrays.items():
            state[name] = _empty_shard(TensorShardSpec(name, dtype, shape))
        for spec in found.shards[rank]:
            # Before there is memory for it: a shape may say more than there is.
            tensor = saved.tensors[spec.name]
            if not all(is_covered(tensor, region) for region in spec.parts):
                raise CheckpointError(
                    f"{directory}: not all elements were saved of {spec.name!r:.80}"
                )
            shard = state[spec.name] = _empty_shard(spec)
            wanted += [WantedPart(catalog.number[spec.name], part) for part in parts_of(shard)]
        plan = plan_reads(catalog, wanted)
        with FileSet(storage, directory, catalog, count) as files:
            read_alone(files, catalog, plan)
    return state, found


@contextmanager
def _committed(storage: Storage, directory: str) -> Iterator[Metadata]:
    """Give what a committed checkpoint holds, and let nobody remove it meanwhile."""
    where = f"{storage.path}/{directory}"

    def read(file: str, limit: int) -> bytes:
        return storage.read(f"{directory}/{file}", limit)

    with ExitStack() as held:
        try:
            held.enter_context(storage.hold(directory))
            marked = read(MARKER_NAME, MAX_MARKER_BYTES)
            if is_torn(marked):
                raise CheckpointNotFoundError(
                    f"no save into {where} was finished: its {MARKER_NAME} is cut off"
                )
            marker, _, metadata = read_committed(Marker.from_bytes(marked), read)
        except FileNotFoundError as error:
            raise _not_found(storage, directory) from error
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{where} cannot be read: {in_words(error)}") from error
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{where}: {error}") from None
        name = StepName.parse(directory)
        if name and name.step != marker.step:
            raise CorruptCheckpointError(f"{where}: its files are of different saves")
        yield metadata


def _not_found(storage: Storage, directory: str) -> CheckpointError:
    """Return the error that says best what is missing."""
    where = f"{storage.path}/{directory}"
    names = storage.names(directory)
    if MARKER_NAME in names:
        return CorruptCheckpointError(f"{where}/{METADATA_NAME} is missing")
    if directory not in storage.names():
        return CheckpointNotFoundError(f"there is no {where}")
    steps = [step for each in names if (step := StepName.parse(each)) is not None]
    if steps:
        return CheckpointNotFoundError(
            f"{where} is a folder of checkpoints; give the path of one, such as "
            f"{where}/{max(steps).name}"
        )
    return CheckpointNotFoundError(
        f"no save into {where} was finished: it has no {MARKER_NAME}. There is "
        f"{', '.join(sorted(names)[:8]) or 'nothing'}"
    )


def _laid_out(saved: Metadata, world_size: int, layout: ShardMetadata | None) -> ShardMetadata:
    """Return who is to have what, with the step, ``save_id`` and ``extra`` of the checkpoint."""
    if layout is None:
        return flat_shard_metadata(
            {name: tensor.shape for name, tensor in saved.tensors.items()},
            {name: tensor.dtype for name, tensor in saved.tensors.items()},
            world_size,
            step=saved.step,
            save_id=saved.save_id,
            extra=saved.extra,
        )
    if not isinstance(layout, ShardMetadata) or layout.world_size != world_size:
        raise ArgumentError(f"layout must be a ShardMetadata of {world_size} ranks")
    for name, (dtype, shape) in layout.arrays.items():
        tensor = saved.tensors.get(name)
        if tensor is None:
            raise ArgumentError(f"the layout has {name!r:.80}, which the checkpoint does not have")
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            raise ArgumentError(
                f"{name!r:.80} has dtype {dtype} and shape {shape} in the layout, but "
                f"{tensor.dtype} and {tensor.shape} in the checkpoint"
            )
    return replace(layout, step=saved.step, save_id=saved.save_id, extra=saved.extra)


def _empty_shard(spec: TensorShardSpec) -> Shard:
    """Return new memory for what a rank has of an array, its contents undefined."""
    if spec.box is None and any(isinstance(region, Box) for region in spec.parts):
        (box,) = spec.regions
        assert isinstance(box, Box)
        return BoxShard(spec.shape, box.start, np.empty(box.shape, spec.dtype))
    pieces = tuple(
        ArrayPiece(region.start, region.stop, np.empty(region.size, spec.dtype))
        for region in spec.regions
        if isinstance(region, Range)
    )
    return ShardedArray(spec.shape, spec.dtype, pieces, spec.replica, spec.replicas, spec.box)
