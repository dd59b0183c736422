"""Plans of copies in cases that can be read: what is merged, how parts are cut."""

from __future__ import annotations

import pytest

from fsdpcore.checkpoint.regions import Box, Range, whole
from fsdpcore.checkpoint.reshard import Copy, copies, split
from fsdpcore.errors import ArgumentError


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
    assert copy.src_stop == 57
    assert copy.contiguous_dst
    assert not copy.contiguous_src
    (back,) = copies(shape, columns, whole(shape))
    assert back == Copy((6, 3), 0, (3, 1), 4, (10, 1))
    assert back.contiguous_src
    assert not back.contiguous_dst


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
    assert copy.src_stop == 4 * far - 1
    first = next(split(Copy((far,), 0, (1,), 0, (1,)), 10))
    assert first == Copy((10,), 0, (1,), 0, (1,))


def test_rows_are_kept_together_while_the_limit_allows_it():
    copy = Copy((5, 3), 4, (10, 1), 0, (3, 1))
    assert list(split(copy, 43)) == [copy]
    assert list(split(copy, 42)) == [
        Copy((4, 3), 4, (10, 1), 0, (3, 1)),
        Copy((3,), 44, (1,), 12, (1,)),
    ]
    assert list(split(copy, 13)) == [
        Copy((2, 3), 4, (10, 1), 0, (3, 1)),
        Copy((2, 3), 24, (10, 1), 6, (3, 1)),
        Copy((3,), 44, (1,), 12, (1,)),
    ]
    assert list(split(copy, 2))[:3] == [
        Copy((2,), 4, (1,), 0, (1,)),
        Copy((1,), 6, (1,), 2, (1,)),
        Copy((2,), 14, (1,), 3, (1,)),
    ]


def test_single_elements_far_apart():
    parts = list(split(Copy((3,), 0, (10,), 0, (1,)), 10))
    assert [(part.size, part.src, part.dst) for part in parts] == [
        (1, 0, 0),
        (1, 10, 1),
        (1, 20, 2),
    ]
    assert all(part.contiguous_src for part in parts)


@pytest.mark.parametrize("limit", [0, -5])
def test_a_limit_below_one_element_is_refused_at_once(limit):
    with pytest.raises(ArgumentError, match="at least 1"):
        split(Copy((3,), 0, (1,), 0, (1,)), limit)
