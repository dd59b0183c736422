"""``metadata.json``: what was saved, and where every element of it lies.

One JSON object in UTF-8, strict (see ``strict_json``), with exactly these keys::

    format       "fsdpcore.checkpoint"
    version      1
    save_id      text, the same in the header of every file of this save
    step         updates before the save
    world_size   number of ranks that saved
    created      when, as text
    block_bytes  bytes of a piece that have a checksum together
    info         object: what the engine wants to remember
    extra        anything: what the user gave
    ranks        list with something for each rank
    metrics      object: finite numbers by name, each with a fraction or an exponent
    files        list of [name, size, data_start, table, header_checksum, table_checksum]
    tensors      object: by name [dtype, shape, pieces], each piece one of
                 [file, offset, start, stop]          elements [start, stop) in C order
                 [file, offset, [starts], [stops]]    a box: [start, stop) along every axis

Positions in files are in bytes from their start. ``data_start`` is where the first piece begins and
``table`` where the checksums do, which go on to the end; the two checksums, each xxh3_64 as 16
hexadecimal digits, are of the bytes before ``data_start`` and of those from ``table`` on. The names
of dtypes are NumPy's and ml_dtypes'. ``file`` is an index into ``files``, ``offset`` where the
piece begins.

The elements of a piece lie in C order, little-endian, without gaps. The pieces of a file fill it
from ``data_start`` to ``table``, without holes or overlaps. The table has the pieces in order of
their offsets, of each ceil(bytes / block_bytes) checksums of 8 bytes: little-endian xxh3_64 of so
many bytes each, counted from where the piece begins. No piece is empty, and no two of a tensor
share an element; elements may be in none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fsdpcore.checkpoint.format.marker import check_metrics, check_save_id
from fsdpcore.checkpoint.format.metadata_builder import MAX_BLOCK_BYTES, MAX_BYTES, MetadataBuilder
from fsdpcore.checkpoint.format.stored import CHECKSUM_BYTES, StoredFile, StoredPiece, StoredTensor
from fsdpcore.checkpoint.format.strict_json import check_json, check_text, decode, encode, short
from fsdpcore.core.collector import collector_paused
from fsdpcore.core.errors import ArgumentError, CorruptCheckpointError, FsdpcoreError
from fsdpcore.core.geometry.regions import Box, Range, Region

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
VERSION = 1

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
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
_KINDS = {list: "list", dict: "object"}
_Kind = TypeVar("_Kind", list[Any], dict[str, Any])


@dataclass(frozen=True)
class Metadata:
    """What ``metadata.json`` says; the module's docstring has what each attribute means.

    One that ``make_metadata`` or ``from_bytes`` returned keeps all that is promised there.
    """

    save_id: str
    step: int
    world_size: int
    created: str
    info: dict[str, Any]
    extra: Any
    ranks: tuple[Any, ...]
    metrics: dict[str, float]
    files: tuple[StoredFile, ...]
    tensors: dict[str, StoredTensor]
    block_bytes: int = BLOCK_BYTES

    def to_bytes(self) -> bytes:
        """Return the file's content, with a line for each file and each tensor.

        Raises:
            ArgumentError: a value that JSON cannot hold as it is.
        """
        _check_values(self, ArgumentError)
        values = {key: getattr(self, key) for key in _VALUES}
        values["ranks"] = list(self.ranks)
        lines = [f'"{key}":{encode(value)}' for key, value in values.items()]
        lines.append(f'"files":[{_lines(map(_file_line, self.files))}]')
        lines.append(f'"tensors":{{{_lines(map(_tensor_line, self.tensors.values()))}}}')
        head = f'"format":"{FORMAT}",\n"version":{VERSION}'
        return ("{" + ",\n".join([head, *lines]) + "}\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Metadata:
        """Read what ``to_bytes`` returned.

        Raises:
            CorruptCheckpointError: anything is wrong; the message says what and where.
        """
        with collector_paused():
            return cls._parsed(data)

    @classmethod
    def _parsed(cls, data: bytes) -> Metadata:
        document = decode(data, METADATA_NAME)
        _check_keys(document)
        values = {key: document[key] for key in _VALUES}
        values["ranks"] = tuple(_expect(list, document["ranks"], "ranks"))
        files = [_parsed_file(row) for row in _expect(list, document["files"], "files")]
        made = cls(**values, files=tuple(files), tensors={})
        _check_values(made, CorruptCheckpointError)
        building = MetadataBuilder(made.files, made.block_bytes, CorruptCheckpointError)
        rows = _expect(dict, document["tensors"], "tensors")
        for name in list(rows):
            _parse_tensor(name, rows.pop(name), building)
        made.tensors.update(building.tensors())
        return made


def make_metadata(
    *,
    save_id: str,
    step: int,
    world_size: int,
    created: str,
    files: Sequence[StoredFile],
    arrays: Mapping[str, tuple[str, tuple[int, ...]]],
    pieces: Iterable[tuple[str, Region, int, int]],
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
        pieces: (name of the array, region, index in ``files``, byte of that file) for each piece.
        info: what the engine wants to remember.
        extra: what the user gave.
        ranks: for each rank what it gave; None for nothing.
        metrics: finite floats by name.
        block_bytes: bytes of a piece that have a checksum together.

    Raises:
        ArgumentError: JSON cannot hold a value as it is; or pieces overlap, leave their array or
            their file, or do not fill the files.
    """
    made = Metadata(
        save_id=save_id,
        step=step,
        world_size=world_size,
        created=created,
        info=dict(info or {}),
        extra=extra,
        ranks=(None,) * world_size if ranks is None else tuple(ranks),
        metrics=dict(metrics or {}),
        files=tuple(files),
        tensors={},
        block_bytes=block_bytes,
    )
    _check_values(made, ArgumentError)
    building = MetadataBuilder(made.files, block_bytes, ArgumentError)
    parts: dict[str, list[tuple[Region, int, int]]] = {name: [] for name in arrays}
    for name, region, file, offset in pieces:
        if name not in parts:
            raise ArgumentError(f"there is a piece of {short(name)}, but no such array")
        parts[name].append((region, file, offset))
    for name, (dtype, shape) in arrays.items():
        check_text(name, "the name of an array")
        building.add(name, dtype, shape, parts[name])
    made.tensors.update(building.tensors())
    return made


