"""The header of a safetensors file: written, and read with everything checked first.

A file is eight bytes with the length N of the header as a little-endian integer, N bytes of JSON
and the data. The JSON is one object: for each tensor's name its dtype's code, shape and
``data_offsets`` [begin, end), counted from the end of the header; and ``__metadata__``, an object
of strings. The format is described at https://huggingface.co/docs/safetensors. Reading is stricter:
no key may be there twice.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsdpcore.checkpoint.format.dtypes import BITS
from fsdpcore.checkpoint.format.strict_json import check_text, decode, encode, short
from fsdpcore.core.errors import ArgumentError, CorruptCheckpointError, FsdpcoreError

MAX_HEADER_BYTES = 100_000_000
"""Limit of the format for N."""

METADATA_KEY = "__metadata__"
"""What no tensor can be called."""

_LENGTH = struct.Struct("<Q")
_MAX_DIMENSIONS = 65  # as many as NumPy has, and one of the two parts of complex numbers
_MAX_BYTES = 2**63 - 1


class TensorEntry(NamedTuple):
    """A tensor that is to be written: dtype by its code, shape, and size in bytes."""

    name: str
    code: str
    shape: tuple[int, ...]
    nbytes: int


class PlacedTensor(NamedTuple):
    """A tensor in a file; ``offset`` is in bytes from the start of the file."""

    name: str
    code: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int


@dataclass(frozen=True)
class Header:
    """What a header says.

    Attributes:
        entries: in the order of the data.
        metadata: the strings under ``__metadata__``; empty where there are none.
        data_start: bytes in front of the data.
    """

    entries: tuple[PlacedTensor, ...]
    metadata: dict[str, str]
    data_start: int


def build_header(
    entries: Sequence[TensorEntry], extra: Mapping[str, str], align: int = 64
) -> bytes:
    """Return the first bytes of a file, up to its data.

    Args:
        entries: the tensors, in the order of their data, which follow one another without gaps.
        extra: goes to ``__metadata__``, which is left out if there is nothing.
        align: the header is padded with spaces, so that the data begins at a multiple of it.

    Raises:
        ArgumentError: names that are there twice, reserved or no text, sizes that do not fit shape
            and dtype, or a header larger than the format allows.
    """
    content: dict[str, object] = {}
    if extra:
        for key, text in extra.items():
            check_text(key, "a key of the header's metadata")
            check_text(text, f"{short(key)} in the header's metadata")
        content[METADATA_KEY] = dict(extra)
    offset = 0
    for name, code, shape, nbytes in entries:
        check_text(name, "the name of a tensor")
        if name in content or name == METADATA_KEY:
            raise ArgumentError(f"the name {short(name)} is reserved, or there twice")
        begin, offset = offset, offset + nbytes
        _check_tensor(name, code, shape, (begin, offset), ArgumentError)
        content[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, offset]}
    header = encode(content).encode()
    header += b" " * (-(_LENGTH.size + len(header)) % align)
    if len(header) > MAX_HEADER_BYTES:
        raise ArgumentError(
            f"the header for {len(entries)} tensors has {len(header)} bytes, but the format allows "
            f"{MAX_HEADER_BYTES}; store them in several files, or give them shorter names"
        )
    return _LENGTH.pack(len(header)) + header


def tensor_bytes(code: str, shape: Sequence[int]) -> int | None:
    """Return the bytes of a tensor; None if they are no whole number, or too many to address."""
    # With extents of 0 left out, as no library can make an array whose other extents overflow.
    bits = math.prod(extent for extent in shape if extent) * BITS[code]
    if bits > _MAX_BYTES * 8:
        return None
    if 0 in shape:
        return 0
    return None if bits % 8 else bits // 8


def header_bytes(start: bytes, file_size: int) -> int:
    """Return how many bytes come before the data, from a file's first eight.

    Raises:
        CorruptCheckpointError: a file of this size cannot have such a header.
    """
    if file_size < _LENGTH.size or len(start) < _LENGTH.size:
        raise CorruptCheckpointError(
            f"no safetensors file: it has {min(file_size, len(start))} bytes, not even the 8 that "
            "give the length of its header"
        )
    length: int = _LENGTH.unpack_from(start)[0]
    if length > MAX_HEADER_BYTES:
        raise CorruptCheckpointError(
            f"no safetensors file: its header would have {length} bytes, more than the "
            f"{MAX_HEADER_BYTES} that the format allows"
        )
    if length > file_size - _LENGTH.size:
        raise CorruptCheckpointError(
            f"cut off: the header has {length} bytes, the whole file {file_size}"
        )
    return _LENGTH.size + length


def parse_header(prefix: bytes, file_size: int) -> Header:
    """Read the header from the first bytes of a file.

    Args:
        prefix: at least all up to the data, see ``header_bytes``; more is not looked at.
        file_size: bytes of the whole file.

    Raises:
        CorruptCheckpointError: anything is wrong; the message says what.
    """
    data_start = header_bytes(prefix, file_size)
    if len(prefix) < data_start:
        raise CorruptCheckpointError(
            f"cut off: of the {data_start} bytes before the data there are {len(prefix)}"
        )
    content = decode(bytes(prefix[_LENGTH.size : data_start]), "the header")
    if type(content) is not dict:
        raise CorruptCheckpointError("the header is no JSON object")
    metadata = content.pop(METADATA_KEY, {})
    if type(metadata) is not dict or any(type(text) is not str for text in metadata.values()):
        raise CorruptCheckpointError(f"{METADATA_KEY} of the header does not map text to text")
    entries = sorted(
        (_placed(name, entry, data_start) for name, entry in content.items()), key=_order
    )
    end = data_start
    for entry in entries:
        if entry.offset != end:
            fault = "overlaps what comes before it" if entry.offset < end else "leaves a hole"
            raise CorruptCheckpointError(
                f"the data of {short(entry.name)} begins at byte {entry.offset}, not {end}: it "
                f"{fault}"
            )
        end += entry.nbytes
    if end != file_size:
        raise CorruptCheckpointError(
            f"the file has {file_size} bytes, but by its header {end}: "
            + ("it is cut off" if file_size < end else "something follows the data")
        )
    return Header(tuple(entries), metadata, data_start)


def read_header(read_at: Callable[[int, int], bytes], file_size: int) -> Header:
    """Read a file's header.

    Args:
        read_at: returns the bytes of the file from an offset, as many as asked for.
        file_size: bytes of the whole file; no more is asked for.

    Raises:
        CorruptCheckpointError: anything is wrong; the message says what.
    """
    start = read_at(0, min(file_size, _LENGTH.size))
    rest = header_bytes(start, file_size) - _LENGTH.size
    return parse_header(bytes(start) + bytes(read_at(_LENGTH.size, rest)), file_size)


def _order(entry: PlacedTensor) -> tuple[int, int]:
    return entry.offset, entry.nbytes


def _placed(name: str, entry: Any, data_start: int) -> PlacedTensor:
    """Check what the header says of one tensor."""
    try:
        code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise CorruptCheckpointError(
            f"the header has no dtype, shape and two data_offsets for {short(name)}"
        ) from None
    _check_tensor(name, code, shape, (begin, end), CorruptCheckpointError)
    return PlacedTensor(name, code, tuple(shape), end - begin, data_start + begin)


def _check_tensor(
    name: str, code: Any, shape: Any, offsets: tuple[Any, Any], error: type[FsdpcoreError]
) -> None:
    """Raise ``error`` unless dtype, shape and data_offsets of a tensor are such, and fit."""
    if type(code) is not str or code not in BITS:
        raise error(f"{short(name)} has the unknown dtype {short(code)}")
    if type(shape) not in (list, tuple) or len(shape) > _MAX_DIMENSIONS or not _counts(shape):
        raise error(f"{short(name)} has the shape {short(shape)}, which is none")
    begin, end = offsets
    if not _counts(offsets):
        raise error(
            f"{short(name)} has the data_offsets {short(begin)}, {short(end)}, which are none"
        )
    if tensor_bytes(code, shape) != end - begin:
        raise error(
            f"{short(name)} has dtype {code} and shape {short(shape)}, which do not fit its "
            f"data_offsets {begin}, {end}"
        )


def _counts(values: Sequence[object]) -> bool:
    return all(type(value) is int and 0 <= value <= _MAX_BYTES for value in values)
