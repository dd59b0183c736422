"""Reads of whole blocks, into wherever they belong, checked while they are in the cache."""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from types import TracebackType
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from fsdpcore.checkpoint.format.metadata import StoredFile
from fsdpcore.checkpoint.plan.catalog import Catalog
from fsdpcore.checkpoint.storage.storage import Storage, StorageReader
from fsdpcore.comm.backend import Backend
from fsdpcore.core.errors import CheckpointError, CorruptCheckpointError

RUN_BYTES = 1 << 20
"""What is read at once: much more would have left the cache before its checksums are taken."""

_MOST_BUFFERS = 512  # of one read
_MOST_FILES = 32  # open at a time
_TABLE_BYTES = 16 << 20  # tables of checksums in memory, those in use apart
_STREAM_BYTES = 1 << 20
# What the system says of a file that is not there, or is none.
_NO_FILE = (errno.ENOENT, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EINVAL)


_USUAL_THREADS = 4
_MOST_THREADS = 64  # beyond that they only wait for one another


def usual_threads(backend: Backend | None = None) -> int:
    """Return how many threads read on a rank where nobody says: its share of the host's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks = 1 if backend is None else backend.hosts.count(backend.hosts[backend.rank])
    return max(1, min(_USUAL_THREADS, (cores or 1) // ranks))


class Span(NamedTuple):
    """Bytes ``[start, stop)`` of a piece, whole blocks of it, and the memory that they go to."""

    piece: int
    start: int
    stop: int
    buffer: memoryview


class _OpenFile:
    """A file that was opened, with its checksums."""

    def __init__(self, reader: StorageReader, table: memoryview) -> None:
        self.reader = reader
        self.table = table
        self.users = 0


class FileSet:
    """The files of a checkpoint, each opened, and its header and checksums verified, at first use.

    A context manager. To be used from one thread; with ``threads`` it starts others while it reads.

    Args:
        storage: where.
        directory: of the checkpoint.
        catalog: of its pieces.
        threads: how many read at a time, if there is enough to read; 64 at most.

    Attributes:
        bytes_read: of pieces, so far.
        bytes_beside: of headers and checksums.
    """

    def __init__(
        self, storage: Storage, directory: str, catalog: Catalog, threads: int = 1
    ) -> None:
        self._storage = storage
        self._directory = directory
        self._catalog = catalog
        self._threads = min(threads, _MOST_THREADS)
        self._run = max(1, RUN_BYTES // catalog.block) * catalog.block
        self._open: OrderedDict[int, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes_read = 0
        self.bytes_beside = 0

    def __enter__(self) -> FileSet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for each in self._open.values():
                each.reader.close()
            self._open.clear()

    def read(self, spans: Iterable[Span | tuple[int, int, int, memoryview]]) -> None:
        """Fill the buffers of spans, in ascending order, and check every block; blocks.

        Spans that follow one another in a file are read together.

        Raises:
            CorruptCheckpointError: a block is not what was saved, or a file is cut off or gone.
            CheckpointError: the system could not read. In both cases other spans may be read.
        """
        batches = self._batches(spans)
        first = list(islice(batches, self._threads))
        count, batches = len(first), chain(first, batches)
        if count < 2:
            for file, offset, batch in batches:
                self._read_batch(file, offset, batch)
            return
        lock, failed = threading.Lock(), threading.Event()

        def work() -> None:
            while not failed.is_set():
                with lock:
                    found = next(batches, None)
                if found is None:
                    return
                try:
                    self._read_batch(*found)
                except BaseException:
                    failed.set()
                    raise

        with ThreadPoolExecutor(count, "fsdpcore-load") as pool:
            for each in [pool.submit(work) for _ in range(count)]:
                each.result()

    def _batches(
        self, spans: Iterable[Span | tuple[int, int, int, memoryview]]
    ) -> Iterator[tuple[int, int, list[tuple[int, int, int, memoryview]]]]:
        """Give file, offset, and spans that are to be read from there on at once."""
        batch: list[tuple[int, int, int, memoryview]] = []
        file = begin = end = -1
        catalog, run = self._catalog, self._run
        for piece, start, stop, buffer in spans:
            at, size = int(catalog.offset[piece]) + start, stop - start
            full = end - begin + size > run or len(batch) >= _MOST_BUFFERS
            if batch and (at != end or full or catalog.file[piece] != file):
                yield file, begin, batch
                batch = []
            if not batch:
                file, begin = int(catalog.file[piece]), at
            while size > run:
                yield file, at, [(piece, start, start + run, buffer[:run])]
                buffer = buffer[run:]
                start, at, size = start + run, at + run, size - run
                begin = at
            batch.append((piece, start, stop, buffer))
            end = at + size
        if batch:
            yield file, begin, batch

    def _read_batch(
        self, file: int, offset: int, batch: list[tuple[int, int, int, memoryview]]
    ) -> None:
        with self._using(file) as opened:
            with self._translated(file):
                opened.reader.read_into(offset, *[buffer for _, _, _, buffer in batch])
            if self._storage.checks:
                self._check(batch, opened.table)
        with self._lock:
            self.bytes_read += sum(stop - start for _, start, stop, _ in batch)

    def _check(self, batch: list[tuple[int, int, int, memoryview]], table: memoryview) -> None:
        block = self._catalog.block
        for piece, start, stop, buffer in batch:
            index = self._catalog.checksum_of(piece) + start // block
            size = stop - start
            if size <= block:
                if xxh3_64_intdigest(buffer) != table[index]:
                    self._refuse(piece, start, stop)
                continue
            for begin in range(0, size, block):
                if xxh3_64_intdigest(buffer[begin : begin + block]) != table[index]:
                    self._refuse(piece, start + begin, min(start + begin + block, stop))
                index += 1

    def _refuse(self, piece: int, start: int, stop: int) -> None:
        raise CorruptCheckpointError(
            f"{self._directory}: {self._catalog.describe(piece, start, stop)}, are not what was "
            "saved: their checksum is another"
        )

    # Files.

    @contextmanager
    def _using(self, file: int) -> Iterator[_OpenFile]:
        with self._lock:
            opened = self._open.get(file)
            if opened is None:
                opened = self._open[file] = self._opened(file)
                self._shrink(file)
            self._open.move_to_end(file)
            opened.users += 1
        try:
            yield opened
        finally:
            with self._lock:
                opened.users -= 1

    def _shrink(self, keep: int) -> None:
        """Close the files that were not used for the longest time, if there are too many."""
        held = sum(each.table.nbytes for each in self._open.values())
        for file, each in list(self._open.items()):
            if len(self._open) <= _MOST_FILES and held <= _TABLE_BYTES:
                return
            if file != keep and not each.users:
                held -= each.table.nbytes
                each.reader.close()
                del self._open[file]

    def _opened(self, file: int) -> _OpenFile:
        """Open a file and check all of it but the pieces."""
        stored = self._catalog.metadata.files[file]
        with self._translated(file):
            reader = self._storage.reader(f"{self._directory}/{stored.name}")
            try:
                return _OpenFile(reader, self._checked(reader, stored))
            except BaseException:
                reader.close()
                raise

    def _checked(self, reader: StorageReader, stored: StoredFile) -> memoryview:
        what = f"{self._directory}/{stored.name}"
        if reader.size != stored.size:
            raise CorruptCheckpointError(
                f"{what} has {reader.size} bytes, but {stored.size} were saved"
            )
        if not self._storage.checks:
            return memoryview(b"")
        header = xxh3_64()
        buffer = memoryview(bytearray(min(_STREAM_BYTES, stored.data_start)))
        for start in range(0, stored.data_start, _STREAM_BYTES):
            part = buffer[: stored.data_start - start]
            reader.read_into(start, part)
            header.update(part)
        if header.intdigest() != stored.header_checksum:
            raise CorruptCheckpointError(
                f"{what}: the header, bytes [0, {stored.data_start}), is not what was saved: its "
                "checksum is another"
            )
        table = memoryview(bytearray(stored.size - stored.table))
        if table.nbytes:
            reader.read_into(stored.table, table)
        if xxh3_64_intdigest(table) != stored.table_checksum:
            raise CorruptCheckpointError(
                f"{what}: the checksums, bytes [{stored.table}, {stored.size}), are not what was "
                "saved"
            )
        self.bytes_beside += stored.data_start + table.nbytes
        return table.cast("Q")

    @contextmanager
    def _translated(self, file: int) -> Iterator[None]:
        """Turn errors of the system into what they mean for a checkpoint."""
        name = f"{self._directory}/{self._catalog.metadata.files[file].name}"
        try:
            yield
        except EOFError as error:
            raise CorruptCheckpointError(f"{name} is cut off: {error}") from error
        except OSError as error:
            if error.errno in _NO_FILE:
                raise CorruptCheckpointError(f"{name} cannot be read: {error}") from error
            raise CheckpointError(f"{name} cannot be read: {error}") from error
