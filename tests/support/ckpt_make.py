"""A checkpoint written by one process from whole arrays, cut as the test says: no code of ours.

A cut is ("range", start, stop) of the flattened array, or ("box", starts, stops).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

Array = NDArray[Any]
Cut = tuple[str, Any, Any]
BLOCK = 1 << 16

_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "complex128": "F64",
    "float8_e4m3fn": "F8_E4M3",
}


def cut_out(array: Array, cut: Cut) -> Array:
    """The elements of a cut: a copy, flat for a range."""
    kind, start, stop = cut
    if kind == "range":
        return array.reshape(-1)[start:stop].copy()
    return array[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))].copy()


def everything(array: Array) -> list[Cut]:
    return [("range", 0, array.size)] if array.size else []


def make_checkpoint(
    root: Path,
    arrays: Mapping[str, Array],
    cuts: Mapping[str, Sequence[tuple[int, Cut]]] | None = None,
    *,
    step: int = 30,
    name: str = "",
    world_size: int = 1,
    block: int = BLOCK,
    **more: Any,
) -> Path:
    """Write and commit a checkpoint.

    Args:
        root: the folder of checkpoints.
        arrays: whole ones, by name.
        cuts: for each array, its pieces, each with the number of the file that it goes to; by
            default each array is one piece in file 0.
        step, name, world_size, block: of the checkpoint.
        more: other values of its metadata.

    Returns:
        Its directory.
    """
    if cuts is None:
        cuts = {key: [(0, cut) for cut in everything(array)] for key, array in arrays.items()}
    folder = root / (name or f"step_{step:08d}")
    folder.mkdir(parents=True)
    save_id = f"{folder.name}-test"
    rows: dict[str, list[Any]] = {
        key: [array.dtype.name, list(array.shape), []] for key, array in arrays.items()
    }
    files = []
    for number in sorted({file for each in cuts.values() for file, _ in each}):
        pieces = [(key, cut) for key, each in cuts.items() for file, cut in each if file == number]
        pieces.sort(key=lambda each: (-arrays[each[0]].itemsize, each[0]))
        files.append(_write(folder, number, pieces, arrays, rows, len(files), save_id, block))
    told = {
        "format": "fsdpcore.checkpoint",
        "version": 1,
        "save_id": save_id,
        "step": step,
        "world_size": world_size,
        "created": "2026-01-01",
        "block_bytes": block,
        "info": {},
        "extra": None,
        "ranks": [None] * world_size,
        "metrics": {},
        **more,
        "files": files,
        "tensors": rows,
    }
    commit(folder, told)
    return folder


def commit(folder: Path, told: Mapping[str, Any]) -> None:
    """Write metadata and marker."""
    data = json.dumps(told).encode()
    (folder / "metadata.json").write_bytes(data)
    lines = (
        "fsdpcore checkpoint 1\n"
        f"step {told['step']}\n"
        f"save_id {told['save_id']}\n"
        f"metadata_bytes {len(data)}\n"
        f"metadata_sha256 {hashlib.sha256(data).hexdigest()}\n"
        f"metrics {json.dumps(told['metrics'], separators=(',', ':'))}\n"
    ).encode()
    last = f"checksum {hashlib.sha256(lines).hexdigest()}\n".encode()
    (folder / "COMMIT").write_bytes(lines + last)


def _write(
    folder: Path,
    number: int,
    pieces: Sequence[tuple[str, Cut]],
    arrays: Mapping[str, Array],
    rows: dict[str, list[Any]],
    index: int,
    save_id: str,
    block: int,
) -> list[Any]:
    """Write one file, note its pieces in ``rows``, and return what the metadata says of it."""
    data, table = [], []
    header: dict[str, Any] = {
        "__metadata__": {"format": "fsdpcore", "save_id": save_id, "rank": str(number)}
    }
    places = []
    offset = 0
    for key, cut in pieces:
        array = cut_out(arrays[key], cut)
        raw = array.tobytes()
        shape = list(array.shape) + ([2] if array.dtype == np.complex128 else [])
        header[f"{key}#{len(header)}"] = {
            "dtype": _CODES[array.dtype.name],
            "shape": shape,
            "data_offsets": [offset, offset + len(raw)],
        }
        places.append((key, cut, offset))
        offset += len(raw)
        data.append(raw)
        for begin in range(0, len(raw), block):
            table.append(xxhash.xxh3_64(raw[begin : begin + block]).digest()[::-1])
    sums = b"".join(table)
    header["fsdpcore.checksums"] = {
        "dtype": "U8",
        "shape": [len(table), 8],
        "data_offsets": [offset, offset + len(sums)],
    }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    front = len(text).to_bytes(8, "little") + text
    name = f"rank_{number}.safetensors"
    (folder / name).write_bytes(b"".join([front, *data, sums]))
    for key, (kind, start, stop), at in places:
        bounds = [start, stop] if kind == "range" else [list(start), list(stop)]
        rows[key][2].append([index, len(front) + at, *bounds])
    checksums = [xxhash.xxh3_64(each).hexdigest() for each in (front, sums)]
    size = len(front) + offset + len(sums)
    return [name, size, len(front), len(front) + offset, *checksums]
