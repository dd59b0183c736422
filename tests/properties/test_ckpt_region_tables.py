"""Tables of regions, against sets of elements and against the same said of one region at a time."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.ckpt_regions import elements, partitions, regions, shapes

from fsdpcore.core.geometry import disjoint, region_table
from fsdpcore.core.geometry.disjoint import overlapping
from fsdpcore.core.geometry.region_table import RegionTable, ShapeTable
from fsdpcore.core.geometry.regions import Box, Range, regions_inside


@pytest.fixture(autouse=True)
def _parts(monkeypatch):
    """Three regions are many."""
    monkeypatch.setattr(region_table, "_AT_ONCE", 3)


SETTINGS = settings(
    deadline=None,
    max_examples=100,
    derandomize=True,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)


@st.composite
def _arrays(draw):
    """Shapes, and regions of them in any order with the numbers of their arrays."""
    found, rows = [], []
    for number in range(draw(st.integers(1, 4))):
        shape = draw(shapes())
        found.append(shape)
        more = draw(st.lists(regions(shape), max_size=draw(st.sampled_from([0, 0, 2]))))
        rows += [(number, each) for each in draw(partitions(shape)) + more if each.size]
    return found, draw(st.permutations(rows))


def _table(rows):
    return RegionTable.of([region for _, region in rows]), np.array([n for n, _ in rows], np.int64)


@SETTINGS
@given(_arrays())
def test_overlaps_are_found_array_by_array(case):
    found, rows = case
    table, arrays = _table(rows)
    expected = {
        one
        for (one, a), (other, b) in combinations(rows, 2)
        if one == other and {*elements(a, found[one])} & {*elements(b, found[one])}
    }
    assert overlapping(arrays, table, arrays, ShapeTable(found)).tolist() == sorted(expected)


@SETTINGS
@given(_arrays())
def test_a_table_says_what_its_regions_say(case):
    found, rows = case
    table, arrays = _table(rows)
    of_all = [sorted(elements(region, found[number])) for number, region in rows]
    assert [table[number] for number in range(len(table))] == [region for _, region in rows]
    assert table.sizes.tolist() == [len(each) for each in of_all]
    assert not table.misplaced(arrays, ShapeTable(found)).size
    first, sizes, run = table.runs(arrays, ShapeTable(found))
    assert sizes.tolist() == table.sizes.tolist()
    assert first.tolist() == [each[0] for each in of_all]
    assert run.tolist() == [each[-1] - each[0] + 1 == len(each) for each in of_all]
    assert table.firsts(arrays).tolist() == [rows.index(each) for each in rows]
    for number, shape in enumerate(found):
        mine = np.flatnonzero(arrays == number)
        low, high = table.take(mine).around(shape)
        for index, each in enumerate(mine.tolist()):
            places = np.unravel_index(of_all[each], shape) if shape else ()
            assert low[index].tolist() == [int(axis.min()) for axis in places]
            assert high[index].tolist() == [int(axis.max()) + 1 for axis in places]


@SETTINGS
@given(_arrays(), st.data())
def test_what_is_no_region_of_its_array_is_told(case, data):
    found, rows = case
    if not rows:
        return
    at = data.draw(st.integers(0, len(rows) - 1))
    number = rows[at][0]
    shape = found[number]
    wrong = [Range(-1, 1), Range(0, math.prod(shape) + 1), Range(1, 1)]
    wrong.append(Box((0,) * (len(shape) + 1), (*shape, 1)))
    for axis, extent in enumerate(shape):
        for low, high in ((-1, 1), (0, extent + 1), (1, 1)):
            start, stop = [0] * len(shape), list(shape)
            start[axis], stop[axis] = low, high
            wrong.append(Box(tuple(start), tuple(stop)))
    changed = [*rows]
    changed[at] = (number, data.draw(st.sampled_from(wrong)))
    table, arrays = _table(changed)
    assert table.misplaced(arrays, ShapeTable(found)).tolist() == [at]


def test_no_plane_cuts_a_box_that_reaches_behind_the_next():
    """The first box ends behind where the second does, in rows as in columns."""
    long, short, behind = Box((0, 0), (9, 2)), Box((1, 2), (2, 9)), Box((3, 1), (4, 3))
    upright = [long, short, behind]
    for boxes in (upright, [Box(each.start[::-1], each.stop[::-1]) for each in upright]):
        table, arrays = RegionTable.of(boxes), np.zeros(3, np.int64)
        assert overlapping(arrays, table, arrays, ShapeTable([(9, 9)])).tolist() == [0]


def test_a_mesh_is_found_disjoint_without_comparing_pairs(monkeypatch):
    """Columns on 8 ranks, each flat on others: parts of rows and whole rows of the columns."""
    shape = (100, 80)
    found = [
        region
        for column in range(0, 80, 10)
        for start in range(0, 1000, 36)
        for region in regions_inside(
            Box((0, column), (100, column + 10)), Range(start, min(start + 36, 1000)), shape
        )
    ]
    compared = []
    monkeypatch.setattr(disjoint, "overlapping_coordinates", lambda *each: compared.append(each))
    table, arrays = RegionTable.of(found), np.zeros(len(found), np.int64)
    assert not overlapping(arrays, table, arrays, ShapeTable([shape])).size
    assert not compared


def test_boxes_too_far_apart_to_be_put_on_one_line_are_compared():
    far = 2**60
    apart = [Box((0, column), (far - 1, column + 1)) for column in range(2)]
    for boxes, found in ((apart, []), ([*apart, Box((far - 2, 1), (far, 2))], [0])):
        table, arrays = RegionTable.of(boxes), np.zeros(len(boxes), np.int64)
        assert overlapping(arrays, table, arrays, ShapeTable([(far, 2)])).tolist() == found
