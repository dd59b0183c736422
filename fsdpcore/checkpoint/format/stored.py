"""What is stored of an array and where: files, and pieces of arrays in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from fsdpcore.checkpoint.format.piece_table import PieceTable
from fsdpcore.core.geometry.region_table import Column, Ints
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


class StoredPieces(Sequence[StoredPiece]):
    """The pieces of an array, in the order of the files and of the offsets in them.

    They are made when they are asked for: of a large job there are hundreds of thousands, of which
    a rank looks at few.

    Args:
        table: of all pieces.
        numbers: of this array's.
        offsets: of all pieces, see ``StoredPiece``.
        blocks: see ``PieceTable.blocks``.

    Attributes:
        numbers: the same.
        nbytes: of all of them.
    """

    def __init__(self, table: PieceTable, numbers: Column, offsets: Column, blocks: Ints) -> None:
        self._table = table
        self.numbers = numbers
        self._offsets = offsets
        self._blocks = blocks

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return int(self._table.nbytes[self.numbers].sum())

    def around(self, shape: Sequence[int]) -> tuple[Ints, Ints]:
        """Return starts and stops of the smallest boxes around them, as rows."""
        return self._table.regions.take(self.numbers).around(shape)

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> StoredPiece: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[StoredPiece]: ...
    def __getitem__(self, index: int | slice) -> StoredPiece | Sequence[StoredPiece]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        number, table = int(self.numbers[index]), self._table
        file = int(table.file[number])
        return StoredPiece(
            table.regions[number],
            file,
            int(self._offsets[number]),
            int(table.nbytes[number]),
            int(self._blocks[number] - self._blocks[table.begins[file]]),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredPieces) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


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
    pieces: StoredPieces

    @property
    def missing(self) -> int:
        """Elements that are in no piece."""
        return (self.nbytes - self.pieces.nbytes) // self.dtype.itemsize

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
