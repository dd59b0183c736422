"""Any partition loads as any other: bytes like a single process's, none read in vain."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.arrays import array_of
from support.ckpt_make import Cut, cut_out, make_checkpoint

import fsdpcore as fc
from fsdpcore.checkpoint import BoxShard, read
from fsdpcore.checkpoint.load.load import Loaded, load

Array = NDArray[Any]

DTYPES = [
    np.dtype(each)
    for each in (
        np.bool_,
        np.int8,
        np.uint16,
        np.float16,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        np.float32,
        np.int64,
        np.float64,
        np.complex64,
        np.complex128,
    )
]
# Small blocks are as good as large arrays.
BLOCKS = (64, 1 << 10, 1 << 16)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    ndim = draw(st.integers(0, 4))
    most = {0: 1, 1: 4000, 2: 90, 3: 20, 4: 9}[ndim]
    return tuple(draw(st.integers(0, most)) for _ in range(ndim))


def splits(draw: st.DrawFn, size: int, parts: int) -> list[int]:
    cuts = sorted(draw(st.integers(0, size)) for _ in range(parts - 1))
    return [0, *cuts, size]


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...], parts: int) -> list[Cut]:
    """Cuts that cover an array once, as many as parts; some of them may be empty."""
    size = int(np.prod(shape))
    if not shape or draw(st.booleans()):
        bounds = splits(draw, size, parts)
        return [("range", a, b) for a, b in pairwise(bounds)]
    cells: list[tuple[list[int], list[int]]] = [([], [])]
    wanted = parts
    for axis, extent in enumerate(shape):
        count = draw(st.integers(1, wanted)) if axis < len(shape) - 1 else wanted
        wanted //= count
        bounds = splits(draw, extent, count)
        cells = [([*start, a], [*stop, b]) for start, stop in cells for a, b in pairwise(bounds)]
    found: list[Cut] = [("box", tuple(start), tuple(stop)) for start, stop in cells]
    empty: Cut = ("box", (0,) * len(shape), (0,) * len(shape))
    return found + [empty] * (parts - len(found))


def filled(cut: Cut) -> bool:
    kind, start, stop = cut
    if kind == "range":
        return bool(stop > start)
    return all(b > a for a, b in zip(start, stop, strict=True))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    old, new = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    arrays, stored, wanted = {}, {}, {}
    for number in range(draw(st.integers(1, 4))):
        name = f"t{number}"
        shape = draw(shapes())
        arrays[name] = array_of(number, shape, draw(st.sampled_from(DTYPES)))
        pieces = draw(partitions(shape, draw(st.integers(1, 6))))
        stored[name] = [(draw(st.integers(0, old - 1)), cut) for cut in pieces if filled(cut)]
        wanted[name] = draw(partitions(shape, new))
    return {
        "arrays": arrays,
        "stored": stored,
        "wanted": wanted,
        "ranks": new,
        "block": draw(st.sampled_from(BLOCKS)),
        "threads": draw(st.integers(1, 2)),
        "layout": draw(st.sampled_from("CFS")),
    }


def shard_of(array: Array, cut: Cut, layout: str) -> Any:
    """What a rank has of an array, to be filled; in some order in memory."""
    kind, start, stop = cut
    if kind == "range":
        pieces = [(start, stop, np.zeros(stop - start, array.dtype))] if stop > start else []
        return fc.ShardedArray(array.shape, array.dtype, tuple(pieces))
    shape = tuple(b - a for a, b in zip(start, stop, strict=True))
    if layout == "S":
        room = np.zeros([2 * each + 1 for each in shape], array.dtype)
        return BoxShard(array.shape, start, room[tuple(slice(1, None, 2) for _ in shape)])
    return BoxShard(array.shape, start, np.zeros(shape, array.dtype, order=layout))


def values_of(shard: Any) -> Array:
    if isinstance(shard, BoxShard):
        return shard.array
    return np.concatenate([np.empty(0, shard.dtype), *(piece.array for piece in shard.pieces)])


@settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(case=cases())
def test_any_partition_loads_as_any_other(case: dict[str, Any]) -> None:
    check(case)


@pytest.mark.campaign
def test_any_partition_loads_as_any_other_at_length() -> None:

    @settings(max_examples=4000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(case=cases())
    def at_length(case: dict[str, Any]) -> None:
        check(case)

    at_length()


def check(case: dict[str, Any]) -> None:
    """Every byte is where it belongs, and hardly any other was read."""
    arrays, wanted, ranks = case["arrays"], case["wanted"], case["ranks"]
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), arrays, case["stored"], block=case["block"])

        def main(backend: fc.Backend) -> Loaded:
            target = {
                name: shard_of(array, wanted[name][backend.rank], case["layout"])
                for name, array in arrays.items()
            }
            loaded = load(folder, target, backend, threads=case["threads"])
            for name, array in arrays.items():
                expected = cut_out(array, wanted[name][backend.rank])
                assert values_of(target[name]).tobytes() == expected.tobytes(), name
            return loaded

        reports = fc.launch(main, world_size=ranks, transport="sim")
        whole = read(folder)
    for name, array in arrays.items():
        assert whole[name].dtype == array.dtype
        assert whole[name].shape == array.shape
        assert whole[name].tobytes() == array.tobytes()
    needed = sum(array.nbytes for array in arrays.values())
    assert sum(each.bytes_needed for each in reports) == needed
    assert sum(each.bytes_read for each in reports) <= 1.02 * needed
