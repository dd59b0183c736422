"""Regions and the copies between them, against masks over every element of small arrays."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.ckpt_regions import boxes, elements, mask, partitions, plain, regions, shapes

from fsdpcore.checkpoint.plan.copies import Copy, copies
from fsdpcore.core.geometry import overlaps
from fsdpcore.core.geometry.regions import (
    Box,
    Range,
    Region,
    boxes_of,
    check_region,
    common_boxes,
    first_overlap,
    intersect,
    missing_elements,
    whole,
)

SETTINGS = settings(
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
EMPTY = -1  # in a target: nothing was copied here


@st.composite
def _pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], Region, Region]:
    shape = draw(shapes())
    return shape, draw(regions(shape)), draw(regions(shape))


@st.composite
def _pairs_of_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = draw(shapes())
    return shape, draw(boxes(shape)), draw(boxes(shape))


@st.composite
def _many(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Region]]:
    """Regions that are disjoint, with some more now and then that may not be."""
    shape = draw(shapes())
    more = draw(st.lists(regions(shape), max_size=draw(st.sampled_from([0, 1, 3]))))
    return shape, draw(st.permutations(draw(partitions(shape)) + more))


@SETTINGS
@given(_pairs())
@example(((2, 3), Box((0, 1), (2, 2)), Range(1, 5)))
@example(((), Range(0, 1), Box((), ())))
@example(((3, 0, 2), Range(0, 0), Box((0, 0, 0), (3, 0, 2))))
def test_copies_move_the_common_elements_and_touch_nothing_else(case):
    shape, stored, wanted = case
    plan = copies(shape, stored, wanted)
    check_plan(plan, shape, stored, wanted)
    assert len(plan) <= most_copies(shape, stored, wanted)
    assert all(1 not in copy.shape or copy.shape == (1,) for copy in plan)


def most_copies(shape: tuple[int, ...], stored: Region, wanted: Region) -> int:
    return 1 if type(stored) is type(wanted) else max(1, 2 * len(shape) - 1)


def check_plan(plan: list[Copy], shape: tuple[int, ...], stored: Region, wanted: Region) -> None:
    """Carry the plan out on elements that are known by their positions in the whole array."""
    source = np.array(elements(stored, shape), int)
    expected = elements(wanted, shape)
    target = np.full(len(expected), EMPTY)
    written = np.zeros(len(expected), int)
    for copy in plan:
        read, write = touched(copy, of="src"), touched(copy, of="dst")
        assert read
        assert len(read) == len(write) == copy.size == math.prod(copy.shape)
        assert min(read) == copy.src
        assert plain([copy.shape, copy.src, copy.src_strides, copy.dst, copy.dst_strides])
        target[write] = source[read]  # positions beyond the piece or the target would raise
        np.add.at(written, write, 1)
    have = set(source.tolist())
    assert target.tolist() == [e if e in have else EMPTY for e in expected]
    assert written.tolist() == [int(e in have) for e in expected]


def touched(copy: Copy, of: str) -> list[int]:
    """Positions of the elements on one side, in the order in which they are copied."""
    begin = copy.src if of == "src" else copy.dst
    strides = copy.src_strides if of == "src" else copy.dst_strides
    index = np.indices(copy.shape).reshape(len(copy.shape), -1)
    return (begin + np.array(strides) @ index).tolist()


@SETTINGS
@given(_pairs())
def test_boxes_of_a_region_are_its_elements_in_order(case):
    shape, region, other = case
    check_region(region, shape, "a region")
    assert region.size == len(elements(region, shape))
    found = boxes_of(region, shape)
    assert [e for box in found for e in elements(box, shape)] == sorted_if_range(region, shape)
    assert all(box.size for box in found)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert plain(found)
    common = common_boxes(region, other, shape)
    together = sum((mask(box, shape).astype(int) for box in common), np.zeros(shape, int))
    assert np.array_equal(together, mask(region, shape) & mask(other, shape))
    assert all(box.size for box in common)
    assert len(common) <= max(1, 2 * len(shape) - 1)
    assert plain(common)


def sorted_if_range(region: Region, shape: tuple[int, ...]) -> list[int]:
    found = elements(region, shape)
    return sorted(found) if isinstance(region, Range) else found


@SETTINGS
@given(_pairs_of_boxes())
def test_intersections_of_boxes(case):
    shape, a, b = case
    common = intersect(a, b)
    expected = mask(a, shape) & mask(b, shape)
    assert a.shape == tuple(q - p for p, q in zip(a.start, a.stop, strict=True))
    if common is None:
        assert not expected.any()
    else:
        assert np.array_equal(mask(common, shape), expected)
        assert expected.any()
        assert plain(common)


@SETTINGS
@given(_many())
@example(((), [Range(0, 1), Box((), ())]))
@example(((4,), [Range(0, 2), Box((2,), (2,)), Box((2,), (4,))]))
def test_an_overlap_is_found_if_there_is_one(case):
    shape, found = case
    check_overlap(first_overlap(found, shape), shape, found)


@SETTINGS
@given(_many())
def test_planes_lose_no_overlap(case):
    """Few boxes are compared pair by pair; here even the fewest are divided first."""
    shape, found = case
    few, overlaps._FEW = overlaps._FEW, 1
    at_once, overlaps._AT_ONCE = overlaps._AT_ONCE, 5
    try:
        check_overlap(first_overlap(found, shape), shape, found)
    finally:
        overlaps._FEW, overlaps._AT_ONCE = few, at_once


def check_overlap(
    pair: tuple[int, int] | None, shape: tuple[int, ...], found: list[Region]
) -> None:
    taken = [set(elements(region, shape)) for region in found]
    if pair is None:
        assert sum(map(len, taken)) == len(set().union(*taken))
    else:
        assert pair[0] < pair[1]
        assert taken[pair[0]] & taken[pair[1]]
        assert plain(pair)


@st.composite
def _covered(draw: st.DrawFn) -> tuple[tuple[int, ...], Region, list[Region]]:
    shape = draw(shapes())
    return shape, draw(regions(shape)), draw(partitions(shape))


@SETTINGS
@given(_covered())
@example(((), Box((), ()), []))
@example(((2, 0), Range(0, 0), []))
def test_missing_elements(case):
    shape, wanted, stored = case
    missing = missing_elements(wanted, stored, shape)
    have = set().union(*(elements(region, shape) for region in stored))
    assert missing == len(set(elements(wanted, shape)) - have)
    assert plain(missing)


@SETTINGS
@given(shapes())
def test_the_whole(shape):
    assert mask(whole(shape), shape).all()
    assert whole(shape) == Range(0, math.prod(shape))
    assert plain(whole(shape))


@SETTINGS
@given(st.data())
def test_an_array_goes_from_one_partition_to_another(data):
    """What ranks stored in one way arrives in full where ranks want it in another."""
    shape = data.draw(shapes())
    array = np.arange(math.prod(shape)).reshape(shape)
    stored = data.draw(partitions(shape))
    for wanted in data.draw(partitions(shape)):
        target = np.full(wanted.size, EMPTY)
        for piece in stored:
            source = array[mask(piece, shape)]
            for copy in copies(shape, piece, wanted):
                target[touched(copy, of="dst")] = source[touched(copy, of="src")]
        assert (target == EMPTY).sum() == missing_elements(wanted, stored, shape)
        assert all(b in (EMPTY, a) for a, b in zip(elements(wanted, shape), target, strict=True))
