"""Parts of an array: boxes, and ranges of its elements in C order. Pure geometry, no data.

A sharded array is stored in pieces and asked for in pieces, each of them a region of the whole: a
``Box`` is what slices cut out (tensor parallelism), a ``Range`` is a run of the flattened array
(ZeRO). Coordinates are Python ints without a limit, so that nothing overflows, whatever a file
claims. ``check_region`` refuses others, ``as_region`` takes NumPy's from a caller; every function
here relies on regions that passed one of them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import ArgumentError, FsdpcoreError
from fsdpcore.core.geometry.overlaps import overlapping_boxes, overlapping_ranges


@dataclass(frozen=True, slots=True)
class Box:
    """The elements whose index along each axis is in ``[start, stop)``.

    Attributes:
        start: the first index along each axis; ``()`` for a 0-d array, whose only element it is.
        stop: the index behind the last one along each axis.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent along each axis."""
        return tuple(map(operator.sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Range:
    """Elements ``[start, stop)`` of the array flattened in C order.

    Attributes:
        start: the first element.
        stop: the element behind the last one.
    """

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


Region = Box | Range


def as_region(region: Region, shape: Sequence[int], what: str) -> Region:
    """Return a region that a caller has passed, with Python ints as bounds.

    Raises ArgumentError where ``check_region`` does, which it calls.
    """
    if type(region) is Range:
        region = Range(
            *(as_int(each, f"a bound of {what}") for each in (region.start, region.stop))
        )
    elif type(region) is Box and type(region.start) is type(region.stop) is tuple:
        region = Box(
            *(
                tuple(as_int(bound, f"a bound of {what}") for bound in bounds)
                for bounds in (region.start, region.stop)
            )
        )
    check_region(region, shape, what)
    return region


def check_region(
    region: Region,
    shape: Sequence[int],
    what: str,
    error: type[FsdpcoreError] = ArgumentError,
) -> None:
    """Raise ``error`` unless ``region`` is one of an array of ``shape``; it may be empty.

    Coordinates must be Python ints, not NumPy's, which would overflow. ``what`` are the words for
    the region in the message.
    """
    if type(region) is Range:
        if type(region.start) is not int or type(region.stop) is not int:
            raise error(f"{what} must have Python ints as bounds, got {region!r}")
        size = math.prod(shape)
        if not 0 <= region.start <= region.stop <= size:
            raise error(
                f"{what} is [{region.start}, {region.stop}) of the flattened array, which has "
                f"{size} elements; start and stop must ascend within it"
            )
    elif type(region) is Box:
        _check_box(region, tuple(shape), what, error)
    else:
        raise error(f"{what} must be a Box or a Range, got {region!r}")


def _check_box(box: Box, shape: tuple[int, ...], what: str, error: type[FsdpcoreError]) -> None:
    if type(box.start) is not tuple or type(box.stop) is not tuple:
        raise error(f"{what} must have tuples as start and stop, got {box!r}")
    if not all(type(bound) is int for bound in box.start + box.stop):
        raise error(f"{what} must have Python ints as bounds, got {box!r}")
    if not len(box.start) == len(box.stop) == len(shape):
        raise error(
            f"{what} has {len(box.start)} starts and {len(box.stop)} stops; an array of shape "
            f"{shape} needs {len(shape)} of each"
        )
    for axis, (start, stop, extent) in enumerate(zip(box.start, box.stop, shape, strict=True)):
        if not 0 <= start <= stop <= extent:
            raise error(
                f"{what} is [{start}, {stop}) along axis {axis} of an array of shape {shape}; "
                f"start and stop must ascend between 0 and {extent}"
            )


def whole(shape: Sequence[int]) -> Range:
    """Return the range of all elements of an array of ``shape``."""
    return Range(0, math.prod(shape))


def first_element(region: Region, shape: Sequence[int]) -> int:
    """Return the first element of a region, which is not empty, of the flattened array."""
    if isinstance(region, Range):
        return region.start
    found = 0
    for extent, start in zip(shape, region.start, strict=True):
        found = found * extent + start
    return found


def intersect(a: Box, b: Box) -> Box | None:
    """Return what two boxes of one array have in common, or None if that is nothing."""
    start = tuple(map(max, a.start, b.start))
    stop = tuple(map(min, a.stop, b.stop))
    for low, high in zip(start, stop, strict=True):
        if low >= high:
            return None
    return Box(start, stop)


def boxes_of(region: Region, shape: Sequence[int]) -> list[Box]:
    """Return disjoint boxes, none of them empty, that make up ``region``, in C order.

    A range of an array of ``n`` axes becomes at most ``max(1, 2 * n - 1)``: parts of a row, of a
    matrix of rows and so on before it is aligned to the outermost axis that it crosses, then whole
    rows of that axis, then the same downwards.
    """
    if region.size == 0:
        return []
    if isinstance(region, Box):
        return [region]
    first, last = _index(region.start, shape), _index(region.stop - 1, shape)
    axes = range(len(shape))
    cross = next((axis for axis in axes if first[axis] != last[axis]), len(shape) - 1)
    if cross < 0:
        return [Box((), ())]
    # The innermost axes along which the range begins, and ends, with a whole row.
    head = next((k for k in reversed(axes) if k > cross and first[k] != 0), cross)
    tail = next((k for k in reversed(axes) if k > cross and last[k] != shape[k] - 1), cross)
    boxes = [
        _rows(first, k, first[k] + (k != head), shape[k], shape) for k in range(head, cross, -1)
    ]
    boxes.append(
        _rows(first, cross, first[cross] + (head != cross), last[cross] + (tail == cross), shape)
    )
    boxes += [_rows(last, k, 0, last[k] + (k == tail), shape) for k in range(cross + 1, tail + 1)]
    return [box for box in boxes if box.size]


def _index(element: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of an element of the flattened array along each axis."""
    index = []
    for extent in reversed(shape):
        element, along = divmod(element, extent)
        index.append(along)
    return tuple(reversed(index))


