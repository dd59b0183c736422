"""Which checkpoints there are in a folder, which of them count, and which were never finished.

A directory is named after its step and counts only with a valid commit marker, which is written
last. So a step can be made, or removed, in several strokes, and is there or not at every moment.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Literal, NamedTuple, NoReturn

from fsdpcore.checkpoint.format.marker import MARKER_NAME, MAX_MARKER_BYTES, Marker, is_torn
from fsdpcore.checkpoint.format.metadata import MAX_STEP, METADATA_NAME, Metadata, StoredFile
from fsdpcore.checkpoint.storage.many import for_many
from fsdpcore.checkpoint.storage.opening import StoragePath, open_storage
from fsdpcore.checkpoint.storage.ranking import Best, best_first
from fsdpcore.checkpoint.storage.storage import Storage
from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    in_words,
)

_DIGITS = 8
# What the system says of something that is no regular file, or is larger than it was.
_NO_FILE = (errno.EFBIG, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO)
_NAME = re.compile(r"step_([0-9]{8,19})(?:\.([1-9][0-9]{0,8}))?")


class StepName(NamedTuple):
    """Which save of which step; the higher, the newer.

    Attributes:
        step: of the training.
        generation: 0 for the first save of that step, 1 for the next one.
    """

    step: int
    generation: int = 0

    @property
    def name(self) -> str:
        """Of the directory."""
        name = f"step_{self.step:0{_DIGITS}d}"
        return f"{name}.{self.generation}" if self.generation else name

    @classmethod
    def parse(cls, name: str) -> StepName | None:
        """Return what a directory's name stands for; None if it is no step's."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        found = cls(int(match[1]), int(match[2] or 0))
        # One name for each: digits without need would make two directories the same step.
        return found if found.name == name and found.step <= MAX_STEP else None


Which = StepName | int | Best | None
"""One save, the newest valid save of a step, the best one of all, or the newest."""

Kind = Literal["unfinished", "damaged", "unreachable"]


class Skipped(NamedTuple):
    """A directory that is no checkpoint that could be read.

    Attributes:
        name: of the directory.
        reason: what is wrong with it.
        kind: "unfinished" if it is known that no save ever finished there, or that it was removed;
            "damaged" if it is not what was saved; "unreachable" if the system could not read it,
            so that it may be valid.
    """

    name: str
    reason: str
    kind: Kind = "damaged"

    @property
    def committed(self) -> bool:
        """False if it is known that there is no checkpoint."""
        return self.kind != "unfinished"


class Committed(NamedTuple):
    """What one save has committed.

    Attributes:
        marker: its commit marker.
        data: the bytes of its metadata.
        metadata: what they say.
    """

    marker: Marker
    data: bytes
    metadata: Metadata


class FoundStep(NamedTuple):
    """A committed checkpoint; ``marker``, ``data`` and ``metadata`` as of ``Committed``."""

    name: StepName
    marker: Marker
    data: bytes
    metadata: Metadata


def directories(storage: Storage) -> list[StepName]:
    """Return the steps that have a directory, committed or not, the newest first; blocks."""
    parsed = map(StepName.parse, storage.names())
    return sorted((name for name in parsed if name is not None), reverse=True)


def check_step(step: object) -> int:
    """Return ``step`` as an int; raise ArgumentError if no checkpoint can have it."""
    number = as_int(step, "step", minimum=0)
    if number > MAX_STEP:
        raise ArgumentError(f"step must be below 2**62, got {number}")
    return number


def new_step(storage: Storage, step: int) -> StepName:
    """Make the directory for a save of ``step``, newer than all that step has; blocks.

    Raises:
        ArgumentError: ``step`` is no step.
        OSError: the directory could not be made.
    """
    check_step(step)
    taken = [name.generation for name in directories(storage) if name.step == step]
    generation = max(taken, default=-1) + 1
    while True:
        name = StepName(step, generation)
        try:
            storage.make_directory(name.name)
        except FileExistsError:  # another job saves to this folder
            generation += 1
        else:
            return name


def read_marker(storage: Storage, name: StepName) -> Marker:
    """Return a step's commit marker; blocks.

    Raises:
        CheckpointNotFoundError: the step has no directory.
        CorruptCheckpointError: it was never committed, or the marker is damaged or another step's.
        OSError: it could not be read.
    """
    return _marker_of(name, _read(storage, name, MARKER_NAME, MAX_MARKER_BYTES))


def _marker_of(name: StepName, data: bytes) -> Marker:
    marker = Marker.from_bytes(data)
    if marker.step != name.step:
        raise CorruptCheckpointError(
            f"{name.name} has the commit marker of step {marker.step}; its files were mixed up"
        )
    return marker


def read_committed(marker: Marker, read: Callable[[str, int], bytes]) -> Committed:
    """Read the metadata that a marker is for, and check that the same save wrote both; blocks.

    Args:
        marker: as it was read.
        read: returns the content of a file of the directory, of at most so many bytes.

    Raises:
        CorruptCheckpointError: the metadata is not what was committed.
        Exception: whatever ``read`` raises.
    """
    data = read(METADATA_NAME, marker.metadata_bytes)
    marker.check(data)
    metadata = Metadata.from_bytes(data)
    if (metadata.step, metadata.save_id) != (marker.step, marker.save_id):
        raise CorruptCheckpointError(f"{METADATA_NAME} is of another save than the commit marker")
    return Committed(marker, data, metadata)


def read_step(storage: Storage, name: StepName) -> Metadata:
    """Return what a committed step holds, after checking all but the contents of its files; blocks.

    Checked are the marker, the metadata and the size of every file.

    Raises:
        CheckpointNotFoundError: the step has no directory.
        CorruptCheckpointError: it was never committed, or is not what was committed.
        OSError: it could not be read.
    """
    return _checked(storage, name).metadata


