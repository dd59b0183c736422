"""Ranges of arrays cut into blocks: every element once, in order, in blocks that are boxes."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpcore.fsdp.optim.blocks import Matrices, blocks

SHAPES = st.lists(st.integers(1, 7), min_size=2, max_size=5)


@settings(max_examples=100, deadline=None)
@given(shape=SHAPES, limit=st.integers(1, 60), data=st.data())
def test_blocks_cover_the_range_in_order(shape: list[int], limit: int, data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole = Matrices.of(shape)
    elements = np.arange(size).reshape(whole)
    found: list[int] = []
    for block in blocks(start, stop, whole, limit):
        inside = elements[block.batches, block.rows, block.columns]
        assert inside.shape == block.shape
        assert 1 <= inside.size <= limit
        assert inside.flat[0] == block.start
        assert inside.flat[-1] == block.stop - 1
        found += inside.reshape(-1).tolist()
    assert found == list(range(start, stop))


@settings(max_examples=100, deadline=None)
@given(shape=SHAPES)
def test_a_whole_array_is_one_block(shape: list[int]) -> None:
    """So that sums over small matrices are not made one by one."""
    assert len(list(blocks(0, math.prod(shape), Matrices.of(shape), 10**9))) == 1