def _rows(index: tuple[int, ...], axis: int, start: int, stop: int, shape: Sequence[int]) -> Box:
    """Return what has the index before ``axis``, ``[start, stop)`` along it, all behind it."""
    inner = tuple(shape[axis + 1 :])
    return Box(
        (*index[:axis], start, *(0 for _ in inner)),
        (*(i + 1 for i in index[:axis]), stop, *inner),
    )


def bounding_box(region: Region, shape: Sequence[int]) -> Box:
    """Return the smallest box around a region, which is not empty, of an array of ``shape``."""
    if isinstance(region, Box):
        return region
    first, last = _index(region.start, shape), _index(region.stop - 1, shape)
    start, stop = list(first), [index + 1 for index in last]
    for axis, (low, high) in enumerate(zip(first, last, strict=True)):
        if low != high:  # from one row to another: all that is within them
            start[axis + 1 :] = [0] * (len(shape) - axis - 1)
            stop[axis + 1 :] = shape[axis + 1 :]
            break
    return Box(tuple(start), tuple(stop))


def common_boxes(a: Region, b: Region, shape: Sequence[int]) -> list[Box]:
    """Return disjoint boxes, none of them empty, that make up what two regions have in common.

    In C order, and at most ``max(1, 2 * n - 1)`` of them for an array of ``n`` axes.
    """
    if isinstance(a, Box) and isinstance(b, Box):
        common = intersect(a, b)
        return [] if common is None else [common]
    if isinstance(a, Range) and isinstance(b, Range):
        return boxes_of(_overlap(a, b), shape)
    box, run = (a, b) if isinstance(a, Box) else (b, a)
    assert isinstance(box, Box)
    assert isinstance(run, Range)
    return _boxes_inside(box, _inside(run, box, shape))


