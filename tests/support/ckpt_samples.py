"""Arrays of every dtype and odd shape, saved by several ranks, for tests of conversions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import deserialize

import fsdpcore as fc
from fsdpcore.checkpoint.save.save import save

Array = NDArray[Any]

PLAIN = ("bool", "uint8", "int8", "uint16", "int16", "float16", "uint32", "int32", "float32")
WIDE = ("uint64", "int64", "float64", "complex64")
SHORT = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def dtype_named(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def bits(seed: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array of random bits: NaN payloads, subnormals and infinities among the values."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    if dtype == np.bool_:
        raw &= 1
    return raw.view(dtype).reshape(shape)


def samples() -> dict[str, Array]:
    """Parameters: every dtype that safetensors shares with NumPy, odd shapes and names."""
    found = {
        f"layer.{name}": bits(number, (number + 2, 13), dtype_named(name))
        for number, name in enumerate((*PLAIN, *WIDE, *SHORT))
    }
    found["scalar"] = np.array(-0.0, np.float32)
    found["none"] = np.empty((0, 5), np.int16)
    found["größe.重み\n"] = bits(50, (3,), np.dtype(np.float64))
    found["strided"] = np.arange(60, dtype=np.int32).reshape(6, 10).T
    found["large"] = bits(51, (70_000, 3), np.dtype(np.uint16))
    return found


_CODES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


def by_library(path: Path) -> dict[str, Array]:
    """All arrays of a file, read by the safetensors library, also of dtypes NumPy lacks."""
    return {
        name: np.frombuffer(told["data"], dtype_named(_CODES[told["dtype"]])).reshape(told["shape"])
        for name, told in deserialize(path.read_bytes())
    }


def same_bits(one: Array, other: Array) -> bool:
    """Whether two arrays are equal in dtype, shape and bits."""
    ours, theirs = (np.ascontiguousarray(each).tobytes() for each in (one, other))
    return (one.dtype, one.shape, ours) == (other.dtype, other.shape, theirs)


def all_same(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    return one.keys() == other.keys() and all(same_bits(one[name], other[name]) for name in one)


def saved(path: Path, state: Mapping[str, Array], *, ranks: int = 3, step: int = 30, **more: Any):
    """Save a mapping, of which each rank has a run of every larger array; return the folder."""

    def main(backend: Any) -> str:
        mine = {name: shard(array, backend) for name, array in state.items()}
        return save(path, mine, backend, step=step, **more).name

    return path / fc.launch(main, world_size=ranks, transport="sim")[0]


def shard(array: Array, backend: Any) -> Any:
    """A rank's run of an array's elements; all of it if it is small, a replica."""
    rank, ranks = backend.rank, backend.world_size
    if array.size < 8 or not array.flags.c_contiguous or not array.dtype.isnative:
        return array
    low, high = (array.size * each // ranks for each in (rank, rank + 1))
    pieces = (fc.ArrayPiece(low, high, array.reshape(-1)[low:high]),) if low < high else ()
    return fc.ShardedArray(array.shape, array.dtype, pieces)
