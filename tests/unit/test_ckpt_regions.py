"""Boxes and ranges of an array: what is refused, edges, and many of them at once."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from support.ckpt_regions import elements, plain

from fsdpcore.core.errors import ArgumentError, CorruptCheckpointError
from fsdpcore.core.geometry.regions import (
    Box,
    Range,
    Region,
    boxes_of,
    check_region,
    first_overlap,
    intersect,
    missing_elements,
    whole,
)

MANY = 10_000


@pytest.mark.parametrize(
    ("region", "shape"),
    [
        (Range(0, 6), (2, 3)),
        (Range(6, 6), (2, 3)),
        (Range(0, 1), ()),
        (Range(0, 0), (4, 0)),
        (Box((0, 1), (2, 3)), (2, 3)),
        (Box((1, 3), (1, 3)), (2, 3)),
        (Box((0, 0), (4, 0)), (4, 0)),
        (Box((), ()), ()),
    ],
)
def test_regions_of_the_array_pass(region, shape):
    check_region(region, shape, "a piece")
    check_region(region, list(shape), "a piece", CorruptCheckpointError)


@pytest.mark.parametrize(
    ("region", "shape", "words"),
    [
        (Range(0, 7), (2, 3), "has 6 elements"),
        (Range(4, 3), (2, 3), r"\[4, 3\)"),
        (Range(-1, 3), (2, 3), r"\[-1, 3\)"),
        (Range(0, 2**63), (2, 3), "has 6 elements"),
        (Range(0, 2), (), "has 1 elements"),
        (Range(0, True), (2, 3), "Python ints"),
        (Range(0.0, 3), (2, 3), "Python ints"),
        (Range(0, np.int64(3)), (2, 3), "Python ints"),
        (Range(None, 3), (2, 3), "Python ints"),
        (Box((0, 0), (3, 3)), (2, 3), r"\[0, 3\) along axis 0"),
        (Box((0, 2), (2, 1)), (2, 3), r"\[2, 1\) along axis 1"),
        (Box((0, -1), (2, 1)), (2, 3), r"\[-1, 1\) along axis 1"),
        (Box((0, 0), (2, 2**64)), (2, 3), "along axis 1"),
        (Box((0,), (2,)), (2, 3), "needs 2 of each"),
        (Box((0, 0), (2,)), (2, 3), "2 starts and 1 stops"),
        (Box((), ()), (2,), "0 starts"),
        (Box((0,), (1,)), (), "needs 0 of each"),
        (Box((0, 0), (2, True)), (2, 3), "Python ints"),
        (Box((0, 0), (2, 3.0)), (2, 3), "Python ints"),
        (Box((0, 0), (2, np.int32(3))), (2, 3), "Python ints"),
        (Box([0, 0], [2, 3]), (2, 3), "tuples"),
        ((0, 6), (2, 3), "a Box or a Range"),
        (None, (2, 3), "a Box or a Range"),
    ],
)
def test_other_regions_are_refused(region, shape, words):
    with pytest.raises(ArgumentError, match=words) as refused:
        check_region(region, shape, "the third piece")
    assert str(refused.value).startswith("the third piece ")
    with pytest.raises(CorruptCheckpointError, match=words):
        check_region(region, shape, "the third piece", CorruptCheckpointError)


def test_sizes_and_shapes():
    assert Range(3, 8).size == 5
    assert Box((1, 0, 2), (3, 4, 2)).shape == (2, 4, 0)
    assert Box((1, 0, 2), (3, 4, 2)).size == 0
    assert Box((), ()).shape == ()
    assert Box((), ()).size == 1
    assert whole((2, 0, 5)) == Range(0, 0)


def test_a_range_that_is_aligned_to_rows_is_one_box():
    shape = (4, 3, 5)
    assert boxes_of(Range(0, 60), shape) == [Box((0, 0, 0), (4, 3, 5))]
    assert boxes_of(Range(15, 45), shape) == [Box((1, 0, 0), (3, 3, 5))]
    assert boxes_of(Range(20, 30), shape) == [Box((1, 1, 0), (2, 3, 5))]
    assert boxes_of(Range(22, 24), shape) == [Box((1, 1, 2), (2, 2, 4))]
    assert boxes_of(Range(1, 59), shape) == [
        Box((0, 0, 1), (1, 1, 5)),
        Box((0, 1, 0), (1, 3, 5)),
        Box((1, 0, 0), (3, 3, 5)),
        Box((3, 0, 0), (4, 2, 5)),
        Box((3, 2, 0), (4, 3, 4)),
    ]


def test_touching_boxes_have_nothing_in_common():
    assert intersect(Box((0, 0), (2, 2)), Box((0, 2), (2, 4))) is None
    assert intersect(Box((0, 0), (2, 2)), Box((1, 1), (1, 2))) is None
    assert intersect(Box((), ()), Box((), ())) == Box((), ())


def slabs(axis: int) -> list[Region]:
    """Slabs of one of two axes."""
    other = 1 - axis
    return [
        Box(
            tuple(i if a == axis else 0 for a in range(2)),
            tuple(i + 1 if a == axis else 7 * (a == other) for a in range(2)),
        )
        for i in range(MANY)
    ]


def grid(axes: int) -> list[Region]:
    """About so many cubes side by side along every axis."""
    width = round(MANY ** (1 / axes))
    return [
        Box(tuple(2 * i for i in cell), tuple(2 * i + 2 for i in cell))
        for cell in itertools.product(range(width), repeat=axes)
    ]


def pinwheels() -> list[Region]:
    """Squares inside each other, each of four bars that no line separates."""
    found: list[Region] = []
    for low in range(MANY // 4):
        high = MANY - low
        found += [
            Box((low, low), (low + 1, high - 1)),
            Box((low, high - 1), (high - 1, high)),
            Box((high - 1, low + 1), (high, high)),
            Box((low + 1, low), (high, low + 1)),
        ]
    return found


def sticks() -> list[Region]:
    """Long bars along all three axes, passing each other."""
    width = round((MANY / 3) ** 0.5)
    long = 2 * width + 2
    return [
        bar
        for i, j in itertools.product(range(0, 2 * width, 2), repeat=2)
        for bar in (
            Box((0, i, j), (long, i + 1, j + 1)),
            Box((i + 1, 0, j + 1), (i + 2, long, j + 2)),
            Box((i, j + 1, 0), (i + 1, j + 2, long)),
        )
    ]


def extent_of(regions: list[Region]) -> tuple[int, ...]:
    return tuple(map(max, zip(*(box.stop for box in regions), strict=True)))


@pytest.mark.parametrize(
    ("made", "arguments"),
    [
        (slabs, [0]),
        (slabs, [1]),
        (grid, [2]),
        (grid, [3]),
        (grid, [4]),
        (pinwheels, []),
        (sticks, []),
    ],
    ids=["rows", "columns", "squares", "cubes", "4-d", "pinwheels", "sticks"],
)
def test_one_overlap_among_many_boxes_is_found(made, arguments):
    regions = made(*arguments)
    shape = tuple(n + 1 for n in extent_of(regions))
    random.Random(7).shuffle(regions)
    assert first_overlap(regions, shape) is None
    # The smallest box there is, inside one of the others.
    hidden = regions[MANY // 3]
    more = [*regions, Box(hidden.start, tuple(i + 1 for i in hidden.start))]
    pair = first_overlap(more, shape)
    assert pair == (MANY // 3, len(regions))
    assert plain(pair)


def test_boxes_that_all_overlap():
    same = [Box((0, 1), (3, 4))] * MANY
    pair = first_overlap(same, (5, 5))
    assert pair is not None
    assert pair[0] < pair[1]


def test_overlaps_of_many_ranges():
    regions: list[Region] = [Range(3 * i, 3 * i + 3) for i in range(10 * MANY)]
    random.Random(7).shuffle(regions)
    assert first_overlap(regions, (30 * MANY,)) is None
    regions.append(Range(regions[5].start + 2, regions[5].stop))
    assert first_overlap(regions, (30 * MANY,)) == (5, 10 * MANY)


def test_regions_without_elements_overlap_nothing():
    shape = (4, 4)
    empty = [Range(3, 3), Box((1, 1), (1, 4)), Range(3, 3), Box((2, 2), (2, 2))]
    assert first_overlap([Range(0, 8), *empty, Box((2, 0), (4, 3))], shape) is None
    assert first_overlap([], shape) is None
    assert first_overlap([Range(0, 0), Box((0,), (0,))], (0,)) is None


def test_coordinates_beyond_64_bits():
    far = 2**70
    shape = (4 * far, 3)
    columns: list[Region] = [Box((i * far, 0), (i * far + 1, 2)) for i in range(4)]
    rest: list[Region] = [Range(3 * i * far + 2, 3 * i * far + 5) for i in range(3)]
    assert first_overlap(columns, shape) is None
    assert first_overlap([*columns, *rest], shape) is None
    assert first_overlap([*rest, *columns, Box((far, 1), (far + 1, 2))], shape) == (4, 7)
    # Each of the ranges has the last column of a row, and two columns of the next one.
    assert missing_elements(Box((0, 0), shape), [*columns, *rest], shape) == 12 * far - 17
    assert boxes_of(Range(3 * far, 6 * far), shape) == [Box((far, 0), (2 * far, 3))]


def test_what_is_missing_of_a_box_that_ranges_cover_in_part():
    shape, wanted = (3, 4), Box((0, 1), (3, 3))
    stored = [Range(0, 2), Range(5, 7), Range(10, 12)]
    assert missing_elements(wanted, stored, shape) == 2
    assert set(elements(wanted, shape)) - {0, 1, 5, 6, 10, 11} == {2, 9}
