"""What has to be read of which stored piece, and where each byte belongs. Nothing is read here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fsdpcore.checkpoint.format.stored import StoredTensor
from fsdpcore.checkpoint.memory.shards import Part
from fsdpcore.checkpoint.plan.catalog import Catalog
from fsdpcore.checkpoint.plan.copies import copies, placed
from fsdpcore.checkpoint.plan.strided import Strided
from fsdpcore.core.buffers import Array, byte_view
from fsdpcore.core.geometry.region_table import Ints
from fsdpcore.core.geometry.regions import (
    Box,
    Region,
    as_range,
    boxes_of,
    intersect,
    missing_elements,
)


class WantedPart(NamedTuple):
    """A part of a stored tensor, by its number, and the array that it goes to."""

    tensor: int
    part: Part


class Scatter(NamedTuple):
    """Elements of a piece that do not go straight to where they belong.

    Attributes:
        piece: its number in the catalog.
        cut: which elements.
        target: where they go: an array of the shape of ``cut``, of any strides; of another dtype
            where values are to be rounded.
    """

    piece: int
    cut: Strided
    target: Array


@dataclass(frozen=True)
class ReadPlan:
    """What one rank needs.

    Attributes:
        rows: int64 of shape (n, 5): piece, first and last byte of it, number of the target, byte
            of the target; these bytes are the same in file and memory.
        targets: flat, in bytes.
        scatters: the rest, in ascending order of pieces.
        needed: bytes of the checkpoint that this rank needs.
        uncovered: positions in ``wanted`` of what is not stored in full.
    """

    rows: Ints
    targets: list[memoryview]
    scatters: list[Scatter]
    needed: int
    uncovered: list[int]


def is_covered(tensor: StoredTensor, region: Region | None = None) -> bool:
    """Whether all elements of a region are stored, or all there are."""
    if not tensor.missing:
        return True
    stored = [piece.region for piece in tensor.pieces]
    return region is not None and not missing_elements(region, stored, tensor.shape)


def plan_reads(catalog: Catalog, wanted: Sequence[WantedPart]) -> ReadPlan:
    """Find what to read for ``wanted``, none of which is empty.

    Arrays that are C-contiguous and have the dtype of the file are read in place.
    """
    targets: list[memoryview] = []
    direct: list[tuple[int, int, int]] = []  # position, and interval on the line
    scatters: list[Scatter] = []
    rows: list[tuple[int, int, int, int, int]] = []
    covered = np.zeros(len(wanted), np.int64)
    bases: list[int] = catalog.base.tolist()
    flat: list[bool] = catalog.flat.tolist()
    for position, (number, part) in enumerate(wanted):
        tensor = catalog.tensors[number]
        array = part.array
        plain = array.dtype == tensor.dtype and array.flags.c_contiguous
        targets.append(_bytes(array) if plain else memoryview(b""))
        run = as_range(part.region, tensor.shape) if plain and flat[number] else None
        if run is not None:
            size = tensor.dtype.itemsize
            start = bases[number] + run.start * size
            direct.append((position, start, start + run.size * size))
            continue
        for piece, cuts in _cuts(catalog, number, part):
            covered[position] += sum(cut.target.size for cut in cuts) * tensor.dtype.itemsize
            if plain and len(cuts) == 1 and _dense(cuts[0]):
                cut = cuts[0].cut
                dst = _address(cuts[0].target) - _address(array)
                rows.append((piece, cut.start, cut.stop, position, dst))
            else:
                scatters += cuts
    matched = _match(catalog, np.array(direct, np.int64).reshape(-1, 3))
    np.add.at(covered, matched[:, 3], matched[:, 2] - matched[:, 1])
    every = np.concatenate([np.array(rows, np.int64).reshape(-1, 5), matched])
    every = every[np.lexsort((every[:, 1], every[:, 0]))]
    scatters.sort(key=lambda each: each.piece)
    full = [catalog.tensors[n].dtype.itemsize * part.array.size for n, part in wanted]
    lacking = [position for position, nbytes in enumerate(full) if covered[position] != nbytes]
    return ReadPlan(every, targets, scatters, int(covered.sum()), lacking)


def _match(catalog: Catalog, direct: Ints) -> Ints:
    """Intersect intervals of the line with the pieces; return rows of a ``ReadPlan``."""
    position, start, stop = direct.T
    # Of the runs that begin before, which do not overlap, just the last can end behind.
    first = np.searchsorted(catalog.starts, start, "right")
    before = np.flatnonzero(first)
    first[before] -= _stops(catalog, first[before] - 1) > start[before]
    last = np.searchsorted(catalog.starts, stop, "left")
    counts = np.maximum(last - first, 0)
    which = np.repeat(np.arange(len(direct)), counts)
    within = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    run = np.repeat(first, counts) + within
    low = np.maximum(catalog.starts[run], start[which])
    high = np.minimum(_stops(catalog, run), stop[which])
    origin = catalog.starts[run]
    return np.stack(
        [catalog.pieces[run], low - origin, high - origin, position[which], low - start[which]],
        axis=1,
    )


def _stops(catalog: Catalog, runs: Ints) -> Ints:
    stops: Ints = catalog.starts[runs] + catalog.nbytes[catalog.pieces[runs]]
    return stops


def _cuts(catalog: Catalog, number: int, part: Part) -> Iterator[tuple[int, list[Scatter]]]:
    """Give for each piece of a tensor what ``part`` needs of it."""
    tensor = catalog.tensors[number]
    pieces = catalog.pieces_of(number)
    for place in catalog.near(number, part.region).tolist():
        stored = tensor.pieces[place].region
        cuts = list(_pairs(tensor.shape, stored, part, tensor.dtype.itemsize))
        if cuts:
            piece = pieces[place]
            yield piece, [Scatter(piece, cut, target) for cut, target in cuts]


def _pairs(
    shape: tuple[int, ...], stored: Region, part: Part, itemsize: int
) -> Iterator[tuple[Strided, Array]]:
    array = part.array
    if array.flags.c_contiguous or array.ndim == 1:
        flat = array.reshape(-1)  # of one axis: a view in any case
        step = flat.strides[0]
        for copy in copies(shape, stored, part.region):
            target = np.lib.stride_tricks.as_strided(
                flat[copy.dst :],
                copy.shape,
                tuple(stride * step for stride in copy.dst_strides),
            )
            yield Strided(itemsize, copy.src, copy.shape, copy.src_strides), target
        return
    # Its axes can not be merged: box by box, as they are.
    assert isinstance(part.region, Box)
    origin, strides = placed(stored, shape)
    for box in boxes_of(stored, shape):
        common = intersect(box, part.region)
        if common is None:
            continue
        src = sum(i * stride for i, stride in zip(common.start, strides, strict=True)) - origin
        index = tuple(
            slice(low - begin, high - begin)
            for low, high, begin in zip(common.start, common.stop, part.region.start, strict=True)
        )
        yield Strided(itemsize, src, common.shape, strides), array[index]


def _dense(scatter: Scatter) -> bool:
    """Whether elements lie one behind the other, both in the piece and in memory."""
    cut = scatter.cut
    return (len(cut.shape) == 1 and cut.strides == (1,)) and scatter.target.flags.c_contiguous


def _bytes(array: Array) -> memoryview:
    return byte_view(array).data


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
