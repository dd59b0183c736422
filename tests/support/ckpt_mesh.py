"""What the ranks of a mesh have of whole arrays, by definition: no engine, no code of ours.

A parameter is cut along one axis over the ranks ``tensor``, or whole on each of them. What such a
rank has of all arrays of a buffer lies one behind the other, and is cut into equal shares over the
ranks ``shard``; the ranks ``replicate`` have copies of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fsdpcore as fc
from fsdpcore.core.geometry.boxes import ArrayBox

Array = NDArray[Any]


@dataclass(frozen=True)
class Cut:
    """Along which axis an array is cut, and where: from the first bound, 0, to the extent."""

    axis: int
    bounds: tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """A mesh and how arrays lie on it; row-major in the order of the fields.

    Attributes:
        replicate, shard, tensor: sizes of the axes.
        cuts: of the arrays that are not whole on every tensor rank.
        buffers: names of the arrays that lie in a buffer together; by default all in one.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    buffers: tuple[tuple[str, ...], ...] = ()

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.tensor


def even(extent: int, parts: int) -> tuple[int, ...]:
    """Bounds of parts of which the first ones are longer by one."""
    return tuple(
        sum(extent // parts + (i < extent % parts) for i in range(k)) for k in range(parts + 1)
    )


def state_of(arrays: Mapping[str, Array], grid: Grid, rank: int) -> dict[str, fc.ShardedArray]:
    """What a rank has, in memory of its own."""
    replica, shard, tensor = map(
        int, np.unravel_index(rank, (grid.replicate, grid.shard, grid.tensor))
    )
    found: dict[str, fc.ShardedArray] = {}
    for names in grid.buffers or (tuple(arrays),):
        boxes = {name: box_of(arrays[name].shape, grid.cuts.get(name), tensor) for name in names}
        share = -(-sum(box.size for box in boxes.values()) // grid.shard)
        offset = 0
        for name, box in boxes.items():
            array = arrays[name]
            start = min(max(shard * share - offset, 0), box.size)
            stop = min(max((shard + 1) * share - offset, 0), box.size)
            mine = array[box.slices].reshape(-1)[start:stop].copy()
            pieces = (fc.ArrayPiece(start, stop, mine),) if stop > start else ()
            cut = name in grid.cuts
            found[name] = fc.ShardedArray(
                array.shape,
                array.dtype,
                pieces,
                replica if cut else tensor * grid.replicate + replica,
                grid.replicate if cut else grid.tensor * grid.replicate,
                box if cut else None,
            )
            offset += box.size
    return found


def box_of(shape: tuple[int, ...], cut: Cut | None, tensor: int) -> ArrayBox:
    start, extent = [0] * len(shape), list(shape)
    if cut is not None:
        start[cut.axis] = cut.bounds[tensor]
        extent[cut.axis] = cut.bounds[tensor + 1] - cut.bounds[tensor]
    return ArrayBox(shape, tuple(start), tuple(extent))


def room_for(arrays: Mapping[str, Array], grid: Grid, rank: int) -> dict[str, fc.ShardedArray]:
    """The same with all bits set, to be filled."""
    state = state_of(arrays, grid, rank)
    for shard in state.values():
        for piece in shard.pieces:
            piece.array.view(np.uint8)[...] = 255
    return state


def check_filled(
    arrays: Mapping[str, Array], grid: Grid, rank: int, state: Mapping[str, Any]
) -> None:
    """Every element of a rank is that of the whole array."""
    for name, wanted in state_of(arrays, grid, rank).items():
        found = state[name]
        assert [piece[:2] for piece in found.pieces] == [piece[:2] for piece in wanted.pieces]
        for one, other in zip(found.pieces, wanted.pieces, strict=True):
            assert one.array.tobytes() == other.array.tobytes(), (name, rank)


def check_whole(arrays: Mapping[str, Array], found: Mapping[str, Array]) -> None:
    """These are the whole arrays, bit by bit."""
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


def save_on(path: Any, arrays: Mapping[str, Array], grid: Grid, step: int = 1) -> None:
    """Save on threads."""

    def body(backend: fc.Backend) -> None:
        fc.checkpoint.save(path, state_of(arrays, grid, backend.rank), backend, step=step)

    fc.launch(body, world_size=grid.ranks, transport="sim", timeout=30)


def load_on(path: Any, arrays: Mapping[str, Array], grid: Grid) -> Sequence[Any]:
    """Load on threads, and compare; return the reports."""

    def body(backend: fc.Backend) -> Any:
        state = room_for(arrays, grid, backend.rank)
        loaded = fc.checkpoint.load(path, state, backend)
        check_filled(arrays, grid, backend.rank, state)
        return loaded

    return fc.launch(body, world_size=grid.ranks, transport="sim", timeout=30)
