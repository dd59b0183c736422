"""What is stored of an array and where: files, and pieces of arrays in them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdpcore.core.geometry.regions import Region

CHECKSUM_BYTES = 8
"""Size of a checksum in the table at the end of a file."""


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A part of an array in a file, its elements in C order, little-endian.

    Attributes:
        region: which elements; never empty.
        file: index of the file in ``Metadata.files``.
        offset: of the first byte, from the start of the file.
        nbytes: bytes in the file.
        block: index of its first checksum in the file's table; the others follow, in all
            ceil(nbytes / block_bytes).
    """

    region: Region
    file: int
    offset: int
    nbytes: int
    block: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """An array; its pieces do not overlap, and need not cover it.

    Attributes:
        name: of the array.
        dtype: in this machine's byte order.
        shape: of the whole array.
        pieces: what is stored of it.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, stored or not."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of pieces, with their checksums behind them.

    Attributes:
        name: of the file, in the folder of the checkpoint.
        size: in bytes.
        data_start: byte where the first piece begins.
        table: byte where the checksums begin, which go on to the end of the file.
        header_checksum: xxh3_64 of the bytes before ``data_start``.
        table_checksum: xxh3_64 of the bytes from ``table`` on.
    """

    name: str
    size: int
    data_start: int
    table: int
    header_checksum: int
    table_checksum: int

    @property
    def blocks(self) -> int:
        """How many checksums the table has."""
        return (self.size - self.table) // CHECKSUM_BYTES
