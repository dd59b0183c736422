"""``metadata.json``: what was saved, and where every element of it lies.

One JSON object in UTF-8, strict (see ``strict_json``), with exactly these keys::

    format       "fsdpcore.checkpoint"
    version      2
    save_id      text, the same in the header of every file of this save
    step         updates before the save
    world_size   number of ranks that saved
    created      when, as text
    block_bytes  bytes of a piece that have a checksum together
    info         object: what the engine wants to remember
    extra        anything: what the user gave
    ranks        list with something for each rank
    metrics      object: finite numbers by name, each with a fraction or an exponent
    files        list of [name, size, data_start, table, header_checksum, table_checksum, pieces]
    tensors      object: by name [dtype, shape]
    pieces       [arrays, kinds, bounds] of all pieces, as packed numbers

Positions in files are in bytes from their start. ``data_start`` is where the first piece begins and
``table`` where the checksums do, which go on to the end; the two checksums, each xxh3_64 as 16
hexadecimal digits, are of the bytes before ``data_start`` and of those from ``table`` on. The names
of dtypes are NumPy's and ml_dtypes'. ``pieces`` of a file is how many lie in it.

All pieces are listed in the order of the files and of their places in them. Packed numbers are a
digit, 1, 2, 4 or 8, and so many bytes of each, signed and little-endian, in zlib, in base64.
``arrays`` has for each piece the number of its array, in
the order of ``tensors``, less that of the piece before. ``kinds`` has 0 for a range, elements
[start, stop) in C order, and 1 for a box, [start, stop) along every axis. ``bounds`` has all ranges
first, then the boxes of arrays of no axes, of one, and so on. Ranges have a column of starts and
one of extents; boxes a column of starts for every axis, then one of extents for every axis. In a
column each number stands less the one before it of the same array.

The elements of a piece lie in C order, little-endian, without gaps. The pieces of a file fill it
from ``data_start`` to ``table``, without holes or overlaps. The table has the pieces in their
order, of each ceil(bytes / block_bytes) checksums of 8 bytes: little-endian xxh3_64 of so many
bytes each, counted from where the piece begins. No piece is empty, and no two of a tensor share an
element; elements may be in none.

Version 1, which had a list for every piece, is read by ``metadata_v1``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from fsdpcore.checkpoint.format.marker import check_metrics, check_save_id
from fsdpcore.checkpoint.format.metadata_builder import (
    MAX_BLOCK_BYTES,
    ArrayKind,
    MetadataBuilder,
    bytes_of,
    check_file,
    check_filled,
    check_regions,
    checked_array,
    is_count,
)
from fsdpcore.checkpoint.format.metadata_v1 import parsed_v1
from fsdpcore.checkpoint.format.piece_table import PieceTable, unpacked
from fsdpcore.checkpoint.format.stored import (
    CHECKSUM_BYTES,
    StoredFile,
    StoredPiece,
    StoredPieces,
    StoredTensor,
)
from fsdpcore.checkpoint.format.strict_json import check_json, check_text, decode, encode, short
from fsdpcore.core.collector import collector_paused
from fsdpcore.core.errors import ArgumentError, CorruptCheckpointError, FsdpcoreError
from fsdpcore.core.geometry.region_table import Column, Ints, ShapeTable
from fsdpcore.core.geometry.regions import Region

__all__ = [
    "BLOCK_BYTES",
    "CHECKSUM_BYTES",
    "METADATA_NAME",
    "Metadata",
    "StoredFile",
    "StoredPiece",
    "StoredTensor",
    "check_json",
    "make_metadata",
]

METADATA_NAME = "metadata.json"
BLOCK_BYTES = 64 << 10
"""Bytes of a piece that have a checksum together, where nothing else is said."""

FORMAT = "fsdpcore.checkpoint"
VERSION = 2

MAX_RANKS = 2**31
"""More no job has."""

MAX_STEP = 2**62 - 1
"""Of a checkpoint."""

_VALUES = (
    "save_id",
    "step",
    "world_size",
    "created",
    "block_bytes",
    "info",
    "extra",
    "ranks",
    "metrics",
)
_KEYS = {"format", "version", *_VALUES, "files", "tensors"}
_KEYS_OF = {1: _KEYS, 2: _KEYS | {"pieces"}}
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
_KINDS = {list: "list", dict: "object"}
_Kind = TypeVar("_Kind", list[Any], dict[str, Any])


@dataclass(frozen=True)
class Metadata:
    """What ``metadata.json`` says; the module's docstring has what each attribute means.

    One that ``make_metadata`` or ``from_bytes`` returned keeps all that is promised there.

    Attributes:
        tensors: arrays by name, with their pieces.
        table: all pieces.
        offsets: of each of them, see ``StoredPiece``.
        blocks: the number of each one's first block among those of all, and how many there are.
    """

    save_id: str
    step: int
    world_size: int
    created: str
    info: dict[str, Any]
    extra: Any
    ranks: tuple[Any, ...]
    metrics: dict[str, float]
    block_bytes: int
    files: tuple[StoredFile, ...]
    tensors: dict[str, StoredTensor]
    table: PieceTable = field(compare=False)
    offsets: Column = field(compare=False)
    blocks: Ints = field(compare=False)

    def pieces_in(self, file: int) -> tuple[list[StoredTensor], list[StoredPiece]]:
        """Return the pieces of a file in their order, and of each of them the array."""
        begin, end = self.table.begins[file : file + 2].tolist()
        pieces = StoredPieces(self.table, np.arange(begin, end), self.offsets, self.blocks)
        tensors = list(self.tensors.values())
        return [tensors[each] for each in self.table.tensor[begin:end].tolist()], list(pieces)

    def to_bytes(self) -> bytes:
        """Return the file's content, with a line for each file and each tensor.

        Raises:
            ArgumentError: a value that JSON cannot hold as it is.
        """
        values = {key: getattr(self, key) for key in _VALUES}
        _check_values(values, ArgumentError)
        values["ranks"] = list(self.ranks)
        lines = [f'"{key}":{encode(value)}' for key, value in values.items()]
        files = map(_file_line, self.files, self.table.counts.tolist())
        lines.append(f'"files":[{_lines(files)}]')
        lines.append(f'"tensors":{{{_lines(map(_tensor_line, self.tensors.values()))}}}')
        lines.append(f'"pieces":{encode(list(self.table.packed))}')
        head = f'"format":"{FORMAT}",\n"version":{VERSION}'
        return ("{" + ",\n".join([head, *lines]) + "}\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Metadata:
        """Read what ``to_bytes`` returned, or what version 1 wrote.

        Raises:
            CorruptCheckpointError: anything is wrong; the message says what and where.
        """
        with collector_paused():  # version 1 has a list for every piece
            return cls._parsed(data)

    @classmethod
    def _parsed(cls, data: bytes) -> Metadata:
        document = decode(data, METADATA_NAME)
        version = _checked_version(document)
        values = {key: document[key] for key in _VALUES}
        values["ranks"] = tuple(_expect(list, document["ranks"], "ranks"))
        _check_values(values, CorruptCheckpointError)
        rows = _expect(list, document["files"], "files")
        tensors = _expect(dict, document["tensors"], "tensors")
        if version == 1:
            files = [_parsed_file(row, 6) for row in rows]
            arrays, table = parsed_v1(tensors, files)
        else:
            files = [_parsed_file(row, 7) for row in rows]
            counts = [_count_of(row) for row in rows]
            arrays = {name: _parsed_array(name, row) for name, row in tensors.items()}
            table = _parsed_pieces(document["pieces"], counts, arrays)
        return _assembled(values, files, arrays, table, CorruptCheckpointError)


def make_metadata(
    *,
    save_id: str,
    step: int,
    world_size: int,
    created: str,
    files: Sequence[StoredFile],
    arrays: Mapping[str, tuple[str, tuple[int, ...]]],
    pieces: Iterable[tuple[str, Region, int, int]] | PieceTable,
    info: Mapping[str, Any] | None = None,
    extra: Any = None,
    ranks: Sequence[Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Metadata:
    """Describe what was saved; where the checksums of each piece are follows from the rest.

    Args:
        save_id: of the save, the same in all of its files.
        step: updates before it.
        world_size: number of ranks.
        created: when, as text.
        files: what was written, see ``StoredFile``.
        arrays: dtype, by name, and shape of every array.
        pieces: (name of the array, region, index in ``files``, byte of that file) for each piece;
            or a table in which none are misplaced or overlap.
        info: what the engine wants to remember.
        extra: what the user gave.
        ranks: for each rank what it gave; None for nothing.
        metrics: finite floats by name.
        block_bytes: bytes of a piece that have a checksum together.

    Raises:
        ArgumentError: JSON cannot hold a value as it is; or pieces overlap, leave their array or
            their file, or do not fill the files.
    """
    values = {
        "save_id": save_id,
        "step": step,
        "world_size": world_size,
        "created": created,
        "block_bytes": block_bytes,
        "info": dict(info or {}),
        "extra": extra,
        "ranks": (None,) * world_size if ranks is None else tuple(ranks),
        "metrics": dict(metrics or {}),
    }
    _check_values(values, ArgumentError)
    for each in files:
        check_file(each, ArgumentError)
    for name in arrays:
        check_text(name, "the name of an array")
    if isinstance(pieces, PieceTable):
        kinds = {name: checked_array(name, *kind, ArgumentError) for name, kind in arrays.items()}
        return _assembled(values, files, kinds, pieces, ArgumentError)
    parts: dict[str, list[tuple[Region, int, int]]] = {name: [] for name in arrays}
    for name, region, file, offset in pieces:
        if name not in parts:
            raise ArgumentError(f"there is a piece of {short(name)}, but no such array")
        parts[name].append((region, file, offset))
    building = MetadataBuilder(files, ArgumentError)
    for name, (dtype, shape) in arrays.items():
        building.add(name, dtype, shape, parts[name])
    return _assembled(values, files, building.arrays, building.table(), ArgumentError)


def _assembled(
    values: Mapping[str, Any],
    files: Sequence[StoredFile],
    arrays: Mapping[str, ArrayKind],
    table: PieceTable,
    error: type[FsdpcoreError],
) -> Metadata:
    """Bring checked values, arrays and pieces together with the files that they lie in."""
    blocks = check_filled(files, table, values["block_bytes"], error)
    offsets = table.offsets(np.array([file.data_start for file in files], np.int64))
    tensors = {
        name: StoredTensor(name, *kind, StoredPieces(table, table.of(number), offsets, blocks))
        for number, (name, kind) in enumerate(arrays.items())
    }
    return Metadata(
        **values,
        files=tuple(files),
        tensors=tensors,
        table=table,
        offsets=offsets,
        blocks=blocks,
    )


def _check_values(values: Mapping[str, Any], error: type[FsdpcoreError]) -> None:
    """Raise ``error`` unless all values are such that ``to_bytes`` keeps them as they are."""
    for key, low, high in (
        ("step", 0, MAX_STEP),
        ("world_size", 1, MAX_RANKS),
        ("block_bytes", 1, MAX_BLOCK_BYTES),
    ):
        value = values[key]
        if type(value) is not int or not low <= value <= high:
            raise error(
                f"{key} of a checkpoint is an integer from {low} to {high}, not {short(value)}"
            )
    check_save_id(values["save_id"], error)
    check_text(values["created"], "created", error)
    if type(values["info"]) is not dict:
        raise error(f"info of a checkpoint is a dict, not {type(values['info']).__name__}")
    check_json(values["info"], "info", error)
    check_json(values["extra"], "extra", error)
    ranks, world_size = values["ranks"], values["world_size"]
    if len(ranks) != world_size:
        raise error(f"there are {len(ranks)} values in ranks for {world_size} ranks")
    for rank, value in enumerate(ranks):
        check_json(value, f"ranks[{rank}]", error)
    check_metrics(values["metrics"], error)


def _lines(rows: Iterable[str]) -> str:
    text = ",\n".join(rows)
    return f"\n{text}\n" if text else ""


def _file_line(file: StoredFile, pieces: int) -> str:
    checksums = f'"{file.header_checksum:016x}","{file.table_checksum:016x}"'
    numbers = f"{file.size},{file.data_start},{file.table}"
    return f"[{encode(file.name)},{numbers},{checksums},{pieces}]"


def _tensor_line(tensor: StoredTensor) -> str:
    shape = ",".join(map(str, tensor.shape))
    return f'{encode(tensor.name)}:["{tensor.dtype.name}",[{shape}]]'


def _expect(kind: type[_Kind], value: object, what: str) -> _Kind:
    if type(value) is not kind:
        raise CorruptCheckpointError(f"{what} of {METADATA_NAME} is no {_KINDS[kind]}")
    return value


def _checked_version(document: object) -> int:
    """Return the version of an object with its keys; raise unless it can be read."""
    if type(document) is not dict or document.get("format") != FORMAT:
        raise CorruptCheckpointError(f"{METADATA_NAME} does not say that its format is {FORMAT}")
    version = document.get("version")
    if type(version) is not int or version not in _KEYS_OF:
        raise CorruptCheckpointError(
            f"{METADATA_NAME} has version {short(version)}, but this version of fsdpcore reads "
            f"{' and '.join(map(str, _KEYS_OF))}; a newer one may have written it"
        )
    keys, there = _KEYS_OF[version], document.keys()
    for fault, some in (("lacks", keys - there), ("also has", there - keys)):
        if some:
            raise CorruptCheckpointError(f"{METADATA_NAME} {fault} the key {short(min(some))}")
    return version


def _parsed_file(row: object, values: int) -> StoredFile:
    if type(row) is not list or len(row) != values:
        raise CorruptCheckpointError(
            f"a row of files in {METADATA_NAME} is no list of {values} values"
        )
    sums = row[4:6]
    for text in sums:
        if type(text) is not str or not _CHECKSUM.fullmatch(text):
            raise CorruptCheckpointError(
                f"the file {short(row[0])} has a checksum that is not 16 hexadecimal digits"
            )
    file = StoredFile(*row[:4], *(int(text, 16) for text in sums))
    check_file(file, CorruptCheckpointError)
    return file


def _count_of(row: list[Any]) -> int:
    count = row[6]
    if not is_count(count):
        raise CorruptCheckpointError(
            f"the file {short(row[0])} has {short(count)} where a number of pieces belongs"
        )
    return int(count)


def _parsed_array(name: str, row: object) -> ArrayKind:
    if type(row) is not list or len(row) != 2 or type(row[1]) is not list:
        raise CorruptCheckpointError(f"{short(name)} has no list of dtype and shape")
    return checked_array(name, row[0], tuple(row[1]), CorruptCheckpointError)


def _parsed_pieces(
    texts: object, counts: Sequence[int], arrays: Mapping[str, ArrayKind]
) -> PieceTable:
    """Return the pieces, which lie in their arrays and do not overlap."""
    if type(texts) is not list or len(texts) != 3:
        raise CorruptCheckpointError(f"pieces of {METADATA_NAME} are no list of 3 texts")
    shapes = ShapeTable([each.shape for each in arrays.values()])
    tensor, regions = unpacked(texts, sum(counts), shapes)
    check_regions(arrays, tensor, regions, CorruptCheckpointError)
    nbytes = bytes_of(arrays, tensor, regions, CorruptCheckpointError)
    return PieceTable(np.array(counts, np.int64), tensor, regions, nbytes)
