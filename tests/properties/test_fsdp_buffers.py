"""The pool of flat buffers: never more memory than was in use at once, and none anew for a step."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fsdpcore as fc
from fsdpcore.fsdp.units.buffer_pool import BufferPool

DTYPES = [np.dtype(np.float32), np.dtype(np.float64)]


class Memory:
    """Stands for a backend: hands out memory, and counts."""

    def __init__(self):
        self.calls = 0

    def empty(self, shape, dtype):
        self.calls += 1
        return np.empty(shape, dtype)


def check(pool, held, most):
    """What the pool says about itself, against what is held: arrays by their number."""
    assert pool.live_bytes >= sum(array.nbytes for array, _ in held)
    assert pool.live_bytes + pool.spare_bytes <= most
    for array, number in held:
        assert (array == number).all()


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES), st.integers(0, 3))))
def test_no_more_is_held_than_was_handed_out_at_once_and_nothing_twice(program):
    """Take a buffer of each size, after giving back the oldest so many."""
    pool, held, most = BufferPool(Memory()), [], 0
    for number, (size, dtype, gives) in enumerate(program):
        for _ in range(min(gives, len(held))):
            pool.give(held.pop(0)[0])
            check(pool, held, most)
        array = pool.take(size, dtype)
        assert array.shape == (size,)
        assert array.dtype == dtype
        array[:] = number
        held.append((array, number))
        most = max(most, pool.live_bytes)
        check(pool, held, most)
    assert pool.peak_bytes == most
    for array, _ in held:
        pool.give(array)
    assert pool.live_bytes == 0
    pool.clear()
    assert pool.spare_bytes == 0


@pytest.mark.parametrize("sizes", [[8] * 6, [90, 8, 8, 8, 8, 100], [3, 70, 3, 70, 3]])
def test_gradients_of_one_unit_after_the_other_have_one_buffer_at_a_time(sizes):
    memory = Memory()
    pool = BufferPool(memory)
    for _ in range(3):
        calls = memory.calls
        for size in reversed(sizes):
            pool.give(pool.take(size, DTYPES[0]))
        assert pool.peak_bytes == 4 * max(sizes)
    changes = sum(a != b for a, b in itertools.pairwise([*sizes, *sizes[:1]]))
    assert memory.calls - calls == changes


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_largest_goes_where_there_is_no_room_for_all(order):
    memory = Memory()
    pool = BufferPool(memory)
    both = [pool.take(size, DTYPES[0]) for size in (90, 8)]
    for number in order:
        pool.give(both[number])
    pool.take(50, DTYPES[0])
    assert pool.spare_bytes == 4 * 8
    pool.take(8, DTYPES[0])
    assert memory.calls == 3


@pytest.mark.parametrize(("sizes", "anew"), [([8] * 6, 0), ([90, 8, 8, 8, 8, 100], 8)])
def test_a_step_like_the_one_before_allocates_for_odd_units_only(sizes, anew):
    """Forward and backward with one unit fetched ahead, and gradients."""
    memory = Memory()
    pool = BufferPool(memory)

    def walk(order, gradients):
        ahead = pool.take(order[0], DTYPES[0])
        for number, size in enumerate(order):
            here = ahead
            if number + 1 < len(order):
                ahead = pool.take(order[number + 1], DTYPES[0])
            grads = pool.take(size, DTYPES[0]) if gradients else None
            pool.give(here)
            if grads is not None:
                pool.give(grads)

    for _ in range(3):
        calls = memory.calls
        walk(sizes, gradients=False)
        walk(sizes[::-1], gradients=True)
    assert memory.calls - calls <= anew


@pytest.mark.parametrize("windowed", [False, True])
def test_once_warm_a_step_allocates_scratch_only(windowed, monkeypatch):
    """The engine by itself; what a collective needs is no concern of it."""
    size = 1 << 20  # elements, 4 MiB

    def of_one_rank(array, backend, *, out, **options):
        out[...] = array

    monkeypatch.setattr("fsdpcore.fsdp.units.gradients.reduce_scatter", of_one_rank)
    monkeypatch.setattr("fsdpcore.fsdp.units.storages.all_gather", of_one_rank)
    if not windowed:
        monkeypatch.setattr(
            "fsdpcore.fsdp.units.make_model.open_window", lambda layouts, backend: None
        )

    def walk(engine):
        with engine.step() as step:
            for unit in engine.units:
                with step.forward(unit):
                    pass
            for unit in reversed(engine.units):
                with step.backward(unit) as (_, grads):
                    grads["w"].fill(1)
            step.update(clip=1.0)

    def body(backend):
        units = [fc.Unit(f"u{i}", {"w": fc.Spec(size)}) for i in range(3)]
        engine = fc.FSDP(units, backend, optimizer=fc.optim.SGD(lr=1.0), prefetch=0)
        assert engine.windowed == windowed
        for _ in range(2):
            walk(engine)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        walk(engine)
        return tracemalloc.get_traced_memory()[1] - before

    tracemalloc.start()
    try:
        (extra,) = fc.launch(body, world_size=1, transport="sim")
    finally:
        tracemalloc.stop()
    # The optimizer works in two blocks of 128 Ki elements, the norm in one of as many float64.
    assert extra < 1.25 * (1 << 20)


def test_who_asks_for_the_same_gets_the_same_array_without_what_was_said_of_it():
    pool, dtype = BufferPool(Memory()), DTYPES[0]
    first = pool.take(8, dtype)
    pool.give(first, "gradients")
    assert pool.left_of("gradients") is first
    assert pool.take(8, dtype) is first
    pool.give(first)
    assert pool.left_of("gradients") is None
