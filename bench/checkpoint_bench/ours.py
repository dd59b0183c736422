"""Our checkpoints of a real engine, and what the machine itself takes for as many bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

import fsdpcore as fc
from checkpoint_bench import model
from checkpoint_bench.cases import Case
from checkpoint_bench.job import OwnPart, StateJob, Wait
from checkpoint_bench.model import Array

_VECTORS = 1024  # IOV_MAX of Linux: how many pieces one call takes


class OurJob(StateJob):
    """A ZeRO-3 engine with AdamW; its parameters are in a window where the transport has one."""

    def __init__(self, case: Case, backend: fc.Backend) -> None:
        self._backend = backend
        self._async: tuple[Path, fc.checkpoint.AsyncCheckpointer] | None = None
        self._engine = fc.FSDP(
            [
                fc.Unit(unit, {name: fc.Spec(shape) for name, shape in params.items()})
                for unit, params in model.gpt(case.nbytes, case.layers).items()
            ],
            backend,
            optimizer=fc.optim.AdamW(),
        )
        self.fill()

    def barrier(self) -> None:
        self._backend.barrier()

    def save(self, folder: Path, step: int) -> None:
        fc.checkpoint.save(folder, self._engine, self._backend, step=step)

    def load(self, folder: Path, step: int) -> None:
        fc.checkpoint.load(folder, self._engine, self._backend, step=step)

    def save_async(self, folder: Path, step: int) -> Wait:
        if self._async is None or self._async[0] != folder:
            self._end_async()
            self._async = folder, fc.checkpoint.AsyncCheckpointer(folder, self._backend)
        return self._async[1].save(self._engine, step=step).wait

    def parts(self) -> Iterator[OwnPart]:
        with self._engine.writing_state() as state:
            for name, array in state.items():
                assert isinstance(array, fc.ShardedArray)
                for start, _, values in array.pieces:
                    yield OwnPart(name, start, values)

    def close(self) -> None:
        self._end_async()

    def _end_async(self) -> None:
        if self._async is not None:
            self._async[1].close()
            self._async = None


class Limit(StateJob):
    """The same bytes, to and from one plain file per rank: no checksum, format or agreement.

    It belongs to the process, and uses the memory, of ``job``. Any number of ranks reads: each as
    many bytes as it has, not the ones that belong there.
    """

    def __init__(self, job: StateJob, rank: int, ranks: int) -> None:
        self._job = job
        self._rank, self._ranks = rank, ranks
        # Views that were made while the arrays were writable stay so.
        self._views = [part.array.data.cast("B") for part in job.parts()]
        self._nbytes = sum(view.nbytes for view in self._views)
        self._copy: Array = np.empty(0, np.float32)

    def barrier(self) -> None:
        self._job.barrier()

    def save(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(folder / f"{step}.{self._rank:05}", flags, 0o600)
        try:
            for group in self._groups():
                _whole(os.writev, descriptor, group)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def load(self, folder: Path, step: int) -> None:
        files = sorted(folder.glob(f"{step}.*"))
        readers = max(1, self._ranks // len(files))  # of each file
        descriptor = os.open(files[self._rank * len(files) // self._ranks], os.O_RDONLY)
        try:
            room = os.fstat(descriptor).st_size - self._nbytes
            os.lseek(descriptor, max(0, min(room, self._rank % readers * self._nbytes)), 0)
            for group in self._groups():
                _whole(os.readv, descriptor, group)
        finally:
            os.close(descriptor)

    def copy(self) -> None:
        """Copy this rank's share to one block of memory, which the first call makes."""
        if not self._copy.size:
            self._copy = np.empty(self._nbytes // 4, np.float32)
        offset = 0
        for view in self._views:
            source = np.frombuffer(view, np.float32)
            np.copyto(self._copy[offset : offset + source.size], source)
            offset += source.size

    def save_async(self, folder: Path, step: int) -> Wait:
        raise NotImplementedError("plain files are written at once")

    def parts(self) -> Iterable[OwnPart]:
        return self._job.parts()

    def close(self) -> None:
        self._views.clear()  # else the memory behind them could not be given back

    def _groups(self) -> Iterator[list[memoryview]]:
        for first in range(0, len(self._views), _VECTORS):
            yield self._views[first : first + _VECTORS]


def _whole(
    call: Callable[[int, list[memoryview]], int], descriptor: int, views: list[memoryview]
) -> None:
    """Read or write all of it; Linux moves at most 2 GiB in one call."""
    while views:
        moved = call(descriptor, views)
        if not moved:
            raise EOFError("a plain file is shorter than what was written to it")
        while views and moved >= len(views[0]):
            moved -= len(views[0])
            views = views[1:]
        if moved:
            views = [views[0][moved:], *views[1:]]
