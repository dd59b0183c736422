"""All that can be wrong with one file of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from fsdpcore.checkpoint.format.dtypes import stored_as
from fsdpcore.checkpoint.format.header import PlacedTensor, parse_header
from fsdpcore.checkpoint.format.metadata import Metadata, StoredPiece, StoredTensor
from fsdpcore.checkpoint.format.stored import CHECKSUM_BYTES
from fsdpcore.checkpoint.format.strict_json import short
from fsdpcore.checkpoint.plan.file_layout import TABLE
from fsdpcore.checkpoint.storage.storage import Storage, StorageReader
from fsdpcore.core.errors import CorruptCheckpointError, in_words
from fsdpcore.core.geometry.regions import Box

_RUN_BYTES = 4 << 20


class Problem(NamedTuple):
    """Something that is wrong.

    Attributes:
        file: in the folder of the checkpoint.
        what: is wrong with it.
    """

    file: str
    what: str


class _Run(NamedTuple):
    """Bytes of a file, of parts of pieces that follow one another: piece, start, stop of each."""

    offset: int
    nbytes: int
    parts: list[tuple[int, int, int]]


class _Bad(NamedTuple):
    """Bytes ``[start, stop)`` of a piece that are wrong, and why."""

    piece: int
    start: int
    stop: int
    why: str


def check_file(
    storage: Storage,
    directory: str,
    metadata: Metadata,
    number: int,
    threads: int,
    done: Callable[[int], None],
) -> list[Problem]:
    """Check every byte of a file; blocks.

    Args:
        storage, directory: where the checkpoint is.
        metadata: of the checkpoint.
        number: of the file in there.
        threads: that read.
        done: called with numbers of bytes, in all the size of the file.
    """
    stored = metadata.files[number]
    name = f"{directory}/{stored.name}"
    try:
        reader = storage.reader(name)
    except FileNotFoundError:
        done(stored.size)
        return [Problem(stored.name, "is missing")]
    except OSError as error:
        done(stored.size)
        return [Problem(stored.name, f"cannot be read: {in_words(error)}")]
    with reader:
        checking = _FileChecker(reader, metadata, number)
        problems = checking.size() + checking.header()
        done(stored.data_start)
        problems += checking.table()
        done(stored.size - stored.table)
        problems += checking.data(threads, done)
    return [Problem(stored.name, what) for what in problems]


class _FileChecker:
    """One file that is open; every method returns what is wrong."""

    def __init__(
        self,
        reader: StorageReader,
        metadata: Metadata,
        number: int,
    ) -> None:
        self._reader = reader
        self._metadata = metadata
        self._stored = metadata.files[number]
        self._tensors, self._pieces = metadata.pieces_in(number)
        self._table: memoryview | None = None

    def size(self) -> list[str]:
        wanted, there = self._stored.size, self._reader.size
        if there == wanted:
            return []
        return [f"has {there} bytes, but {wanted} were saved"]

    def header(self) -> list[str]:
        stored = self._stored
        if stored.data_start > self._reader.size:  # nothing is allocated for what is not there
            return [f"the header, bytes [0, {stored.data_start}), is cut off"]
        data = bytearray(stored.data_start)
        try:
            self._reader.read_into(0, memoryview(data))
        except (OSError, EOFError) as error:
            return [f"the header, bytes [0, {len(data)}), cannot be read: {in_words(error)}"]
        problems = []
        if xxh3_64_intdigest(data) != stored.header_checksum:
            problems.append(f"the header, bytes [0, {len(data)}), is not what was saved")
        try:
            found = parse_header(bytes(data), stored.size)
        except CorruptCheckpointError as error:
            return [*problems, f"the header: {error}"]
        save_id = found.metadata.get("save_id")
        if save_id != self._metadata.save_id:
            problems.append(f"is of the save {short(save_id)}, not of {self._metadata.save_id}")
        return problems + self._compared(found.entries)

    def _compared(self, entries: Sequence[PlacedTensor]) -> list[str]:
        """Compare the header's entries with the pieces that the metadata has."""
        wanted: list[tuple[PlacedTensor, set[tuple[int, ...]]]] = []
        for tensor, piece in zip(self._tensors, self._pieces, strict=True):
            code, more = stored_as(tensor.dtype)
            shapes = [(*shape, *more) for shape in _shapes(tensor, piece)]
            place = PlacedTensor(tensor.name, code, shapes[0], piece.nbytes, piece.offset)
            wanted.append((place, {*shapes}))
        stored = self._stored
        table = (stored.blocks, CHECKSUM_BYTES)
        nbytes = stored.size - stored.table
        wanted.append((PlacedTensor(TABLE, "U8", table, nbytes, stored.table), {table}))
        if len(entries) != len(wanted):
            return [f"the header has {len(entries)} tensors, the metadata {len(wanted)}"]
        problems = []
        for found, (there, shapes_there) in zip(entries, wanted, strict=True):
            named = found.name == there.name or found.name.startswith(f"{there.name}#")
            same = found._replace(name=there.name, shape=there.shape) == there
            if not (named and same and found.shape in shapes_there):
                problems.append(
                    f"the header has {_described(found)} where the metadata has {_described(there)}"
                )
        return problems

    def table(self) -> list[str]:
        stored = self._stored
        where = f"bytes [{stored.table}, {stored.size})"
        if stored.size > self._reader.size:
            return [f"the checksums, {where}, are cut off"]
        table = np.empty(stored.size - stored.table, np.uint8)
        try:
            if table.size:
                self._reader.read_into(stored.table, table.data)
        except (OSError, EOFError) as error:
            return [f"the checksums, {where}, cannot be read: {in_words(error)}"]
        self._table = table.data.cast("Q") if table.size else memoryview(b"").cast("Q")
        if xxh3_64(table.data).intdigest() != stored.table_checksum:
            return [f"the checksums, {where}, are not what was saved"]
        return []

    def data(self, threads: int, done: Callable[[int], None]) -> list[str]:
        if self._table is None:
            done(self._stored.table - self._stored.data_start)
            return ["the data cannot be checked without the checksums"]
        bad: list[_Bad] = []
        runs = list(self._runs())
        with ThreadPoolExecutor(threads, "fsdpcore-verify") as pool:
            for run, found in zip(runs, pool.map(self._check_run, runs), strict=True):
                bad += found
                done(run.nbytes)
        return [self._in_words(each) for each in _merged(bad)]

    def _runs(self) -> Iterator[_Run]:
        parts: list[tuple[int, int, int]] = []
        size = max(1, _RUN_BYTES // self._metadata.block_bytes) * self._metadata.block_bytes
        offset = end = self._stored.data_start
        for number, piece in enumerate(self._pieces):
            for start in range(0, piece.nbytes, size):
                stop = min(start + size, piece.nbytes)
                if parts and end - offset + stop - start > size:
                    yield _Run(offset, end - offset, parts)
                    offset, parts = end, []
                parts.append((number, start, stop))
                end += stop - start
        if parts:
            yield _Run(offset, end - offset, parts)

    def _check_run(self, run: _Run) -> list[_Bad]:
        data = np.empty(run.nbytes, np.uint8).data
        try:
            self._reader.read_into(run.offset, data)
        except EOFError:
            return [_Bad(*part, "are missing: the file is cut off") for part in run.parts]
        except OSError as error:
            return [_Bad(*part, f"cannot be read: {in_words(error)}") for part in run.parts]
        bad, block, at = [], self._metadata.block_bytes, 0
        assert self._table is not None
        for number, first, last in run.parts:
            index = self._pieces[number].block + first // block
            for start in range(first, last, block):
                stop = min(start + block, last)
                if xxh3_64_intdigest(data[at : at + stop - start]) != self._table[index]:
                    bad.append(_Bad(number, start, stop, "are not what was saved"))
                index += 1
                at += stop - start
        return bad

    def _in_words(self, bad: _Bad) -> str:
        offset = self._pieces[bad.piece].offset
        name = short(self._tensors[bad.piece].name)
        return f"bytes [{offset + bad.start}, {offset + bad.stop}), tensor {name}, {bad.why}"


def _shapes(tensor: StoredTensor, piece: StoredPiece) -> list[tuple[int, ...]]:
    """Return the shapes that a piece may have in a file's header."""
    if isinstance(piece.region, Box):
        return [piece.region.shape]
    flat = (piece.region.size,)
    return [tensor.shape, flat] if piece.region.size == math.prod(tensor.shape) else [flat]


def _described(entry: PlacedTensor) -> str:
    place = f"bytes [{entry.offset}, {entry.offset + entry.nbytes})"
    return f"{short(entry.name)} ({entry.code} of shape {short(entry.shape)}, {place})"


def _merged(bad: Sequence[_Bad]) -> list[_Bad]:
    """Join neighbours in a piece that have the same fault."""
    found: list[_Bad] = []
    for each in bad:
        last = found[-1] if found else None
        same = last and (last.piece, last.stop, last.why) == (each.piece, each.start, each.why)
        if last and same:
            found[-1] = last._replace(stop=each.stop)
        else:
            found.append(each)
    return found
