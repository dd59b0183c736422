"""What ranks hold, as each tells it to rank 0: the arrays, and a table of pieces of them."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsdpcore.checkpoint.format.dtypes import named_dtype
from fsdpcore.checkpoint.format.metadata_builder import check_shape
from fsdpcore.core.digests import hex_digest
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.region_table import Ints, RegionTable
from fsdpcore.core.geometry.regions import Range, Region, whole


class HeldPiece(NamedTuple):
    """A piece that a rank holds in memory.

    Attributes:
        region: which elements.
        rows: extent of the first axis in memory.
        row: elements of each row; it can be cut between rows only.
    """

    region: Region
    rows: int
    row: int


class HeldArray(NamedTuple):
    """What a rank holds of an array.

    Attributes:
        name: of the array.
        dtype: by name.
        shape: of the whole array.
        pieces: what this rank holds.
        replica: of which copy they are, see ``ShardedArray``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[HeldPiece, ...]
    replica: int = 0


class NamedArray(NamedTuple):
    """An array, whoever holds it; the attributes are those of ``HeldArray``."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class HeldTable:
    """What a rank holds, in columns with a number for each piece.

    Attributes:
        arrays: all that it has; the same object for ranks that have the same.
        array: index in there.
        replica: of which copy it is a part.
        rows: that it can be cut between.
        regions: which elements.
    """

    arrays: tuple[NamedArray, ...]
    array: Ints
    replica: Ints
    rows: Ints
    regions: RegionTable


def held_piece(region: Region, shape: tuple[int, ...]) -> HeldPiece:
    """Return how a rank holds a region, which is not empty, of an array of ``shape``."""
    if isinstance(region, Range):
        return HeldPiece(region, region.size, 1)
    size = region.size
    rows = region.shape[0] if shape else 1
    # All of an array is the same piece however it lies in memory.
    return HeldPiece(whole(shape) if size == math.prod(shape) else region, rows, size // rows)


def tabled(held: Sequence[HeldArray]) -> HeldTable:
    """Return what a rank holds as a table.

    Raises:
        ArgumentError: an array is larger than what memory could address.
    """
    for name, dtype, shape, _, _ in held:
        # Not of a file: another rank may know more dtypes.
        check_shape(shape, named_dtype(dtype, ArgumentError).itemsize, name, ArgumentError)
    counts = [len(each.pieces) for each in held]
    pieces = [piece for each in held for piece in each.pieces]
    return HeldTable(
        tuple(NamedArray(*each[:3]) for each in held),
        np.repeat(np.arange(len(held)), counts),
        np.repeat(np.array([each.replica for each in held], np.int64), counts),
        np.array([piece.rows for piece in pieces], np.int64),
        RegionTable.of([piece.region for piece in pieces]),
    )


def arrays_digest(held: HeldTable) -> str:
    """Return a digest of the arrays that a rank has, whatever it has of them."""
    return hex_digest(json.dumps(held.arrays).encode())


def encode(table: HeldTable, *, named: bool = True) -> str:
    """Write down what a rank holds; unless ``named`` only the digest of the arrays."""
    columns: tuple[NDArray[Any], ...] = (
        table.array,
        table.replica,
        table.rows,
        table.regions.axes,
        table.regions.bounds,
    )
    arrays = table.arrays if named else None
    return json.dumps([arrays_digest(table), arrays, *map(encode_column, columns)])


def decode(texts: Iterable[str]) -> list[HeldTable]:
    """Read what ``encode`` wrote on all ranks, in their order.

    The first rank that has some arrays names them.
    """
    known: dict[str, tuple[NamedArray, ...]] = {}
    found = []
    for text in texts:
        digest, arrays, *columns = json.loads(text)
        if digest not in known:
            known[digest] = tuple(
                NamedArray(name, dtype, tuple(shape)) for name, dtype, shape in arrays
            )
        array, replica, rows, axes, bounds = map(decode_column, columns)
        regions = RegionTable.packed(axes.astype(np.int8), bounds)
        found.append(HeldTable(known[digest], array, replica, rows, regions))
    return found


def encode_column(values: NDArray[Any]) -> str:
    """Write down integers: bytes of each, and all of them in base64."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    size = next(n for n in (1, 2, 4, 8) if -(1 << 8 * n - 1) <= low <= high < 1 << 8 * n - 1)
    return f"{size}{base64.b64encode(values.astype(f'<i{size}').tobytes()).decode()}"


def decode_column(text: str) -> Ints:
    """Read what ``encode_column`` wrote."""
    return np.frombuffer(base64.b64decode(text[1:]), f"<i{text[0]}").astype(np.int64)