def _checked(storage: Storage, name: StepName) -> Committed:
    """Do what ``read_step`` does, and return all that was read."""
    found = read_committed(read_marker(storage, name), partial(_read, storage, name))

    def check_size(file: StoredFile) -> None:
        try:
            size = storage.size(f"{name.name}/{file.name}")
        except OSError as error:
            _refuse(storage, name, file.name, error)
        if size != file.size:
            raise CorruptCheckpointError(
                f"{name.name}/{file.name} has {size} bytes, but {file.size} were committed"
            )

    for_many(check_size, found.metadata.files)
    return found


def candidates(storage: Storage, which: Which = None) -> Iterator[FoundStep | Skipped]:
    """Look at the directories, the newest or the best first, as far as the caller goes; blocks.

    Args:
        storage: where.
        which: look at the saves of this step only, at this save only, or at those that have a
            metric.

    Yields:
        ``FoundStep`` for a committed checkpoint, of which all but the contents of the files was
        checked; ``Skipped`` for what is none, or cannot be read.
    """
    names = directories(storage)
    if isinstance(which, Best):
        names = best_first(metrics_in(storage).items(), which)
    for name in names:
        if not (which is None or isinstance(which, Best) or which in (name, name.step)):
            continue
        # The marker first: one that is cut off now may be whole a moment later.
        if _unfinished(storage, name):
            reason = f"it has no {MARKER_NAME}, or one that is cut off"
            yield Skipped(name.name, f"{name.name} was not finished: {reason}", "unfinished")
            continue
        try:
            yield FoundStep(name, *_checked(storage, name))
        except CheckpointNotFoundError as error:
            yield Skipped(name.name, str(error), "unfinished")
        except CorruptCheckpointError as error:  # or it was removed meanwhile
            kind: Kind = "unfinished" if _unfinished(storage, name) else "damaged"
            yield Skipped(name.name, str(error), kind)
        except OSError as error:
            yield Skipped(name.name, in_words(error), "unreachable")


def committed(storage: Storage) -> dict[StepName, Marker]:
    """Return the markers of all committed checkpoints, the newest first; blocks.

    Of each step only the newest generation counts. Directories without a valid marker are left out.

    Raises:
        OSError: the folder could not be read.
    """
    found: dict[StepName, Marker] = {}
    done: set[int] = set()
    for name in directories(storage):
        if name.step not in done:
            # Not read_marker: where there is none it lists the folder, to say what is missing.
            with suppress(CheckpointError, OSError, EOFError):
                data = storage.read(f"{name.name}/{MARKER_NAME}", MAX_MARKER_BYTES)
                found[name] = _marker_of(name, data)
                done.add(name.step)
    return found


def metrics_in(storage: Storage) -> dict[StepName, dict[str, float]]:
    """Return the metrics of all committed checkpoints, the newest first; blocks."""
    return {name: marker.metrics for name, marker in committed(storage).items()}


def metrics(path: StoragePath) -> dict[int, dict[str, float]]:
    """Return the metrics of each step that has a committed checkpoint, in ascending order; blocks.

    As ``steps``, which returns the numbers alone. ::

        {10: {"loss": 2.5}, 20: {"loss": 1.25}}

    Args:
        path: a folder of steps, or a URL of fsspec.

    Raises:
        OSError: the folder could not be read.
    """
    found = metrics_in(open_storage(path))
    return {name.step: found[name] for name in sorted(found)}


def steps(path: StoragePath) -> list[int]:
    """Return the steps that have a committed checkpoint, in ascending order; blocks.

    The markers in the folder ``path`` are read, nothing else: ``latest`` looks closer.

    Args:
        path: a folder of steps; one that is not there has none.

    Raises:
        OSError: the folder could not be read.

    Example::

        if fc.checkpoint.steps("run"):
            fc.checkpoint.load("run", engine, backend)
    """
    return sorted(name.step for name in committed(open_storage(path)))


def is_leftover(storage: Storage, name: StepName) -> bool:
    """Return whether no save of a directory was committed: no marker, or one that was cut off.

    A marker that is damaged otherwise, or of a later version, is no leftover: nobody removes it.

    Raises:
        OSError: the marker could not be read.
    """
    try:
        data = storage.read(f"{name.name}/{MARKER_NAME}", MAX_MARKER_BYTES)
    except FileNotFoundError:
        return True
    return is_torn(data)


def _unfinished(storage: Storage, name: StepName) -> bool:
    """Whether a directory surely is a leftover."""
    with suppress(OSError):
        return is_leftover(storage, name)
    return False


def _read(storage: Storage, name: StepName, file: str, limit: int) -> bytes:
    try:
        return storage.read(f"{name.name}/{file}", limit)
    except (OSError, EOFError) as error:
        _refuse(storage, name, file, error)


def _refuse(storage: Storage, name: StepName, file: str, error: OSError | EOFError) -> NoReturn:
    """Raise what an error says about a step: that it is none, is damaged, or is out of reach."""
    if isinstance(error, FileNotFoundError):
        if name not in directories(storage):
            raise CheckpointNotFoundError(f"there is no {name.name} in {storage.path}") from None
        if file == MARKER_NAME:
            raise CorruptCheckpointError(
                f"{name.name} was not finished: it has no {MARKER_NAME}"
            ) from None
        raise CorruptCheckpointError(f"{name.name}/{file} is missing") from None
    if isinstance(error, EOFError) or error.errno in _NO_FILE:
        raise CorruptCheckpointError(f"{name.name}/{file}: {error}") from error
    raise error