def regions_inside(box: Box, run: Range, shape: Sequence[int]) -> list[Region]:
    """Return disjoint regions of an array that make up a run of the elements of one of its boxes.

    One range where the box itself is a run of the array, as whole rows are; else boxes, none of
    them empty, in C order, at most ``max(1, 2 * n - 1)`` of them for an array of ``n`` axes.

    Args:
        box: of an array of ``shape``.
        run: of the box flattened in C order by itself.
        shape: of the array.
    """
    outer = as_range(box, shape)
    if outer is not None:
        return [Range(outer.start + run.start, outer.start + run.stop)]
    return [*_boxes_inside(box, run)]


def _boxes_inside(box: Box, run: Range) -> list[Box]:
    return [_moved(part, box.start) for part in boxes_of(run, box.shape)]


def _inside(run: Range, box: Box, shape: Sequence[int]) -> Range:
    """Return the elements of ``box`` that are in ``run``, counted in the box.

    They follow each other in C order, whether or not the box has gaps in the array.
    """
    return Range(_before(run.start, box, shape), _before(run.stop, box, shape))


def _before(element: int, box: Box, shape: Sequence[int]) -> int:
    """Return how many elements of ``box`` come before an element of the flattened array."""
    inner = box.size
    if inner == 0:
        return 0
    count, step = 0, math.prod(shape)
    for extent, start, stop in zip(shape, box.start, box.stop, strict=True):
        step //= extent
        inner //= stop - start
        index, element = divmod(element, step)
        if index < start:
            return count
        if index >= stop:
            return count + (stop - start) * inner
        count += (index - start) * inner
    return count + element  # 0, but behind the only element of a 0-d array


def _moved(box: Box, by: tuple[int, ...]) -> Box:
    return Box(tuple(map(operator.add, box.start, by)), tuple(map(operator.add, box.stop, by)))


def _overlap(a: Range, b: Range) -> Range:
    """Return what two ranges have in common, maybe nothing."""
    # Comparisons, since max() and min() take several times as long.
    start = a.start if a.start > b.start else b.start
    stop = a.stop if a.stop < b.stop else b.stop
    return Range(start, stop) if start < stop else Range(0, 0)


def as_range(region: Region, shape: Sequence[int]) -> Range | None:
    """Return the run of elements that a region of an array is; None for a box that is no run.

    A box of whole rows is one, and so is a part of a single row; an empty one is ``Range(0, 0)``.
    """
    if isinstance(region, Range):
        return region
    size, first, last = 1, 0, 0
    for extent, low, high in zip(shape, region.start, region.stop, strict=True):
        size *= high - low
        first, last = first * extent + low, last * extent + high - 1
    if size == 0:
        return Range(0, 0)
    return Range(first, last + 1) if last + 1 - first == size else None


def first_overlap(regions: Sequence[Region], shape: Sequence[int]) -> tuple[int, int] | None:
    """Return the positions, ascending, of two regions that share an element; None if none do.

    Where several pairs do, it is one of them, the same in every process. Takes O(n log n) time for
    ranges and boxes of whole rows, O(n log(n)^2) for boxes that planes separate, such as grids,
    and at worst O(n^2) comparisons by NumPy.
    """
    runs = []
    for owner, region in enumerate(regions):
        run = as_range(region, shape)
        if run is None:
            break  # a box with gaps between its elements
        if run.size:
            runs.append((run.start, run.stop, owner))
    else:
        return overlapping_ranges(runs)
    return overlapping_boxes(
        [
            (box.start, box.stop, owner)
            for owner, region in enumerate(regions)
            for box in boxes_of(region, shape)
        ]
    )


def missing_elements(wanted: Region, stored: Sequence[Region], shape: Sequence[int]) -> int:
    """Return how many elements of ``wanted`` are in none of ``stored``, which must be disjoint."""
    return wanted.size - sum(_common_size(wanted, region, shape) for region in stored)


def _common_size(a: Region, b: Region, shape: Sequence[int]) -> int:
    """Return how many elements two regions have in common."""
    if isinstance(a, Range):
        return _overlap(a, b).size if isinstance(b, Range) else _inside(a, b, shape).size
    if isinstance(b, Range):
        return _inside(b, a, shape).size
    common = intersect(a, b)
    return common.size if common else 0