def _check_values(made: Metadata, error: type[FsdpcoreError]) -> None:
    """Raise ``error`` unless all values are such that ``to_bytes`` keeps them as they are."""
    for key, low, high in (
        ("step", 0, MAX_STEP),
        ("world_size", 1, MAX_RANKS),
        ("block_bytes", 1, MAX_BLOCK_BYTES),
    ):
        value = getattr(made, key)
        if type(value) is not int or not low <= value <= high:
            raise error(
                f"{key} of a checkpoint is an integer from {low} to {high}, not {short(value)}"
            )
    check_save_id(made.save_id, error)
    check_text(made.created, "created", error)
    if type(made.info) is not dict:
        raise error(f"info of a checkpoint is a dict, not {type(made.info).__name__}")
    check_json(made.info, "info", error)
    check_json(made.extra, "extra", error)
    if len(made.ranks) != made.world_size:
        raise error(f"there are {len(made.ranks)} values in ranks for {made.world_size} ranks")
    for rank, value in enumerate(made.ranks):
        check_json(value, f"ranks[{rank}]", error)
    check_metrics(made.metrics, error)


def _lines(rows: Iterable[str]) -> str:
    text = ",\n".join(rows)
    return f"\n{text}\n" if text else ""


def _file_line(file: StoredFile) -> str:
    checksums = f'"{file.header_checksum:016x}","{file.table_checksum:016x}"'
    return f"[{encode(file.name)},{file.size},{file.data_start},{file.table},{checksums}]"


def _tensor_line(tensor: StoredTensor) -> str:
    pieces = ",".join(map(_piece_line, tensor.pieces))
    shape = ",".join(map(str, tensor.shape))
    return f'{encode(tensor.name)}:["{tensor.dtype.name}",[{shape}],[{pieces}]]'


def _piece_line(piece: StoredPiece) -> str:
    region = piece.region
    if isinstance(region, Range):
        return f"[{piece.file},{piece.offset},{region.start},{region.stop}]"
    start, stop = (",".join(map(str, bound)) for bound in (region.start, region.stop))
    return f"[{piece.file},{piece.offset},[{start}],[{stop}]]"


def _expect(kind: type[_Kind], value: object, what: str) -> _Kind:
    if type(value) is not kind:
        raise CorruptCheckpointError(f"{what} of {METADATA_NAME} is no {_KINDS[kind]}")
    return value


def _check_keys(document: object) -> None:
    """Raise unless this is an object with the keys of a version that can be read."""
    if type(document) is not dict or document.get("format") != FORMAT:
        raise CorruptCheckpointError(f"{METADATA_NAME} does not say that its format is {FORMAT}")
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise CorruptCheckpointError(
            f"{METADATA_NAME} has version {short(version)}, but this version of fsdpcore reads "
            f"{VERSION}; a newer one may have written it"
        )
    for fault, keys in (("lacks", _KEYS - document.keys()), ("also has", document.keys() - _KEYS)):
        if keys:
            raise CorruptCheckpointError(f"{METADATA_NAME} {fault} the key {short(min(keys))}")


def _parsed_file(row: object) -> StoredFile:
    if type(row) is not list or len(row) != 6:
        raise CorruptCheckpointError(f"a row of files in {METADATA_NAME} is no list of 6 values")
    sums = row[4:]
    for text in sums:
        if type(text) is not str or not _CHECKSUM.fullmatch(text):
            raise CorruptCheckpointError(
                f"the file {short(row[0])} has a checksum that is not 16 hexadecimal digits"
            )
    return StoredFile(*row[:4], *(int(text, 16) for text in sums))


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
        elif type(start) is list and type(stop) is list and _counts(start) and _counts(stop):
            pieces.append((Box(tuple(start), tuple(stop)), file, offset))
        else:
            raise CorruptCheckpointError(
                f"piece {len(pieces)} of {short(name)} goes from {short(start)} to {short(stop)}; "
                "a range has two integers there, a box two lists of them, none of them negative"
            )
    building.add(name, dtype, tuple(shape), pieces)


def _counts(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value <= MAX_BYTES for value in values)
