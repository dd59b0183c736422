"""Ranks whose device is a GPU of the stand-in, and what they hold of arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.ckpt_make import Cut

import fsdpcore as fc
from fsdpcore.core.geometry.regions import Box, Range, Region

Array = NDArray[Any]


def on_host(ranks: int, body: Callable[[fc.Backend], Any]) -> list[Any]:
    return fc.launch(body, world_size=ranks, transport="sim")


def on_gpus(ranks: int, body: Callable[[fc.Backend], Any]) -> list[Any]:
    """Run ranks whose messages are simulated and whose arrays may be on a GPU each."""
    from fsdpcore.transports.nccl.cuda_device import CudaDevice

    def main(backend: fc.Backend) -> Any:
        device = CudaDevice(backend.rank, lambda: None)
        device.use()
        backend.root.device = device
        return body(backend)

    return on_host(ranks, main)


def part(array: Array, region: Region) -> Any:
    """What a rank has of an array, in memory of its own that is not contiguous for a box."""
    if isinstance(region, Range):
        flat = array.reshape(-1)[region.start : region.stop].copy()
        pieces = [fc.ArrayPiece(region.start, region.stop, flat)] if flat.size else []
        return fc.ShardedArray(array.shape, array.dtype, tuple(pieces))
    index = tuple(map(slice, region.start, region.stop))
    return fc.checkpoint.BoxShard(array.shape, region.start, np.asarray(array.copy()[index]))


def rank_part(array: Array, cut: str, rank: int, ranks: int) -> Any:
    """A rank's share: "whole", "flat", or an axis, as in "axis 1"."""
    if cut == "whole":
        return array.copy()
    total = array.size if cut == "flat" else array.shape[int(cut.split()[1])]
    low, high = (total * each // ranks for each in (rank, rank + 1))
    if cut == "flat":
        return part(array, Range(low, high))
    axis = int(cut.split()[1])
    start, stop = [0] * array.ndim, list(array.shape)
    start[axis], stop[axis] = low, high
    return part(array, Box(tuple(start), tuple(stop)))


def moved(shard: Any, move: Callable[[Any], Any]) -> Any:
    """The same share with arrays elsewhere."""
    if isinstance(shard, fc.ShardedArray):
        pieces = tuple(each._replace(array=move(each.array)) for each in shard.pieces)
        return replace(shard, pieces=pieces)
    if isinstance(shard, fc.checkpoint.BoxShard):
        return fc.checkpoint.BoxShard(shard.shape, shard.start, move(shard.array))
    return move(shard)


def strided(xp: Any, array: Array) -> Any:
    """A copy on a device, which is not contiguous where there is an axis to step over."""
    if array.ndim < 2:
        return xp.asarray(array)
    room = xp.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    view = room[..., ::2]
    view[...] = xp.asarray(array)
    return view


def cut_of(region: Region) -> Cut:
    """The same as ``ckpt_make`` has it."""
    kind = "range" if isinstance(region, Range) else "box"
    return kind, region.start, region.stop


def check_parts(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise unless all shares have the same bits, wherever those of ``state`` are."""
    for name, shard in expected.items():
        host = moved(state[name], lambda x: x if isinstance(x, np.ndarray) else x.get())
        have = fc.checkpoint.memory.shards.parts_of(host)
        want = fc.checkpoint.memory.shards.parts_of(shard)
        assert len(have) == len(want), name
        for one, other in zip(have, want, strict=True):
            assert one.array.tobytes() == other.array.tobytes(), name
