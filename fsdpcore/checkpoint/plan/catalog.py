"""All pieces of a checkpoint as arrays of numbers, so that plans need no loop over them."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpcore.checkpoint.format.metadata import Metadata, StoredTensor
from fsdpcore.core.errors import CheckpointError
from fsdpcore.core.geometry.region_table import (
    Column,
    Flags,
    Ints,
    ShapeTable,
    stretches,
)
from fsdpcore.core.geometry.regions import Region, bounding_box

_UNIT = 16  # no element is larger, so that none lies in two blocks
_MOST_BYTES = 2**62


class Catalog:
    """The pieces, numbered in the order of the files and of the offsets in them.

    The bytes of all tensors, each flattened in C order, are thought of as one line behind the
    other. A piece that is a run of a tensor's elements then is an interval of that line.

    Args:
        metadata: of the checkpoint.

    Raises:
        CheckpointError: it is beyond what can be read here.

    Attributes:
        metadata: the same.
        block: bytes that have a checksum together.
        tensors: in the order of the metadata.
        number: of each tensor in there, by name.
        base: where each tensor begins on the line.
        file, offset, nbytes: of each piece.
        first_block: number of each piece's first block among those of all pieces; and the end.
        flat: for each tensor, whether all of its pieces are runs.
        starts, pieces: those runs, and where each begins on the line, ascending.
    """

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.block = metadata.block_bytes
        self.tensors: list[StoredTensor] = list(metadata.tensors.values())
        self.number = {name: index for index, name in enumerate(metadata.tensors)}
        _check(metadata)
        self.base: Ints = _before([tensor.nbytes for tensor in self.tensors])[:-1]
        table = self._table = metadata.table
        self.file: Column = table.file
        self.offset: Column = metadata.offsets
        self.nbytes: Column = table.nbytes
        self.first_block: Ints = metadata.blocks
        self.flat, self.pieces, self.starts = self._runs()
        self._bounds: dict[int, tuple[Ints, Ints]] = {}

    def _runs(self) -> tuple[Flags, Column, Ints]:
        """Return which tensors have runs only; these runs, and where they begin on the line."""
        table = self._table
        shapes = ShapeTable([tensor.shape for tensor in self.tensors])
        itemsizes = np.array([tensor.dtype.itemsize for tensor in self.tensors], np.int64)
        flat = np.ones(len(self.tensors), np.bool_)
        by_tensor, _ = table.by_tensor
        pieces, starts, count = np.empty_like(by_tensor), np.empty(len(table), np.int64), 0
        for part in stretches(table.tensor[by_tensor]):
            which = by_tensor[part]
            tensor = table.tensor[which]
            start, _, run = table.regions.take(which).runs(tensor, shapes)
            flat[tensor[~run]] = False
            kept = np.flatnonzero(flat[tensor])
            start = start[kept] * itemsizes[tensor[kept]] + self.base[tensor[kept]]
            order = np.argsort(start, kind="stable")
            found = slice(count, count + len(kept))
            pieces[found], starts[found] = which[kept[order]], start[order]
            count = found.stop
        return flat, pieces[:count], starts[:count]

    def __len__(self) -> int:
        return len(self.file)

    def pieces_of(self, tensor: int) -> list[int]:
        """Return the numbers of a tensor's pieces, ascending."""
        found: list[int] = self._table.of(tensor).tolist()
        return found

    def near(self, tensor: int, region: Region) -> Ints:
        """Return which of a tensor's pieces may share elements with a region that is not empty.

        Ascending positions among them: the others need not be looked at, of which there are many
        where each rank of a large mesh has a part.
        """
        shape = self.tensors[tensor].shape
        bounds = self._bounds.get(tensor)
        if bounds is None:
            bounds = self._bounds[tensor] = self.tensors[tensor].pieces.around(shape)
        starts, stops = bounds
        box = bounding_box(region, shape)
        hit = (starts < np.array(box.stop, np.int64)) & (stops > np.array(box.start, np.int64))
        return np.flatnonzero(hit.all(axis=1))

    def checksum_of(self, piece: int) -> int:
        """Return the index of a piece's first checksum in the table of its file."""
        begin = self._table.begins[self.file[piece]]
        return int(self.first_block[piece] - self.first_block[begin])

    def dtype_of(self, piece: int) -> np.dtype[Any]:
        """Return the dtype of a piece's elements."""
        return self.tensors[int(self._table.tensor[piece])].dtype

    def describe(self, piece: int, start: int, stop: int) -> str:
        """Say which file, tensor and bytes of the file bytes ``[start, stop)`` of a piece are."""
        name = self.tensors[int(self._table.tensor[piece])].name
        file = self.metadata.files[int(self.file[piece])].name
        offset = int(self.offset[piece])
        return f"bytes [{offset + start}, {offset + stop}) of {file}, tensor {name!r:.200}"


def _before(numbers: Any) -> Ints:
    """Return the sums of all numbers before each, and of all."""
    return np.concatenate([[0], np.cumsum(numbers, dtype=np.int64)]).astype(np.int64, copy=False)


def _check(metadata: Metadata) -> None:
    """Raise CheckpointError for what is valid, but beyond what can be read here."""
    if metadata.block_bytes % _UNIT:
        raise CheckpointError(
            f"checksums are of {metadata.block_bytes} bytes each, which is no multiple of {_UNIT}"
        )
    if sum(tensor.nbytes for tensor in metadata.tensors.values()) > _MOST_BYTES:
        raise CheckpointError("the tensors are larger than all that can be addressed")
