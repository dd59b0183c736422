"""How a folder comes to be a checkpoint: held, described, marked. One process does each of it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

from fsdpcore.checkpoint.format.marker import MARKER_NAME, Marker
from fsdpcore.checkpoint.format.metadata import METADATA_NAME, Metadata, StoredFile, make_metadata
from fsdpcore.checkpoint.plan.file_layout import FilePlaces
from fsdpcore.checkpoint.save.writing import FileSums
from fsdpcore.checkpoint.storage.many import for_many
from fsdpcore.checkpoint.storage.steps import StepName, new_step
from fsdpcore.checkpoint.storage.storage import Storage
from fsdpcore.core.errors import CheckpointError
from fsdpcore.core.geometry.regions import Region

_TRIES = 20  # for a folder that others remove, taking it for a leftover


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was committed.

    Attributes:
        step: its number.
        name: of its folder, below the path.
        nbytes: of all arrays.
        notes: what went wrong besides, such as an old checkpoint that could not be removed.
    """

    step: int
    name: str
    nbytes: int
    notes: tuple[str, ...] = ()


class RankFile(NamedTuple):
    """A file that was written.

    Attributes:
        rank: who did.
        places: what lies where.
        sums: checksums of its ends.
    """

    rank: int
    places: FilePlaces
    sums: FileSums


def file_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank_{rank}.safetensors"


@contextmanager
def new_claimed_step(storage: Storage, step: int) -> Iterator[StepName]:
    """Make the folder for a save of ``step``, and claim it until the exit; blocks.

    Between its making and the claim it looks like a leftover, which another job may clear; the same
    name may then be a folder of that job's. Whoever has claimed it while it is empty owns it.

    Raises:
        ArgumentError: ``step`` is no step.
        OSError: the folder could not be made or claimed.
    """
    storage.prepare()
    for _ in range(_TRIES):
        name = new_step(storage, step)
        with suppress(FileNotFoundError), ExitStack() as stack:
            if stack.enter_context(storage.claim(name.name)) and not storage.names(name.name):
                claim = stack.pop_all()
                break
    else:
        raise FileExistsError(errno.EEXIST, "other jobs take every new folder", storage.path)
    with claim:
        yield name


@contextmanager
def held_directory(storage: Storage, make: Callable[[], str]) -> Iterator[None]:
    """Hold a folder until the exit, against those that commit or clear leftovers; blocks.

    If it was cleared as a leftover before it was held, it is made again.

    Args:
        storage: where.
        make: makes the folder and returns its name.
    """
    with ExitStack() as held:
        for left in reversed(range(_TRIES)):
            name = make()
            try:
                held.enter_context(storage.hold(name))
                break
            except FileNotFoundError:
                if not left:
                    raise
        yield


def described(
    files: Iterable[RankFile],
    *,
    save_id: str,
    step: int,
    world_size: int,
    arrays: Mapping[str, tuple[str, tuple[int, ...]]],
    created: str | None = None,
    info: Mapping[str, Any] | None = None,
    extra: Any = None,
    ranks: Sequence[Any] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> Metadata:
    """Return the metadata for files that were written; the arguments are those of ``Metadata``.

    Raises:
        ArgumentError: they do not fit together.
    """
    stored: list[StoredFile] = []
    pieces: list[tuple[str, Region, int, int]] = []
    for rank, places, sums in files:
        for piece, offset in zip(places.pieces, places.offsets, strict=True):
            pieces.append((piece.name, piece.region, len(stored), offset))
        where = (places.size, places.data_start, places.table)
        stored.append(StoredFile(file_name(rank), *where, sums.header, sums.table))
    return make_metadata(
        save_id=save_id,
        step=step,
        world_size=world_size,
        created=created or now(),
        files=stored,
        arrays=arrays,
        pieces=pieces,
        info=info,
        extra=extra,
        ranks=ranks,
        metrics=metrics,
    )


def now() -> str:
    """Return the time, in UTC, as the files have it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def commit(storage: Storage, directory: str, metadata: Metadata) -> None:
    """Mark a folder, all files of which are durable, as a checkpoint; blocks.

    Raises:
        FileExistsError: another process is committing it.
        CheckpointError: a file is missing, or has another size than it should.
        OSError: it could not be written. Whether the folder is a checkpoint is not known then: its
            marker is to be removed.
    """
    data = metadata.to_bytes()
    storage.put(f"{directory}/{METADATA_NAME}", data)
    # The marker must not survive a crash that the others do not.
    storage.sync(directory)
    storage.sync()
    sizes = {file.name: file.size for file in metadata.files}
    _check_sizes(storage, directory, {METADATA_NAME: len(data), **sizes})
    marker = Marker.of(metadata.step, metadata.save_id, data, metadata.metrics)
    storage.put(f"{directory}/{MARKER_NAME}", marker.to_bytes())
    storage.sync(directory)


def _check_sizes(storage: Storage, directory: str, sizes: Mapping[str, int]) -> None:
    """Look whether all is there still: without locks, somebody may have cleared the folder."""

    def size_of(name: str) -> int | None:
        try:
            return storage.size(f"{directory}/{name}")
        except FileNotFoundError:
            return None

    for (name, wanted), size in zip(sizes.items(), for_many(size_of, sizes), strict=True):
        if size != wanted:
            there = "is gone" if size is None else f"has {size} bytes instead of {wanted}"
            raise CheckpointError(
                f"{storage.path}/{directory}/{name} {there}: somebody removes or changes the "
                "files of saves that are under way, or not all ranks write to the same folder"
            )
