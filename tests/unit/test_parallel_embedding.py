"""A table that is cut by rows is looked up as the whole one, and gets the whole one's gradient."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.parallel_cases import Case, check, check_ranks
from support.spmd import run
from support.tensor_parallel import initial_values

import fsdpcore as fc
from fsdpcore.parallel import VocabParallelEmbedding, all_gather, local_part
from fsdpcore.parallel.arrays import sum_by_index

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def look_up(params, x):
    return params["w"][x]


def table(x, vocab, width, along=False):
    def build(group, dtype):
        return VocabParallelEmbedding(vocab, width, group, sequence_parallel=along, dtype=dtype)

    return Case(build, look_up, x, None, -2 if along else None)


def indices(shape, vocab, dtype=np.int64):
    """Some of them often, some never, the first and the last among them."""
    found = np.random.default_rng(2).integers(vocab, size=shape)
    found.flat[: min(2, found.size)] = vocab - 1, 0
    return found.astype(dtype)


CASES = {
    "sequences": table(indices((3, 5), 11), 11, 6),
    "bytes": table(indices((3, 5), 200, np.uint8), 200, 3),
    "one sequence": table(indices(9, 7), 7, 4),
    "a single index": table(np.array(6), 7, 4),
    "few rows": table(indices((2, 3), 2), 2, 5),
    "none": table(np.zeros((2, 0), np.int32), 7, 4),
    "one index": table(np.full((4, 3), 5), 7, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_whole_table(name):
    check_ranks(CASES[name], (1, 0))


@pytest.mark.parametrize("shape", [(3, 5), (3, 8), (1, 9), (2, 1), (7,)])
def test_each_rank_gets_its_part_of_the_sequence(shape):
    check_ranks(table(indices(shape, 11), 11, 6, along=True), (1, 1))


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(2, 4),
    st.booleans(),
)
def test_it_is_the_whole_table_for_any_sizes(shape, vocab, width, ranks, along):
    check(table(indices(shape, vocab), vocab, width, along), (ranks,))


def test_initial_values_do_not_depend_on_the_number_of_ranks():
    build = functools.partial(VocabParallelEmbedding, 11, 16)
    first = initial_values(build, 1)["w"]
    np.testing.assert_array_equal(
        first, np.random.default_rng(3).standard_normal((11, 16), dtype=np.float32) * 0.25
    )
    for ranks in (2, 3, 4):
        np.testing.assert_array_equal(initial_values(build, ranks)["w"], first)


def _exact(backend, dtype):
    layer = VocabParallelEmbedding(9, 4, backend, dtype=dtype)
    initial = layer.init(np.random.default_rng(0))["w"]
    part = initial.array if isinstance(initial, fc.BoxShard) else initial
    x = indices((4, 6), 9)
    y, _ = layer.forward({"w": part}, x)
    whole = all_gather(part, backend, 0)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, whole[x])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
def test_what_is_looked_up_has_the_bits_of_the_table(dtype):
    """All but one of the summands are zeros."""
    run(_exact, transport="sim", world_size=3, args=(np.dtype(dtype),))


def _other_parts(backend):
    """Infinite rows of others must not come out of a product with zero."""
    layer = VocabParallelEmbedding(4, 3, backend)
    part = np.full((2, 3), np.inf if backend.rank == 0 else 1.0, np.float32)
    y, _ = layer.forward({"w": part}, np.array([3, 0]))
    np.testing.assert_array_equal(y, [[1.0] * 3, [np.inf] * 3])


def test_values_that_are_not_finite_stay_where_they_are():
    run(_other_parts, transport="sim", world_size=2)


def _wrong(backend):
    layer = VocabParallelEmbedding(5, 3, backend)
    for x, message in (
        (np.array([[0, 5]]), r"indices are in \[0, 5\), got 5"),
        (np.array([-1, 9]), r"in \[0, 5\), got -1"),
        (np.array([1.0]), "array of integers, got float64"),
        (np.array([True]), "array of integers, got bool"),
        ([1, 2], "array of integers, got <class 'list'>"),
    ):
        with pytest.raises(fc.ArgumentError, match=message):
            layer.forward({"w": np.zeros((3 - backend.rank, 3), np.float32)}, x)
    along = VocabParallelEmbedding(5, 3, backend, sequence_parallel=True)
    with pytest.raises(fc.ArgumentError, match="got a single one"):
        along.forward({}, np.array(1))
    with pytest.raises(fc.ArgumentError, match="vocab must be at least 1"):
        VocabParallelEmbedding(0, 3, backend)
    with pytest.raises(fc.ArgumentError, match="the group must be a Backend, such as"):
        VocabParallelEmbedding(5, 3, None)


def test_what_is_no_row_is_refused_on_all_ranks_before_anything_is_sent():
    run(_wrong, transport="sim", world_size=2)


def _frozen(backend):
    layer = VocabParallelEmbedding(5, 3, backend, sequence_parallel=True)
    x = np.array([[0, 4, 2]])
    initial = layer.init(np.random.default_rng(0))["w"]
    y, saved = layer.forward({"w": initial.array}, x)
    assert not layer.backward({"w": initial.array}, saved, y, {}).any()
    assert local_part(x, backend, -1).shape == y.shape[:-1]


def test_a_frozen_table_has_no_gradient():
    run(_frozen, transport="sim", world_size=2)


@given(
    st.lists(st.integers(-3, 9), max_size=30),
    st.integers(0, 7),
    st.sampled_from([np.dtype(np.float64), np.dtype(np.float16), BFLOAT16]),
)
def test_rows_of_one_index_are_added_up(index, size, dtype):
    """Small integers, whose sums are exact; indices outside are left out."""
    rows = np.arange(2 * len(index)).reshape(-1, 2).astype(dtype)
    out = np.full((size, 2), np.nan, dtype)
    sum_by_index(np.array(index, np.int64), rows, out)
    wanted = np.zeros((size, 2))
    for i, values in zip(index, rows.astype(np.float64), strict=True):
        if 0 <= i < size:
            wanted[i] += values
    np.testing.assert_array_equal(out.astype(np.float64), wanted.astype(dtype).astype(np.float64))
