"""``verify``: every byte of a checkpoint, and all that is wrong with it."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass

from fsdpcore.checkpoint.format.marker import MARKER_NAME, Marker
from fsdpcore.checkpoint.format.metadata import METADATA_NAME, Metadata
from fsdpcore.checkpoint.format.strict_json import short
from fsdpcore.checkpoint.interchange.array_sources import ProgressCallback
from fsdpcore.checkpoint.interchange.streaming import ProgressCounter
from fsdpcore.checkpoint.interchange.verify_file import Problem, check_file
from fsdpcore.checkpoint.load.finding import chosen_step
from fsdpcore.checkpoint.load.reading import usual_threads
from fsdpcore.checkpoint.storage.opening import StoragePath
from fsdpcore.checkpoint.storage.ranking import Best, Step, best_first
from fsdpcore.checkpoint.storage.steps import (
    StepName,
    Which,
    directories,
    is_leftover,
    metrics_in,
    read_marker,
)
from fsdpcore.checkpoint.storage.storage import Storage
from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    in_words,
)
from fsdpcore.core.text import listed

__all__ = ["Problem", "Verified", "verify"]


@dataclass(frozen=True)
class Verified:
    """What was found.

    Attributes:
        step: of the checkpoint.
        name: of its folder.
        problems: all that is wrong; none if it is what was saved.
        files: that were looked at, marker and metadata included.
        nbytes: of them.
    """

    step: int
    name: str
    problems: tuple[Problem, ...]
    files: int
    nbytes: int

    @property
    def valid(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(
    path: StoragePath,
    *,
    step: Step = None,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> Verified:
    """Check every byte of a checkpoint; blocks.

    Marker, metadata, headers, the checksums of all data, that no element is missing, that every
    file is of this save, and that no other files are there.

    Args:
        path: a folder of steps, or that of one.
        step: which one: its number, "latest" or "best:METRIC", see ``load``; by default the newest
            that was committed, be it damaged or not.
        threads: that read and compute checksums; by default as many as cores, at most 4.
        progress: called with the bytes that are checked and those in all.

    Returns:
        All problems that were found; nothing is raised for them.

    Raises:
        ArgumentError: ``step`` is none, or contradicts the path.
        CheckpointNotFoundError: there is no such checkpoint.
        CheckpointError: the folder could not be read.

    Example::

        print(fc.checkpoint.verify("run").problems)
    """
    storage, which = chosen_step(path, step)
    count = usual_threads() if threads is None else as_int(threads, "threads", minimum=1)
    name: StepName | None = None
    try:
        name = _wanted(storage, which)
        with ExitStack() as stack:
            with suppress(PermissionError):
                stack.enter_context(storage.hold(name.name))
            return _Verifier(storage, name, count, progress).run()
    except FileNotFoundError as error:
        missing = "" if name is None else name.name
        raise CheckpointNotFoundError(f"there is no {missing} in {storage.path}") from error
    except OSError as error:
        raise CheckpointError(f"{storage.path}: {in_words(error)}") from error


def _wanted(storage: Storage, which: Which) -> StepName:
    """Return the step to check; of the best by a metric the first, be it damaged or not."""
    if isinstance(which, StepName):
        return which
    if not isinstance(which, Best):
        return _newest(storage, which)
    known = metrics_in(storage)
    order = best_first(known.items(), which)
    if not order:
        there = listed(sorted({name for each in known.values() for name in each})) or "none"
        raise CheckpointNotFoundError(
            f"there is no checkpoint with the metric {which.metric!r:.80} in {storage.path}, where "
            f"the metrics are {there}"
        )
    return order[0]


def _newest(storage: Storage, step: int | None) -> StepName:
    leftover = None
    for name in directories(storage):
        if step is not None and name.step != step:
            continue
        with suppress(OSError):
            if is_leftover(storage, name):
                leftover = leftover or name
                continue
        return name
    if leftover is not None and step is not None:
        return leftover
    what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise CheckpointNotFoundError(f"there is {what} in {storage.path}")


class _Verifier:
    def __init__(
        self, storage: Storage, name: StepName, threads: int, progress: ProgressCallback | None
    ) -> None:
        self._storage = storage
        self._name = name
        self._threads = threads
        self._progress = progress
        self._problems: list[Problem] = []
        self._nbytes = 0
        self._files = 0

    def run(self) -> Verified:
        marker = self._marker()
        metadata = self._metadata(marker)
        known = {MARKER_NAME, METADATA_NAME}
        if metadata is not None:
            known |= {file.name for file in metadata.files}
            if marker is not None and (metadata.step, metadata.save_id) != (
                marker.step,
                marker.save_id,
            ):
                self._add(METADATA_NAME, "is of another save than the commit marker")
            if metadata.step != self._name.step:
                self._add(METADATA_NAME, f"is of step {metadata.step}")
            self._check_coverage(metadata)
            self._check_files(metadata)
        for extra in sorted(set(self._storage.names(self._name.name)) - known):
            if metadata is None:
                self._add(extra, "cannot be checked without the metadata")
            else:
                self._add(extra, "is no file of this checkpoint")
        name = self._name
        return Verified(name.step, name.name, tuple(self._problems), self._files, self._nbytes)

    def _add(self, file: str, what: str) -> None:
        self._problems.append(Problem(file, what))

    def _marker(self) -> Marker | None:
        self._count(MARKER_NAME)
        try:
            return read_marker(self._storage, self._name)
        except CorruptCheckpointError as error:
            self._add(MARKER_NAME, str(error))
        except OSError as error:
            self._add(MARKER_NAME, f"cannot be read: {in_words(error)}")
        return None

    def _count(self, file: str) -> int:
        with suppress(OSError):
            size = self._storage.size(f"{self._name.name}/{file}")
            self._nbytes += size
            self._files += 1
            return size
        return 0

    def _metadata(self, marker: Marker | None) -> Metadata | None:
        size = self._count(METADATA_NAME)
        try:
            data = self._storage.read(f"{self._name.name}/{METADATA_NAME}", size)
        except FileNotFoundError:
            self._add(METADATA_NAME, "is missing")
            return None
        except (OSError, EOFError) as error:
            self._add(METADATA_NAME, f"cannot be read: {in_words(error)}")
            return None
        if marker is not None:
            try:
                marker.check(data)
            except CorruptCheckpointError as error:
                self._add(METADATA_NAME, str(error))
        try:
            return Metadata.from_bytes(data)
        except CorruptCheckpointError as error:
            self._add(METADATA_NAME, str(error))
        return None

    def _check_coverage(self, metadata: Metadata) -> None:
        for tensor in metadata.tensors.values():
            if tensor.missing:
                size = tensor.nbytes // tensor.dtype.itemsize
                name = short(tensor.name)
                what = f"{tensor.missing} of the {size} elements of {name} were not saved"
                self._add(METADATA_NAME, what)

    def _check_files(self, metadata: Metadata) -> None:
        counting = ProgressCounter(sum(file.size for file in metadata.files), self._progress)
        for number, file in enumerate(metadata.files):
            self._count(file.name)
            self._problems += check_file(
                self._storage,
                self._name.name,
                metadata,
                number,
                self._threads,
                counting.add,
            )
