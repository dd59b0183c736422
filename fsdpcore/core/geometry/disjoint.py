"""Whether the regions of many arrays overlap, asked for all arrays at once."""

from __future__ import annotations

import numpy as np

from fsdpcore.core.geometry.overlaps import overlapping_coordinates
from fsdpcore.core.geometry.region_table import (
    Column,
    Ints,
    RegionTable,
    ShapeTable,
    stretches,
)
from fsdpcore.core.geometry.regions import boxes_of

_MOST = 2**63 - 1


def overlapping(groups: Column, regions: RegionTable, arrays: Column, shapes: ShapeTable) -> Ints:
    """Return the groups in which two regions share an element, ascending.

    Takes O(n log n) time for n regions where those of a group are runs of elements, or boxes that
    planes separate one cut after the other: grids, rows of columns, columns of rows.

    Args:
        groups: which regions are to be disjoint; those of a group are of the same array.
        regions: all of them, none misplaced.
        arrays: of which array each is.
        shapes: of the arrays.
    """
    order = np.argsort(groups, kind="stable")
    found = [np.empty(0, np.int64)]
    for part in stretches(groups[order]):
        which = order[part]
        mine = groups[which].astype(np.int64, copy=False)
        found.append(_overlapping(mine, regions.take(which), arrays[which], shapes))
    return np.unique(np.concatenate(found))


def _overlapping(groups: Ints, regions: RegionTable, arrays: Column, shapes: ShapeTable) -> Ints:
    first, sizes, run = regions.runs(arrays, shapes)
    with_gaps = np.isin(groups, groups[~run])
    found = [_of_runs(groups, first, sizes, np.flatnonzero(~with_gaps))]
    boxes = np.flatnonzero(with_gaps)
    if len(boxes):
        found.append(_of_boxes(groups[boxes], regions.take(boxes), arrays[boxes], shapes))
    return np.concatenate(found)


def _of_runs(groups: Ints, first: Ints, sizes: Ints, which: Ints) -> Ints:
    groups, first, sizes = groups[which], first[which], sizes[which]
    order = np.lexsort((first, groups))
    groups, first = groups[order], first[order]
    last = first + sizes[order]
    hit: Ints = groups[1:][(groups[1:] == groups[:-1]) & (first[1:] < last[:-1])]
    return hit


def _of_boxes(groups: Ints, regions: RegionTable, arrays: Column, shapes: ShapeTable) -> Ints:
    """Return the groups with overlaps, where some regions are no runs; ranges are cut to boxes."""
    found: list[Ints] = [np.empty(0, np.int64)]
    for axes in np.unique(shapes.axes[arrays]).tolist():
        mine = np.flatnonzero(shapes.axes[arrays] == axes)
        owners, starts, stops = [], [], []
        for kind, which, columns in regions.take(mine).kinds():
            if kind == axes:
                owners.append(groups[mine[which]])
                starts.append(columns[:axes].T)
                stops.append(columns[axes:].T)
                continue
            for each in mine[which].tolist():
                boxes = boxes_of(regions[each], shapes.shapes[int(arrays[each])])
                owners.append(np.full(len(boxes), groups[each]))
                starts.append(np.array([box.start for box in boxes], np.int64))
                stops.append(np.array([box.stop for box in boxes], np.int64))
        found.append(_unseparated(*map(np.concatenate, (owners, starts, stops))))
    return np.concatenate(found)


def _unseparated(groups: Ints, starts: Ints, stops: Ints) -> Ints:
    """Return the groups with boxes that share elements."""
    parts = _apart(groups, starts, stops)
    order = np.argsort(parts, kind="stable")
    bounds = np.flatnonzero(np.diff(parts[order], prepend=-1, append=-1))
    begins, counts = bounds[:-1], np.diff(bounds)
    several = counts > 1
    found = []
    for begin, count in zip(begins[several].tolist(), counts[several].tolist(), strict=True):
        mine = order[begin : begin + count]
        if overlapping_coordinates(starts[mine], stops[mine]) is not None:
            found.append(int(groups[mine[0]]))
    return np.array(found, np.int64)


def _apart(groups: Ints, starts: Ints, stops: Ints) -> Ints:
    """Return parts of the groups: boxes of different parts are separated by planes.

    A part is cut by all planes at once that cut none of its boxes, along one axis after the other,
    until there are no such planes any more.
    """
    parts = np.unique(groups, return_inverse=True)[1].astype(np.int64)
    axes = starts.shape[1]
    reach = int(stops.max(initial=0)) + 1
    if reach * (len(parts) + 1) > _MOST:
        return parts
    left, idle, axis = np.arange(len(parts)), 0, 0  # boxes that are not alone in their part
    while idle < axes and len(left):
        mine = parts[left]
        order = np.lexsort((starts[left, axis], mine))
        mine = mine[order]
        # Behind one another on one line, each part on a stretch of its own.
        number = np.cumsum(np.diff(mine, prepend=mine[0]) != 0)
        shift = number * reach
        begins = starts[left, axis][order] + shift
        ends = np.maximum.accumulate(stops[left, axis][order] + shift)
        cut = np.ones(len(left), np.bool_)
        cut[1:] = (begins[1:] >= ends[:-1]) | (mine[1:] != mine[:-1])
        count = int(np.count_nonzero(cut))
        idle = idle + 1 if count == int(number[-1]) + 1 else 0
        numbers = np.cumsum(cut) + int(parts.max())
        parts[left[order]] = numbers
        alone = cut & np.append(cut[1:], True)
        left = left[order[~alone]]
        axis = (axis + 1) % axes
    return parts
