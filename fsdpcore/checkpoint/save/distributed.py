"""Checkpoints without the engine and without a backend: every rank calls, and none talks.

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
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from fsdpcore.checkpoint.format.marker import MARKER_NAME, MAX_MARKER_BYTES, Marker, is_torn
from fsdpcore.checkpoint.format.metadata import METADATA_NAME, Metadata
from fsdpcore.checkpoint.load.local_reads import read_alone
from fsdpcore.checkpoint.load.reading import FileSet, usual_threads
from fsdpcore.checkpoint.plan.catalog import Catalog
from fsdpcore.checkpoint.plan.plan_load import Wanted, is_covered, plan_load
from fsdpcore.checkpoint.plan.shard_specs import (
    ShardMetadata,
    TensorShardSpec,
    compute_shard_sizes,
    flat_shard_metadata,
)
from fsdpcore.checkpoint.plan.shards import Shard, State, checked_state, parts_of
from fsdpcore.checkpoint.save.joining import Joining
from fsdpcore.checkpoint.save.rank_state import empty_shard, sources_of
from fsdpcore.checkpoint.storage.steps import StepName
from fsdpcore.checkpoint.storage.storage import Storage, open_storage
from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    in_words,
)

__all__ = [
    "ShardMetadata",
    "TensorShardSpec",
    "compute_shard_sizes",
    "flat_shard_metadata",
    "load_distributed",
    "reshard",
    "save_distributed",
]

_Path = str | os.PathLike[str]
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(.+)")


def save_distributed(
    state: State, path: _Path, rank: int, world_size: int, metadata: ShardMetadata
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
    storage, directory = _folder(path)
    return _save(storage, directory, state, rank, world_size, metadata)


def load_distributed(
    path: _Path,
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
    storage, directory = _folder(path)
    return _load(storage, directory, rank, world_size, layout=layout, threads=threads)


def reshard(
    path: _Path, old_world_size: int, new_world_size: int, new_rank: int
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
    """
    storage, directory = _folder(path)
    old = as_int(old_world_size, "old_world_size", minimum=1)
    state, _ = _load(storage, directory, new_rank, new_world_size, saved_by=old)
    return state


def _folder(path: _Path) -> tuple[Storage, str]:
    """Return the storage of the folder above ``path``, and the last part of its name."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str) or "\0" in text or not text:
        raise ArgumentError(
            f"the path of a checkpoint is that of its folder, as text or a URL; got {path!r:.80}"
        )
    url = _URL.fullmatch(text)
    if url is None:
        above, name = os.path.split(os.path.abspath(text))
    else:
        above, _, name = url[2].rstrip("/").rpartition("/")
        above = above and url[1] + above
    if not above or not name:
        raise ArgumentError(f"a checkpoint is a folder in another one, which {text!r:.200} is not")
    return open_storage(above), name


def _check_rank(rank: int, world_size: int) -> tuple[int, int]:
    world_size = as_int(world_size, "world_size", minimum=1)
    rank = as_int(rank, "rank", minimum=0)
    if rank >= world_size:
        raise ArgumentError(f"rank {rank} is none of {world_size} ranks, counted from 0")
    return rank, world_size


# Saving.


def _save(
    storage: Storage,
    directory: str,
    state: State,
    rank: int,
    world_size: int,
    metadata: ShardMetadata,
) -> bool:
    rank, world_size = _check_rank(rank, world_size)
    if not isinstance(metadata, ShardMetadata):
        raise ArgumentError(f"metadata must be a ShardMetadata, got {type(metadata).__name__}")
    if metadata.world_size != world_size:
        raise ArgumentError(
            f"metadata is of {metadata.world_size} ranks, but world_size is {world_size}"
        )
    step = StepName.parse(directory)
    if step is not None and step.step != metadata.step:
        raise ArgumentError(
            f"the folder {directory} is for step {step.step}, but metadata is of {metadata.step}; "
            f"{StepName(metadata.step).name} would be for that"
        )
    sources = sources_of(checked_state(state), metadata, rank)
    joining = Joining(storage, directory, metadata, rank)
    try:
        joining.write(sources)
        return joining.commit()
    except (OSError, EOFError) as error:
        raise CheckpointError(
            f"save of rank {rank} to {storage.path}/{directory}: {in_words(error)}; nothing was "
            "committed by it"
        ) from error


# Loading.


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
    rank, world_size = _check_rank(rank, world_size)
    count = usual_threads() if threads is None else as_int(threads, "threads", minimum=1)
    with _committed(storage, directory) as saved:
        if saved_by not in (None, saved.world_size):
            raise ArgumentError(
                f"{storage.path}/{directory} was saved by {saved.world_size} ranks, not {saved_by}"
            )
        found = _laid_out(saved, world_size, layout)
        catalog = Catalog(saved)
        state: dict[str, Shard] = {}
        wanted: list[Wanted] = []
        for name, (dtype, shape) in found.arrays.items():
            state[name] = empty_shard(TensorShardSpec(name, dtype, shape))
        for spec in found.shards[rank]:
            # Before there is memory for it: a shape may say more than there is.
            tensor = saved.tensors[spec.name]
            if not all(is_covered(tensor, region) for region in spec.parts):
                raise CheckpointError(
                    f"{directory}: not all elements were saved of {spec.name!r:.80}"
                )
            shard = state[spec.name] = empty_shard(spec)
            wanted += [Wanted(catalog.number[spec.name], part) for part in parts_of(shard)]
        plan = plan_load(catalog, wanted)
        with FileSet(storage, directory, catalog, count) as files:
            read_alone(files, catalog, plan)
    return state, found


@contextmanager
def _committed(storage: Storage, directory: str) -> Iterator[Metadata]:
    """Give what a committed checkpoint holds, and let nobody remove it meanwhile."""
    where = f"{storage.path}/{directory}"
    with ExitStack() as held:
        try:
            held.enter_context(storage.hold(directory))
            told = storage.read(f"{directory}/{MARKER_NAME}", MAX_MARKER_BYTES)
            if is_torn(told):
                raise CheckpointNotFoundError(
                    f"no save into {where} was finished: its {MARKER_NAME} is cut off"
                )
            marker = Marker.from_bytes(told)
            data = storage.read(f"{directory}/{METADATA_NAME}", marker.metadata_bytes)
        except FileNotFoundError as error:
            raise _not_found(storage, directory) from error
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{where} cannot be read: {in_words(error)}") from error
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{where}: {error}") from None
        try:
            marker.check(data)
            metadata = Metadata.from_bytes(data)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{where}: {error}") from None
        name = StepName.parse(directory)
        same = (metadata.step, metadata.save_id) == (marker.step, marker.save_id)
        if not same or (name and name.step != marker.step):
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
