"""How the arrays of a model lie on so many ranks, as each of them describes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from fsdpcore.checkpoint.plan.held import HeldArray, held_piece
from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.core.geometry.regions import Box, Range, Region, regions_inside

Shapes = Mapping[str, tuple[int, ...]]
Holding = Callable[[int], list[HeldArray]]

_PER_UNIT = 9
_TENSOR = 8  # ranks of tensor parallelism
_EXTENTS = [(1024, 1024)] * 4 + [(4096, 1024), (1024, 4096), (1024,), (1024,), (4096,)]


@dataclass(frozen=True)
class Layout:
    """Arrays on ranks.

    Attributes:
        name: of the layout.
        ranks, arrays: how many.
        holding: returns what a rank holds; arrays of which it has nothing are in it, as an engine
            describes them.
    """

    name: str
    ranks: int
    arrays: int
    holding: Holding


def layout(name: str, arrays: int, ranks: int) -> Layout:
    """Return the layout of that name, see ``LAYOUTS``."""
    return Layout(name, ranks, arrays, LAYOUTS[name](arrays, ranks))


def _shapes(arrays: int) -> dict[str, tuple[int, ...]]:
    return {
        f"blocks.{n // _PER_UNIT}.part{n % _PER_UNIT}.weight": _EXTENTS[n % _PER_UNIT]
        for n in range(arrays)
    }


def _units(shapes: Shapes, ranks: int) -> list[FlatLayout]:
    names = [list(shapes)[at : at + _PER_UNIT] for at in range(0, len(shapes), _PER_UNIT)]
    dtype = np.dtype(np.float32)
    return [FlatLayout.build({name: shapes[name] for name in each}, dtype, ranks) for each in names]


def _held(name: str, shape: tuple[int, ...], regions: list[Region]) -> HeldArray:
    pieces = tuple(held_piece(region, shape) for region in regions)
    return HeldArray(name, "float32", shape, pieces)


def _flat(arrays: int, ranks: int) -> Holding:
    """Units of nine arrays, each flat in equal shares on all ranks: ``full_shard``."""
    shapes = _shapes(arrays)
    units = _units(shapes, ranks)

    def holding(rank: int) -> list[HeldArray]:
        regions: dict[str, list[Region]] = {name: [] for name in shapes}
        for unit in units:
            for piece in unit.pieces(rank):
                regions[piece.name].append(Range(piece.param_start, piece.param_stop))
        return [_held(name, shapes[name], regions[name]) for name in shapes]

    return holding


def _tensor(arrays: int, ranks: int) -> Holding:
    """Matrices in columns or rows on 8 tensor ranks, their units flat on the others."""
    shapes = _shapes(arrays)

    def box(number: int, shape: tuple[int, ...], tensor: int) -> Box:
        if len(shape) == 1:
            return Box((0,), shape)  # a copy on each
        axis = number % 2
        share = shape[axis] // _TENSOR
        start, stop = [0, 0], list(shape)
        start[axis], stop[axis] = tensor * share, (tensor + 1) * share
        return Box(tuple(start), tuple(stop))

    boxes = [
        {name: box(n, shape, tensor) for n, (name, shape) in enumerate(shapes.items())}
        for tensor in range(_TENSOR)
    ]
    local = {name: each.shape for name, each in boxes[0].items()}
    units = _units(local, ranks // _TENSOR)

    def holding(rank: int) -> list[HeldArray]:
        data, tensor = divmod(rank, _TENSOR)
        regions: dict[str, list[Region]] = {name: [] for name in shapes}
        for unit in units:
            for piece in unit.pieces(data):
                run = Range(piece.param_start, piece.param_stop)
                outer = boxes[tensor][piece.name]
                regions[piece.name] += regions_inside(outer, run, shapes[piece.name])
        return [_held(name, shapes[name], regions[name]) for name in shapes]

    return holding


def _rows(arrays: int, ranks: int) -> Holding:
    """Matrices, of each of which every rank has some rows."""
    shapes = dict.fromkeys(_shapes(arrays), (2 * ranks, 64))

    def holding(rank: int) -> list[HeldArray]:
        box = Box((2 * rank, 0), (2 * rank + 2, 64))
        return [_held(name, shape, [box]) for name, shape in shapes.items()]

    return holding


LAYOUTS: Mapping[str, Callable[[int, int], Holding]] = {
    "flat": _flat,
    "tensor": _tensor,
    "rows": _rows,
}
