"""Version 1 of ``metadata.json``, with a list for every piece; it is read, no more written.

``files`` have six values, without the number of pieces. There is no ``pieces``, but::

    tensors      object: by name [dtype, shape, pieces], each piece one of
                 [file, offset, start, stop]          elements [start, stop) in C order
                 [file, offset, [starts], [stops]]    a box: [start, stop) along every axis

``file`` is an index into ``files``, ``offset`` where the piece begins, in bytes from the start of
the file. All else is as in version 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdpcore.checkpoint.format.metadata_builder import (
    MAX_BYTES,
    ArrayKind,
    MetadataBuilder,
    is_count,
)
from fsdpcore.checkpoint.format.piece_table import PieceTable
from fsdpcore.checkpoint.format.stored import StoredFile
from fsdpcore.checkpoint.format.strict_json import short
from fsdpcore.core.errors import CorruptCheckpointError
from fsdpcore.core.geometry.regions import Box, Range, Region


def parsed_v1(
    tensors: dict[str, Any], files: Sequence[StoredFile]
) -> tuple[Mapping[str, ArrayKind], PieceTable]:
    """Return arrays and pieces.

    Args:
        tensors: as the metadata has them; used up.
        files: in which they lie.

    Raises:
        CorruptCheckpointError: anything is wrong; the message says what and where.
    """
    building = MetadataBuilder(files, CorruptCheckpointError)
    for name in list(tensors):
        _parse_tensor(name, tensors.pop(name), building)
    return building.arrays, building.table()


def _parse_tensor(name: str, row: object, building: MetadataBuilder) -> None:
    """Check the form of what is said of a tensor, and leave the rest to ``building``."""
    if (
        type(row) is not list
        or len(row) != 3
        or type(row[2]) is not list
        or type(row[1]) is not list
    ):
        raise CorruptCheckpointError(f"{short(name)} has no list of dtype, shape and pieces")
    dtype, shape, rows = row
    pieces: list[tuple[Region, int, int]] = []
    for piece in rows:
        if type(piece) is not list or len(piece) != 4:
            raise CorruptCheckpointError(
                f"piece {len(pieces)} of {short(name)} is no list of file, offset, start and stop"
            )
        file, offset, start, stop = piece
        if type(start) is int and type(stop) is int and 0 <= start <= stop <= MAX_BYTES:
            pieces.append((Range(start, stop), file, offset))
        elif _is_bound(start, shape) and _is_bound(stop, shape):
            pieces.append((Box(tuple(start), tuple(stop)), file, offset))
        else:
            raise CorruptCheckpointError(
                f"piece {len(pieces)} of {short(name)} goes from {short(start)} to {short(stop)}; "
                "a range has two integers there, a box two lists with one per axis, none negative"
            )
    building.add(name, dtype, tuple(shape), pieces)


def _is_bound(values: object, shape: list[Any]) -> bool:
    """Whether there is a position along every axis of an array."""
    return type(values) is list and len(values) == len(shape) and all(map(is_count, values))
