"""The collectives of tensor parallelism, against NumPy on whole arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.spmd import RanksFailed, run

import fsdpcore as fc
from fsdpcore.parallel import exchange

RANKS = [1, 2, 3, 4]
# Odd extents, fewer than ranks, none; the cut axis first, in the middle, last.
SHAPES = [(7,), (5, 3), (2, 5, 3), (3, 1, 4), (1, 1, 6), (1, 4, 2), (2, 3, 0), (0, 2), (2, 0, 3)]


def values(shape, rank=0):
    """Integers, whose sums are exact in any order."""
    rng = np.random.default_rng(rank)
    return rng.integers(-99, 99, size=shape).astype(np.float32)


def cut(array, backend, axis):
    return np.array_split(array, backend.world_size, axis)[backend.rank]


def cases():
    return [(shape, axis) for shape in SHAPES for axis in range(-len(shape), len(shape))]


def _gather(backend):
    for shape, axis in cases():
        whole = values(shape)
        part = cut(whole, backend, axis)
        for given_part in (part, part.copy()):
            for size in (None, shape[axis]):
                found = exchange.all_gather(given_part, backend, axis, size=size)
                assert found.dtype == whole.dtype
                np.testing.assert_array_equal(found, whole)
                assert found.flags.c_contiguous or backend.world_size == 1
        np.testing.assert_array_equal(part, cut(whole, backend, axis))


def _reduce_scatter(backend):
    for shape, axis in cases():
        arrays = [values(shape, rank) for rank in range(backend.world_size)]
        mine = arrays[backend.rank].copy()
        found = exchange.reduce_scatter(mine, backend, axis)
        np.testing.assert_array_equal(found, cut(sum(arrays), backend, axis))
        np.testing.assert_array_equal(mine, arrays[backend.rank])
        turned = np.asfortranarray(mine)
        again = exchange.reduce_scatter(turned, backend, axis)
        np.testing.assert_array_equal(again, found)


def _reduce(backend):
    for shape in SHAPES:
        arrays = [values(shape, rank) for rank in range(backend.world_size)]
        mine = arrays[backend.rank]
        strided = np.stack([mine, mine], axis=-1)[..., 0]
        for given_array in (mine.copy(), mine.copy(order="F"), strided):
            found = exchange.all_reduce(given_array, backend)
            np.testing.assert_array_equal(found, sum(arrays))
        np.testing.assert_array_equal(
            exchange.all_reduce(mine.copy(), backend, op="max"), np.max(arrays, axis=0)
        )


def _own(backend):
    for shape, axis in cases():
        whole = values(shape)
        part = exchange.local_part(whole, backend, axis)
        np.testing.assert_array_equal(part, cut(whole, backend, axis))
        assert not part.size or np.shares_memory(part, whole)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("body", [_gather, _reduce_scatter, _reduce, _own])
def test_it_is_what_numpy_does_with_whole_arrays(body, ranks):
    run(body, transport="sim", world_size=ranks)


def _programs(backend, shapes):
    for shape, axis in shapes:
        whole = values(shape)
        part = cut(whole, backend, axis)
        np.testing.assert_array_equal(exchange.all_gather(part, backend, axis), whole)
        np.testing.assert_array_equal(
            exchange.reduce_scatter(whole, backend, axis), part * backend.world_size
        )


@st.composite
def _cut_shapes(draw):
    shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    return tuple(shape), draw(st.integers(-len(shape), len(shape) - 1))


@settings(max_examples=15, deadline=None)
@given(st.lists(_cut_shapes(), min_size=5, max_size=20), st.integers(2, 5))
def test_any_shape_can_be_cut_along_any_axis(shapes, ranks):
    run(_programs, transport="sim", world_size=ranks, args=(shapes,))


def _same_bits(backend):
    rng = np.random.default_rng(backend.rank)
    x = (rng.standard_normal((3, 7, 5)) * 10.0 ** rng.integers(-6, 6, (3, 7, 5))).astype(np.float32)
    part = exchange.reduce_scatter(x, backend, -2)
    summed = exchange.all_reduce(x.copy(), backend)
    np.testing.assert_array_equal(part, exchange.local_part(summed, backend, -2))


def test_a_part_of_a_sum_has_the_bits_of_the_whole_sum():
    """What is cut along the sequence or not is no other training."""
    run(_same_bits, transport="sim", world_size=4)


def _counted(backend):
    x = np.zeros((2, 6, 3))
    counts = []
    for call in (
        lambda: exchange.all_reduce(x, backend),
        lambda: exchange.all_gather(x, backend, 1),
        lambda: exchange.all_gather(x, backend, 1, size=6 * backend.world_size),
        lambda: exchange.reduce_scatter(x, backend, 1),
        lambda: exchange.local_part(x, backend, 1),
    ):
        before = backend.order.issued
        call()
        counts.append(backend.order.issued - before)
    return counts


def test_each_is_one_collective_and_one_more_tells_extents_and_a_group_of_one_needs_none():
    assert run(_counted, transport="sim", world_size=3) == [[1, 2, 1, 1, 0]] * 3
    assert run(_counted, transport="sim", world_size=1) == [[0] * 5]


def _nothing_copied(backend):
    x = np.zeros((2, 6, 3))
    assert exchange.all_reduce(x, backend) is x
    assert exchange.all_gather(x, backend, 1) is x
    assert exchange.reduce_scatter(x, backend, 1) is x


def test_a_group_of_one_copies_nothing():
    run(_nothing_copied, transport="sim", world_size=1)


def _in_place(backend):
    x = np.full((4, 5), 1.0, np.float32)
    assert exchange.all_reduce(x, backend) is x
    assert (x == backend.world_size).all()


def test_a_sum_is_in_the_memory_of_what_was_passed():
    run(_in_place, transport="sim", world_size=3)


def _uneven(backend, known):
    extent = 3 if backend.rank == 1 else 2  # the first part is the longer one
    exchange.all_gather(np.zeros((2, extent)), backend, 1, size=5 if known else None)


@pytest.mark.parametrize("known", [True, False])
def test_parts_that_are_cut_otherwise_are_refused(known):
    with pytest.raises(RanksFailed, match=r"indices of an axis of 5, where \[0, 3\) is its part"):
        run(_uneven, transport="sim", world_size=2, args=(known,))


def _found_out(backend):
    with pytest.raises(fc.MismatchError, match=r"rank 0 of 3 has 2 indices of an axis of 7"):
        exchange.all_gather(np.zeros((2, 3 if backend.rank == 1 else 2)), backend, 1)
    backend.barrier()


def test_parts_that_are_told_are_refused_on_all_ranks_before_they_are_sent():
    run(_found_out, transport="sim", world_size=3)


def _operations(backend, length):
    part = cut(np.zeros((2, length, 3), np.float32), backend, 1)
    exchange.all_gather(part, backend, 1)
    return [(e.call.operation, e.call.nbytes) for e in backend.recorder.entries()]


def test_parts_are_joined_by_the_plain_collective_where_they_are_equal():
    """What tells rows of its own in every call is several times as slow for small arrays."""
    found = run(_operations, transport="sim", world_size=2, args=(8,))
    assert found == [[("all_gather", 8), ("all_gather", 2 * 4 * 3 * 4)]] * 2
    found = run(_operations, transport="sim", world_size=2, args=(7,))
    assert [[name for name, _ in rank] for rank in found] == [["all_gather", "all_gather_v"]] * 2


def _no_axis(backend):
    x = np.zeros((2, 3))
    for call in (exchange.all_gather, exchange.reduce_scatter):
        with pytest.raises(fc.ArgumentError, match="no axis 2"):
            call(x, backend, 2)
    backend.barrier()


def test_an_axis_that_there_is_not_is_refused_before_anything_is_sent():
    run(_no_axis, transport="sim", world_size=2)
