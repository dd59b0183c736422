"""Saves and loads without a backend: any cut to any other, against whole arrays in memory."""

from __future__ import annotations

import math
import tempfile
from itertools import pairwise

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.ckpt_regions import mask, shapes

from fsdpcore.checkpoint import BoxShard
from fsdpcore.checkpoint.load.distributed import load_distributed, reshard
from fsdpcore.checkpoint.plan.shard_specs import (
    ShardMetadata,
    TensorShardSpec,
    flat_shard_metadata,
    flat_shard_sizes,
)
from fsdpcore.checkpoint.save.distributed import save_distributed
from fsdpcore.core.geometry.regions import Box, Range
from fsdpcore.fsdp.state.state import ArrayPiece, ShardedArray

SETTINGS = settings(
    deadline=None,
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
DTYPES = [np.dtype(d) for d in ("f4", "f8", "?", "i1", "u8", "c16", ml_dtypes.bfloat16)]
RANKS = st.integers(1, 5)


@st.composite
def _arrays(draw):
    count = draw(st.integers(0, 5))
    arrays = {}
    for number in range(count):
        shape, dtype = draw(shapes()), draw(st.sampled_from(DTYPES))
        rng = np.random.default_rng(number)
        nbytes = math.prod(shape) * dtype.itemsize
        data = rng.integers(0, 2 if dtype.kind == "b" else 256, nbytes, np.uint8)
        arrays[f"array {number}"] = data.view(dtype).reshape(shape)
    return arrays


def _regions(draw, shape, ranks):
    """Cut an array among ranks: replicas, ranges in turns, or boxes along an axis."""
    size = math.prod(shape)
    kinds = ["replicas", "ranges"] + (["boxes"] if shape else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "replicas":
        return [(Range(0, size),)] * ranks
    if kind == "ranges":
        cuts = sorted(draw(st.lists(st.integers(0, size), max_size=2 * ranks)))
        found = [[] for _ in range(ranks)]
        for start, stop in pairwise([0, *cuts, size]):
            found[draw(st.integers(0, ranks - 1))].append(Range(start, stop))
        return [tuple(each) for each in found]
    axis = draw(st.integers(0, len(shape) - 1))
    cuts = sorted(
        draw(st.lists(st.integers(0, shape[axis]), min_size=ranks - 1, max_size=ranks - 1))
    )
    ends = [0, *cuts, shape[axis]]
    zero = (0,) * len(shape)
    return [
        (
            Box(
                (*zero[:axis], start, *zero[axis + 1 :]),
                (*shape[:axis], stop, *shape[axis + 1 :]),
            ),
        )
        for start, stop in pairwise(ends)
    ]


@st.composite
def _layouts(draw, arrays):
    ranks = draw(RANKS)
    if draw(st.booleans()):
        return flat_shard_metadata(
            {name: array.shape for name, array in arrays.items()},
            {name: array.dtype for name, array in arrays.items()},
            ranks,
            step=3,
            save_id="s",
        )
    cut = {name: _regions(draw, array.shape, ranks) for name, array in arrays.items()}
    specs = [
        tuple(
            TensorShardSpec(name, array.dtype, array.shape, cut[name][rank])
            for name, array in arrays.items()
        )
        for rank in range(ranks)
    ]
    return ShardMetadata(3, ranks, "s", tuple(specs), {"told": [1, None]})


@st.composite
def _cases(draw):
    arrays = draw(_arrays())
    layout = draw(_layouts(arrays))
    order = draw(st.permutations(range(layout.world_size)))
    return arrays, layout, order, draw(_layouts(arrays)), draw(RANKS), draw(st.integers(0, 2))


def state_of(arrays, layout, rank, form):
    """What a rank has, as shards, or as plain arrays where that is possible."""
    state = {}
    for spec in layout.shards[rank]:
        full = arrays[spec.name]
        if spec.regions and isinstance(spec.regions[0], Box):
            (box,) = spec.regions
            part = full[tuple(map(slice, box.start, box.stop))]
            state[spec.name] = part if form else BoxShard(full.shape, box.start, part)
            continue
        parts = [full.reshape(-1)[each.start : each.stop] for each in spec.regions]
        if form == 0 or not parts:
            pieces = [
                ArrayPiece(each.start, each.stop, part)
                for each, part in zip(spec.regions, parts, strict=True)
            ]
            state[spec.name] = ShardedArray(full.shape, full.dtype, tuple(pieces))
        elif form == 1 and spec.regions == (Range(0, full.size),):
            state[spec.name] = full
        else:
            state[spec.name] = np.concatenate(parts)
    return state


def check_loaded(states, arrays, layout):
    """All ranks together have every element, each where the layout says, with the right bytes."""
    for rank, state in enumerate(states):
        assert set(state) == set(arrays)
        regions = {spec.name: spec.regions for spec in layout.shards[rank]}
        for name, shard in state.items():
            full = arrays[name]
            assert shard.shape == full.shape
            wanted = np.zeros(full.shape, bool)
            for region in regions.get(name, ()):
                wanted |= mask(region, full.shape)
            parts = [shard.array] if isinstance(shard, BoxShard) else [p[2] for p in shard.pieces]
            assert all(part.dtype == full.dtype for part in parts)
            assert b"".join(part.tobytes() for part in parts) == full[wanted].tobytes()


@SETTINGS
@given(_cases())
def test_every_rank_of_any_cut_gets_its_bytes_of_any_other(case):
    arrays, layout, order, wanted, ranks, form = case
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/checkpoint"
        done = [
            save_distributed(state_of(arrays, layout, rank, form), path, rank, len(order), layout)
            for rank in order
        ]
        assert done == [False] * (len(order) - 1) + [True]
        loaded = [
            load_distributed(path, r, wanted.world_size, layout=wanted, threads=1)
            for r in range(wanted.world_size)
        ]
        check_loaded([state for state, _ in loaded], arrays, wanted)
        flat = [load_distributed(path, rank, ranks) for rank in range(ranks)]
        found = flat[0][1]
        assert (found.step, found.save_id, found.extra) == (3, "s", layout.extra)
        check_loaded([state for state, _ in flat], arrays, found)
        again = [reshard(path, len(order), ranks, rank) for rank in range(ranks)]
        check_loaded(again, arrays, found)


@SETTINGS
@given(_arrays(), RANKS)
def test_flat_shards_are_equal_cuts_of_one_buffer_for_each_dtype(arrays, ranks):
    metadata = flat_shard_metadata(
        {name: array.shape for name, array in arrays.items()},
        {name: array.dtype for name, array in arrays.items()},
        ranks,
        step=0,
        save_id="s",
    )
    assert list(metadata.arrays) == list(arrays)
    for dtype in {array.dtype for array in arrays.values()}:
        own = {name: array for name, array in arrays.items() if array.dtype == dtype}
        buffer = np.concatenate([array.reshape(-1) for array in own.values()])
        shards = [
            [
                arrays[spec.name].reshape(-1)[region.start : region.stop]
                for spec in metadata.shards[rank]
                if spec.dtype == dtype
                for region in spec.regions
            ]
            for rank in range(ranks)
        ]
        sizes = [sum(map(len, each)) for each in shards]
        assert sizes == flat_shard_sizes(len(buffer), ranks)
        flat = [part for each in shards for part in each]
        assert b"".join(part.tobytes() for part in flat) == buffer.tobytes()


@SETTINGS
@given(st.integers(0, 200), st.integers(1, 20))
def test_shard_sizes_follow_the_rule_of_the_engine(total, ranks):
    sizes = flat_shard_sizes(total, ranks)
    assert len(sizes) == ranks
    assert sum(sizes) == total
    assert sizes == sorted(sizes, reverse=True)
    share = math.ceil(total / ranks)
    full = total // share if share else 0
    assert sizes[:full] == [share] * full
    assert sum(sizes[full + 1 :]) == 0
