"""Checkpoint metadata for tests: small examples, random ones, and a slow judge of what they say."""

from __future__ import annotations

import base64
import json
import math
import zlib
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from fsdpcore.checkpoint.format.metadata import Metadata, StoredFile, make_metadata
from fsdpcore.core.geometry.regions import Box, Range, Region

HEADER = 128
ITEMSIZES = {"float32": 4, "bfloat16": 2, "complex128": 16, "bool": 1, "float8_e4m3fn": 1}

Arrays = dict[str, tuple[str, tuple[int, ...]]]
Cuts = dict[str, list[Region]]


def described(
    arrays: Arrays, cuts: Cuts, files: int = 2, block_bytes: int = 64, **more: Any
) -> Metadata:
    """Describe a save in which the pieces of the arrays go to the files in turn."""
    ends = [HEADER] * files
    blocks = [0] * files
    pieces = []
    for number, (name, region) in enumerate((n, r) for n, each in cuts.items() for r in each):
        file = number % files
        nbytes = region.size * ITEMSIZES[arrays[name][0]]
        pieces.append((name, region, file, ends[file]))
        ends[file] += nbytes
        blocks[file] += math.ceil(nbytes / block_bytes)
    stored = [
        StoredFile(f"rank_{k}.safetensors", end + 8 * count, HEADER, end, 11 * k, 2**64 - 1 - k)
        for k, (end, count) in enumerate(zip(ends, blocks, strict=True))
    ]
    about = {"save_id": "5f0c", "step": 30, "world_size": 2, "created": "2026-01-02", **more}
    return make_metadata(
        files=stored, arrays=arrays, pieces=pieces, block_bytes=block_bytes, **about
    )


def told_v1(made: Metadata) -> dict[str, Any]:
    """Return metadata as version 1 had it, with a list for every piece."""
    told = json.loads(made.to_bytes())
    told["version"] = 1
    del told["pieces"]
    told["files"] = [row[:6] for row in told["files"]]
    for name, tensor in made.tensors.items():
        rows: list[list[Any]] = []
        for piece in tensor.pieces:
            start, stop = piece.region.start, piece.region.stop
            bounds = [start, stop] if isinstance(start, int) else [list(start), list(stop)]  # type: ignore[call-overload]
            rows.append([piece.file, piece.offset, *bounds])
        told["tensors"][name].append(rows)
    return told


def packed(numbers: list[int]) -> str:
    """Write numbers as version 2 may, with nothing of it."""
    data = b"".join(each.to_bytes(8, "little", signed=True) for each in numbers)
    return "8" + base64.b64encode(zlib.compress(data)).decode()


def numbers_of(text: str) -> list[int]:
    """Read numbers of version 2."""
    width, data = int(text[0]), zlib.decompress(base64.b64decode(text[1:]))
    return [
        int.from_bytes(data[at : at + width], "little", signed=True)
        for at in range(0, len(data), width)
    ]


def example() -> Metadata:
    """Everything that metadata can have: ranges, boxes, what is empty, 0-d or not all there."""
    arrays: Arrays = {
        "w": ("float32", (6, 5)),
        "optimizer/exp_avg/wé\n\U0001f600": ("bfloat16", (4, 4)),
        "": ("complex128", ()),
        "none": ("bool", (3, 0)),
        "part": ("float8_e4m3fn", (100,)),
    }
    names = list(arrays)
    cuts: Cuts = {
        names[0]: [Range(0, 7), Range(7, 30)],
        names[1]: [Box((0, 0), (4, 1)), Box((0, 1), (2, 4)), Box((2, 1), (4, 4))],
        names[2]: [Range(0, 1)],
        names[4]: [Range(90, 100), Range(5, 75)],
    }
    return described(
        arrays,
        cuts,
        info={"format": 1, "step": 30, "loss_scale": None},
        extra={"data": [1, 2.5, True, {"at": "ü"}], "big": 2**200},
        ranks=[{"seed": 1}, None],
        metrics={"loss": 1.5, "accuracy": 0.25},
    )


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@st.composite
def cuts_of(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """Some disjoint parts of an array: ranges, or slabs along one axis; not all of it, maybe."""
    size = math.prod(shape)
    if not size:
        return []
    axis = draw(st.integers(-1, len(shape) - 1))
    extent = size if axis < 0 else shape[axis]
    bounds = sorted(draw(st.sets(st.integers(0, extent), min_size=2, max_size=5)))
    regions: list[Region] = []
    for start, stop in pairwise(bounds):
        if axis < 0:
            regions.append(Range(start, stop))
        else:
            low, high = [0] * len(shape), list(shape)
            low[axis], high[axis] = start, stop
            regions.append(Box(tuple(low), tuple(high)))
    kept = draw(st.lists(st.booleans(), min_size=len(regions), max_size=len(regions)))
    return draw(st.permutations([r for r, keep in zip(regions, kept, strict=True) if keep]))


@st.composite
def metadata(draw: st.DrawFn) -> Metadata:
    """Draw metadata of anything that can be saved."""
    shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
    arrays: Arrays = draw(
        st.dictionaries(
            st.text(max_size=6), st.tuples(st.sampled_from(list(ITEMSIZES)), shapes), max_size=5
        )
    )
    cuts: Cuts = {name: draw(cuts_of(shape)) for name, (_, shape) in arrays.items()}
    return described(
        arrays,
        cuts,
        files=draw(st.integers(1, 3)),
        block_bytes=draw(st.integers(1, 100)),
        info=draw(st.dictionaries(st.text(max_size=4), json_values, max_size=3)),
        extra=draw(json_values),
        ranks=draw(st.lists(json_values, min_size=2, max_size=2)),
        metrics=draw(
            st.dictionaries(
                st.text(max_size=4), st.floats(allow_nan=False, allow_infinity=False), max_size=3
            )
        ),
    )


def elements(region: Region, shape: tuple[int, ...]) -> set[int]:
    """Return the elements of a region, one by one."""
    if isinstance(region, Range):
        return set(range(region.start, region.stop))
    found = {0}
    for extent, start, stop in zip(shape, region.start, region.stop, strict=True):
        found = {each * extent + index for each in found for index in range(start, stop)}
    return found


def assert_sound(metadata: Metadata, limit: int = 10_000) -> None:
    """Check with sets of bytes and elements what the format promises; only where those are few."""
    bytes_of: list[list[tuple[int, int, int]]] = [[] for _ in metadata.files]
    for name, tensor in metadata.tensors.items():
        assert tensor.name == name
        seen: set[int] = set()
        for piece in tensor.pieces:
            assert piece.nbytes == piece.region.size * tensor.dtype.itemsize > 0
            bytes_of[piece.file].append((piece.offset, piece.nbytes, piece.block))
            if math.prod(tensor.shape) <= limit:
                mine = elements(piece.region, tensor.shape)
                assert len(mine) == piece.region.size
                assert not mine & seen
                assert all(0 <= each < math.prod(tensor.shape) for each in mine)
                seen |= mine
    for file, spans in zip(metadata.files, bytes_of, strict=True):
        at, block = file.data_start, 0
        for offset, nbytes, first in sorted(spans):
            assert (offset, first) == (at, block)
            at += nbytes
            block += math.ceil(nbytes / metadata.block_bytes)
        assert at == file.table
        assert block == file.blocks
        assert file.table + 8 * block == file.size
        assert "/" not in file.name
        assert not file.name.startswith(".")
