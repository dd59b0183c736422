"""All pieces of a checkpoint as arrays of numbers, so that plans need no loop over them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.checkpoint.format.metadata import Metadata, StoredTensor
from fsdpcore.core.errors import CheckpointError
from fsdpcore.core.geometry.regions import Region, as_range, bounding_box

Ints = NDArray[np.int64]

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
        sums: index of the first checksum of each piece in the table of its file.
        first_block: number of each piece's first block among those of all pieces; and the end.
        flat: for each tensor, whether all of its pieces are runs.
        starts, stops, pieces: those runs, as intervals on the line in ascending order.
    """

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.block = metadata.block_bytes
        self.tensors: list[StoredTensor] = list(metadata.tensors.values())
        self.number = {name: index for index, name in enumerate(metadata.tensors)}
        _check(metadata)
        sizes = np.array([tensor.nbytes for tensor in self.tensors], np.int64)
        self.base: Ints = np.concatenate([[0], np.cumsum(sizes)])[:-1].astype(np.int64)
        rows: list[tuple[int, int, int, int, int, int]] = []
        flat: list[bool] = []
        begins: list[int] = []
        bases: list[int] = self.base.tolist()
        for index, tensor in enumerate(self.tensors):
            begins.append(len(rows))
            runs = True
            for piece in tensor.pieces:
                run = as_range(piece.region, tensor.shape)
                at = -1 if run is None else bases[index] + run.start * tensor.dtype.itemsize
                runs = runs and run is not None
                rows.append((piece.file, piece.offset, piece.nbytes, piece.block, index, at))
            flat.append(runs)
        table = np.array(rows, np.int64).reshape(-1, 6)
        order = np.lexsort((table[:, 1], table[:, 0]))
        self._bounds: dict[int, tuple[Ints, Ints]] = {}
        self._begins = begins
        self._place = np.empty(len(rows), np.int64)
        self._place[order] = np.arange(len(rows))
        table = table[order]
        self.file: Ints = table[:, 0].copy()
        self.offset: Ints = table[:, 1].copy()
        self.nbytes: Ints = table[:, 2].copy()
        self.sums: Ints = table[:, 3].copy()
        self._owner: Ints = table[:, 4].copy()
        start: Ints = table[:, 5]
        blocks = -(-self.nbytes // self.block)
        self.first_block: Ints = np.concatenate([[0], np.cumsum(blocks)]).astype(np.int64)
        self.flat: NDArray[np.bool_] = np.array(flat, bool)
        runs_only = np.flatnonzero(self.flat[self._owner]) if len(rows) else np.empty(0, np.int64)
        self.pieces: Ints = runs_only[np.argsort(start[runs_only], kind="stable")]
        self.starts: Ints = start[self.pieces]
        self.stops: Ints = self.starts + self.nbytes[self.pieces]

    def __len__(self) -> int:
        return len(self.file)

    def pieces_of(self, tensor: int) -> list[int]:
        """Return the numbers of a tensor's pieces, in the order of its metadata."""
        begin = self._begins[tensor]
        count = len(self.tensors[tensor].pieces)
        return [int(piece) for piece in self._place[begin : begin + count]]

    def near(self, tensor: int, region: Region) -> Ints:
        """Return which of a tensor's pieces may share elements with a region that is not empty.

        Ascending positions among them: the others need not be looked at, of which there are many
        where each rank of a large mesh has a part.
        """
        shape = self.tensors[tensor].shape
        bounds = self._bounds.get(tensor)
        if bounds is None:
            pieces = self.tensors[tensor].pieces
            boxes, count = [bounding_box(each.region, shape) for each in pieces], len(pieces)
            starts = np.array([box.start for box in boxes], np.int64).reshape(count, len(shape))
            stops = np.array([box.stop for box in boxes], np.int64).reshape(count, len(shape))
            bounds = self._bounds[tensor] = starts, stops
        starts, stops = bounds
        box = bounding_box(region, shape)
        hit = (starts < np.array(box.stop, np.int64)) & (stops > np.array(box.start, np.int64))
        return np.flatnonzero(hit.all(axis=1))

    def dtype_of(self, piece: int) -> np.dtype[Any]:
        """Return the dtype of a piece's elements."""
        return self.tensors[int(self._owner[piece])].dtype

    def describe(self, piece: int, start: int, stop: int) -> str:
        """Say which file, tensor and bytes of the file bytes ``[start, stop)`` of a piece are."""
        name = self.tensors[int(self._owner[piece])].name
        file = self.metadata.files[int(self.file[piece])].name
        offset = int(self.offset[piece])
        return f"bytes [{offset + start}, {offset + stop}) of {file}, tensor {name!r:.200}"


def _check(metadata: Metadata) -> None:
    """Raise CheckpointError for what is valid, but beyond what can be read here."""
    if metadata.block_bytes % _UNIT:
        raise CheckpointError(
            f"checksums are of {metadata.block_bytes} bytes each, which is no multiple of {_UNIT}"
        )
    if sum(tensor.nbytes for tensor in metadata.tensors.values()) > _MOST_BYTES:
        raise CheckpointError("the tensors are larger than all that can be addressed")
