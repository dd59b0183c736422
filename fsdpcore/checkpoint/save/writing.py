"""A rank's file, written from start to end, its checksums taken on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from fsdpcore.checkpoint.format.metadata import BLOCK_BYTES
from fsdpcore.checkpoint.format.stored import CHECKSUM_BYTES
from fsdpcore.checkpoint.plan.file_layout import FileLayout
from fsdpcore.checkpoint.storage.storage import Storage
from fsdpcore.core.buffers import Array, byte_view

# What goes to the system at once: small enough to be in the cache still when the system copies
# it, after its checksums were taken.
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileSums:
    """What the metadata has to know of a file that was written.

    Attributes:
        header: checksum of all bytes in front of the data.
        table: of the checksums at the end.
    """

    header: int
    table: int

    @classmethod
    def of(cls, header: bytes, sums: bytearray) -> FileSums:
        """Take those of a header, and of a table."""
        return cls(xxh3_64_intdigest(header), xxh3_64_intdigest(sums))


def write_file(
    storage: Storage, name: str, layout: FileLayout, arrays: Iterable[Sequence[Array]]
) -> FileSums:
    """Write a new file and make it durable; blocks.

    Args:
        storage: where.
        name: of the file, which must not exist.
        layout: what goes where.
        arrays: the elements of each piece of the layout, one behind the other, in NumPy, in any
            memory order; only read. They come in groups, each of which is asked for when those
            before are written. A piece may come in parts, flat, whole blocks but for the last one.

    Raises:
        OSError: it could not be written; nothing of it is left, or as much as cannot be removed.
    """
    sums = bytearray()
    places = layout.places
    left = places.table - places.data_start
    with storage.writer(name) as writer:
        writer.write(layout.header)
        for group in arrays:
            left -= sum(array.nbytes for array in group)
            for buffers in _batches(group, sums):
                writer.write(*buffers)
        assert not left
        writer.write(sums)
    return FileSums.of(layout.header, sums)


def table_sum(arrays: Sequence[Array]) -> int:
    """Return the checksum of the table that ``write_file`` would write for these arrays; blocks."""
    sums = bytearray()
    for array in arrays:
        for chunk in chunks(array):
            add_sums(chunk, sums)
    return xxh3_64_intdigest(sums)


def add_sums(data: memoryview, sums: bytearray) -> None:
    """Append the checksums of bytes that begin with a block; ``sums`` become the file's table."""
    for start in range(0, data.nbytes, BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        sums += xxh3_64_intdigest(block).to_bytes(CHECKSUM_BYTES, "little")


def _batches(arrays: Sequence[Array], sums: bytearray) -> Iterator[list[memoryview]]:
    """Give arrays as lists of buffers of about a chunk; appends to ``sums`` their checksums."""
    waiting: list[memoryview] = []
    nbytes = 0
    for array in arrays:
        for chunk in chunks(array):
            add_sums(chunk, sums)
            waiting.append(chunk)
            nbytes += chunk.nbytes
            if nbytes >= _CHUNK_BYTES:
                yield waiting
                waiting, nbytes = [], 0
    if waiting:
        yield waiting


def chunks(array: Array) -> Iterator[memoryview]:
    """Give the bytes of an array in C order, little-endian, in pieces of at most a chunk.

    All but the last one have a whole number of blocks.
    """
    flat = _flat_bytes(array)
    if flat is not None:
        for start in range(0, flat.nbytes, _CHUNK_BYTES):
            yield flat[start : start + _CHUNK_BYTES]
        return
    waiting = bytearray()
    for rows in _pieces(array):
        native = np.ascontiguousarray(rows, array.dtype.newbyteorder("="))
        waiting += byte_view(native).data
        while len(waiting) >= _CHUNK_BYTES:
            yield memoryview(bytes(waiting[:_CHUNK_BYTES]))
            del waiting[:_CHUNK_BYTES]
    if waiting:
        yield memoryview(bytes(waiting))


def _flat_bytes(array: Array) -> memoryview | None:
    if not array.flags.c_contiguous or not array.dtype.isnative:
        return None
    return byte_view(array).data


def _pieces(array: Array) -> Iterator[Array]:
    """Cut an array into neighbours of at most a chunk each, in C order."""
    if array.nbytes <= _CHUNK_BYTES or array.ndim == 0:
        yield array
        return
    rows = max(1, _CHUNK_BYTES * array.shape[0] // array.nbytes)
    for start in range(0, array.shape[0], rows):
        part = array[start : start + rows]
        if rows == 1:
            yield from _pieces(part[0])
        else:
            yield part
