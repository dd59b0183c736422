"""The arrays of one rank, brought together with the specs that say what they are."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from fsdpcore.checkpoint.memory.shards import Shard, dtype_of, parts_of
from fsdpcore.checkpoint.plan.shard_specs import ShardMetadata, TensorShardSpec
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.boxes import BoxShard
from fsdpcore.core.geometry.regions import Box, Region, as_range
from fsdpcore.fsdp.state.state import ShardedArray


def sources_of(state: Mapping[str, Shard], metadata: ShardMetadata, rank: int) -> list[Array]:
    """Return the elements of all regions of a rank, in the order of its specs; views if possible.

    Args:
        state: the rank's part of every array, see ``save_distributed``.
        metadata: of the save.
        rank: which rank's.

    Raises:
        ArgumentError: the state is not what the metadata says.
    """
    specs = {spec.name: spec for spec in metadata.shards[rank]}
    for name in state:
        if name not in metadata.arrays:
            raise ArgumentError(f"the state has {name!r:.80}, which the metadata does not name")
        if name not in specs:
            specs[name] = TensorShardSpec(name, *metadata.arrays[name])
    sources: list[Array] = []
    for name, spec in specs.items():
        if name in state:
            sources += _matched(spec, state[name], rank)
        elif spec.regions:
            raise ArgumentError(
                f"the state lacks {name!r:.80}, of which rank {rank} has {spec.size} elements by "
                "the metadata"
            )
    return sources


def _matched(spec: TensorShardSpec, shard: Shard, rank: int) -> list[Array]:
    """Return the elements of each region of a spec."""
    what = f"{spec.name!r:.80} on rank {rank}"
    if dtype_of(shard).newbyteorder("=") != spec.dtype:
        raise ArgumentError(
            f"{what} has dtype {dtype_of(shard)} in the state, but {spec.dtype} in the metadata"
        )
    arrays: list[Array] = []
    wanted = spec.parts
    if isinstance(shard, (ShardedArray, BoxShard)):
        parts = parts_of(shard)
        theirs = [_canonical(part.region, shard.shape) for part in parts]
        ours = [_canonical(region, spec.shape) for region in wanted]
        if shard.shape == spec.shape and theirs == ours:
            arrays = [part.array for part in parts]
    elif len(wanted) == 1 and shard.shape in _shapes(spec):
        arrays = [shard]
    elif shard.shape == (spec.size,) and not (spec.box is None and _has_box(spec)):
        ends = np.cumsum([region.size for region in wanted])[:-1]
        arrays = np.split(shard, ends) if wanted else []
    if len(arrays) != len(wanted) or (not arrays and parts_of(shard)):
        raise ArgumentError(
            f"{what} is {_described(shard)} in the state, but by the metadata it is {wanted} of "
            f"shape {spec.shape}"
        )
    return [array.reshape(_shape(region)) for array, region in zip(arrays, wanted, strict=True)]


def _canonical(region: Region, shape: tuple[int, ...]) -> Region:
    return as_range(region, shape) or region


def _has_box(spec: TensorShardSpec) -> bool:
    return any(isinstance(region, Box) for region in spec.parts)


def _shapes(spec: TensorShardSpec) -> list[tuple[int, ...]]:
    """Return the shapes that a plain array may have which is the only region of a spec."""
    shapes = [_shape(spec.parts[0])]
    if spec.size == math.prod(spec.shape):
        shapes.append(spec.shape)
    if spec.box is not None and spec.size == spec.box.size:
        shapes.append(spec.box.shape)
    return shapes


def _shape(region: Region) -> tuple[int, ...]:
    return region.shape if isinstance(region, Box) else (region.size,)


def _described(shard: Shard) -> str:
    if isinstance(shard, (ShardedArray, BoxShard)):
        regions = tuple(part.region for part in parts_of(shard))
        return f"{regions} of shape {shard.shape}"
    return f"an array of shape {shard.shape}"
