"""Whole arrays from where they are stored, streamed in C order through little memory."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np

from fsdpcore.checkpoint.format.metadata import Metadata
from fsdpcore.checkpoint.format.strict_json import short
from fsdpcore.checkpoint.load.finding import Finder, chosen_step
from fsdpcore.checkpoint.load.local_reads import read_alone
from fsdpcore.checkpoint.load.reading import FileSet, usual_threads
from fsdpcore.checkpoint.memory.shards import Part
from fsdpcore.checkpoint.plan.catalog import Catalog
from fsdpcore.checkpoint.plan.read_plan import WantedPart, plan_reads
from fsdpcore.checkpoint.storage.opening import StoragePath
from fsdpcore.checkpoint.storage.ranking import Step
from fsdpcore.checkpoint.storage.storage import Storage
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import CheckpointError, in_words
from fsdpcore.core.geometry.regions import Box, Range, Region, regions_inside

WINDOW_BYTES = 8 << 20
"""What is in memory of a stream at a time; whole blocks of checksums of every dtype."""

_ALIGN = 64

ProgressCallback = Callable[[int, int], None]
"""Called with the bytes that are done and those in all, by the thread that called us."""


class ArraySpec(NamedTuple):
    """Dtype and shape of an array."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * self.dtype.itemsize


class ArrayRegion(NamedTuple):
    """A region of the array ``name``, its elements in C order."""

    name: str
    region: Region


class FillTarget(NamedTuple):
    """A region of an array that is to be read, and the memory it goes to; see ``Part``."""

    name: str
    region: Region
    array: Array


class ArraySource(ABC):
    """Arrays that can be read in parts.

    Attributes:
        what: where they are, for messages.
        name: the last part of that.
        step: of a checkpoint of ours; else None.
        arrays: dtype and shape by name.
    """

    what: str
    arrays: Mapping[str, ArraySpec]
    step: int | None = None

    @property
    def name(self) -> str:
        return self.what.rstrip("/").rpartition("/")[2]

    @abstractmethod
    def check(self, names: Iterable[str]) -> None:
        """Raise CheckpointError unless all elements of these arrays are there."""

    @abstractmethod
    def fill(self, parts: Sequence[FillTarget]) -> None:
        """Read parts, none of them empty; blocks."""

    def stream(self, wants: Iterable[ArrayRegion]) -> Iterator[tuple[int, Array]]:
        """Read ``wants``, of any size, one behind the other; blocks.

        Yields:
            The index of a want and its next elements, flat, as many as make ``WINDOW_BYTES`` or
            all that are left. They are overwritten when the next ones are asked for. Nothing for
            a want that is empty.

        Raises:
            CorruptCheckpointError: what is stored is damaged.
            CheckpointError: it could not be read.
        """
        memory = np.empty(WINDOW_BYTES, np.uint8)
        batch: list[tuple[int, Array]] = []
        parts: list[FillTarget] = []
        used = 0
        for index, (name, region) in enumerate(wants):
            dtype, shape = self.arrays[name]
            step = WINDOW_BYTES // dtype.itemsize
            for start in range(0, region.size, step):
                stop = min(start + step, region.size)
                nbytes = (stop - start) * dtype.itemsize
                if used + nbytes > WINDOW_BYTES:
                    self.fill(parts)
                    yield from batch
                    batch, parts, used = [], [], 0
                array = memory[used : used + nbytes].view(dtype)
                batch.append((index, array))
                parts += _targets(name, region, Range(start, stop), shape, array)
                used += -(-nbytes // _ALIGN) * _ALIGN
        if batch:
            self.fill(parts)
            yield from batch


def _targets(
    name: str, region: Region, run: Range, shape: tuple[int, ...], array: Array
) -> Iterator[FillTarget]:
    """Give what fills flat memory with a run of the elements of a region."""
    if isinstance(region, Range):
        yield FillTarget(name, Range(region.start + run.start, region.start + run.stop), array)
        return
    for part in regions_inside(region, run, shape):
        here, array = array[: part.size], array[part.size :]
        yield FillTarget(name, part, here.reshape(part.shape) if isinstance(part, Box) else here)


class StepSource(ArraySource):
    """The arrays of a checkpoint, however they were sharded; every byte is verified.

    Args:
        storage, name: where.
        metadata: of the checkpoint.
        files: its files.
        catalog: of its pieces.
    """

    def __init__(
        self, storage: Storage, name: str, metadata: Metadata, files: FileSet, catalog: Catalog
    ) -> None:
        self.metadata = metadata
        self.step = metadata.step
        self.what = f"{storage.path}/{name}"
        self.arrays = {
            each.name: ArraySpec(each.dtype, each.shape) for each in metadata.tensors.values()
        }
        self._files = files
        self._catalog = catalog

    def check(self, names: Iterable[str]) -> None:
        for name in names:
            missing = self.metadata.tensors[name].missing
            if missing:
                raise CheckpointError(
                    f"{self.what}: of {short(name)}, {missing} of "
                    f"{self.arrays[name].size} elements were not saved"
                )

    def fill(self, parts: Sequence[FillTarget]) -> None:
        number = self._catalog.number
        wanted = [WantedPart(number[name], Part(region, array)) for name, region, array in parts]
        plan = plan_reads(self._catalog, wanted)
        if plan.uncovered:
            raise CheckpointError(
                f"{self.what}: not all elements were saved of "
                f"{short(parts[plan.uncovered[0]].name)}"
            )
        read_alone(self._files, self._catalog, plan)


@contextmanager
def opened_step(
    path: StoragePath, step: Step = None, threads: int | None = None
) -> Iterator[StepSource]:
    """Open a checkpoint; nobody removes it until the exit, as far as the storage has locks. Blocks.

    Args:
        path: a folder of steps, of which the newest valid one is taken; or that of a step.
        step: take this one, see ``load``.
        threads: that read.

    Raises:
        ArgumentError: ``step`` is none, or contradicts the path.
        CheckpointNotFoundError: there is no checkpoint, or not that one.
        CorruptCheckpointError: it is damaged.
        CheckpointError: it could not be read.
    """
    storage, which = chosen_step(path, step)
    count = usual_threads() if threads is None else as_int(threads, "threads", minimum=1)
    with ExitStack() as stack:
        finder = stack.enter_context(Finder(storage, which))
        try:
            name, _, metadata = finder.next()
        except OSError as error:
            raise CheckpointError(f"{storage.path}: {in_words(error)}") from error
        catalog = Catalog(metadata)
        files = stack.enter_context(FileSet(storage, name, catalog, count))
        yield StepSource(storage, name, metadata, files, catalog)
