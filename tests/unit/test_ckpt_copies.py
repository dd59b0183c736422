"""Plans of copies in cases that can be read: what is merged, and how."""

from __future__ import annotations

import pytest

from fsdpcore.checkpoint.plan.copies import Copy, copies
from fsdpcore.core.geometry.regions import Box, Range, whole


def test_two_ranges_share_one_run():
    assert copies((10, 10), Range(20, 50), Range(35, 70)) == [Copy((15,), 15, (1,), 0, (1,))]
    assert copies((10, 10), Range(35, 70), Range(20, 50)) == [Copy((15,), 0, (1,), 15, (1,))]
    assert copies((10, 10), Range(20, 50), Range(50, 70)) == []
    assert copies((10, 10), Range(20, 50), Range(30, 30)) == []


@pytest.mark.parametrize("stored", [whole((4, 6, 5)), Box((0, 0, 0), (4, 6, 5))])
def test_whole_rows_are_one_run_however_they_are_named(stored):
    run = [Copy((60,), 30, (1,), 0, (1,))]
    assert copies((4, 6, 5), stored, Box((1, 0, 0), (3, 6, 5))) == run
    assert copies((4, 6, 5), stored, Range(30, 90)) == run


def test_columns_of_a_matrix_are_one_copy_with_strides():
    shape, columns = (6, 10), Box((0, 4), (6, 7))
    (copy,) = copies(shape, whole(shape), columns)
    assert copy == Copy((6, 3), 4, (10, 1), 0, (3, 1))
    assert copy.size == 18
    (back,) = copies(shape, columns, whole(shape))
    assert back == Copy((6, 3), 0, (3, 1), 4, (10, 1))


def test_axes_are_merged_only_where_both_sides_allow_it():
    shape = (3, 4, 5, 6)
    (copy,) = copies(shape, whole(shape), Box((0, 1, 0, 0), (3, 3, 5, 6)))
    assert copy == Copy((3, 60), 30, (120, 1), 0, (60, 1))
    (copy,) = copies(shape, Box((0, 0, 2, 0), (3, 4, 4, 6)), Box((0, 1, 0, 0), (3, 3, 5, 6)))
    assert copy == Copy((3, 2, 12), 12, (48, 12, 1), 12, (60, 30, 1))


def test_axes_of_extent_1_are_left_out():
    (copy,) = copies((3, 1, 4), whole((3, 1, 4)), Box((0, 0, 2), (3, 1, 3)))
    assert copy == Copy((3,), 2, (4,), 0, (1,))
    (copy,) = copies((1, 1), whole((1, 1)), Box((0, 0), (1, 1)))
    assert copy == Copy((1,), 0, (1,), 0, (1,))


def test_an_array_without_axes_is_one_element():
    one = [Copy((1,), 0, (1,), 0, (1,))]
    assert copies((), Range(0, 1), Box((), ())) == one
    assert copies((), Box((), ()), Range(0, 1)) == one
    assert copies((), Box((), ()), Box((), ())) == one
    assert copies((), Range(0, 0), Box((), ())) == []


def test_a_range_that_goes_across_a_box_begins_and_ends_within_rows():
    # Of rows 0 to 3, columns 1 to 3 are wanted, but the second to the last but one of them only.
    assert copies((4, 5), Range(2, 18), Box((0, 1), (4, 4))) == [
        Copy((2,), 0, (1,), 1, (1,)),
        Copy((2, 3), 4, (5, 1), 3, (3, 1)),
        Copy((2,), 14, (1,), 9, (1,)),
    ]
    # Where the range misses nothing of the box, its own ends do not matter.
    assert copies((4, 5), Range(1, 19), Box((0, 1), (4, 4))) == [Copy((4, 3), 0, (5, 1), 0, (3, 1))]


def test_sizes_beyond_64_bits():
    far = 2**70
    (copy,) = copies((far, 4), whole((far, 4)), Box((far - 2, 1), (far, 3)))
    assert copy == Copy((2, 2), 4 * far - 7, (4, 1), 0, (2, 1))
