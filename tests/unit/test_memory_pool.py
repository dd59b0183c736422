"""The pool of shared memory: parts never overlap, are used again, and are not more than needed."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass

import pytest
from fsdpcore.transports.memory.pool import Pool
from hypothesis import given, settings
from hypothesis import strategies as st

LINE, PAGE = 64, 4096
SEGMENT = 64 * PAGE


@dataclass(eq=False)
class Memory:
    """A segment, as far as the pool needs one."""

    nbytes: int


class Grown:
    """A pool, and the segments that it asked for."""

    def __init__(self) -> None:
        self.segments: list[Memory] = []
        self.pool: Pool[Memory] = Pool(self._grow)

    def _grow(self, nbytes: int) -> Memory:
        memory = Memory(max(SEGMENT, -(-nbytes // PAGE) * PAGE))
        self.segments.append(memory)
        return memory


SIZES = st.one_of(
    st.integers(0, 3 * LINE),
    st.integers(PAGE - LINE, PAGE + LINE),
    st.integers(0, SEGMENT + PAGE),
    st.sampled_from([0, 1, LINE, LINE + 1, PAGE - 1, PAGE, PAGE + 1, SEGMENT, SEGMENT + 1]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(SIZES, st.integers(-40, -1)), max_size=80))
def test_parts_are_aligned_and_never_overlap(steps: list[int]) -> None:
    """A step takes a part of that size or, where it is negative, gives one back."""
    grown, taken = Grown(), list[tuple[Memory, int, int]]()
    for step in steps:
        if step < 0:
            if taken:
                grown.pool.give(*taken.pop(step % len(taken)))
            continue
        segment, offset, size = part = grown.pool.take(step)
        assert segment in grown.segments
        assert size >= max(step, 1)
        assert size < step + (PAGE if step >= PAGE else LINE) or size == LINE
        assert 0 <= offset <= offset + size <= segment.nbytes
        assert offset % (PAGE if step >= PAGE else LINE) == 0
        for other, start, room in taken:
            assert other is not segment or start + room <= offset or offset + size <= start
        taken.append(part)
    assert grown.pool.nbytes == sum(segment.nbytes for segment in grown.segments)


@settings(max_examples=100, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_what_was_given_back_is_one_piece_again(sizes: list[int], chance: random.Random) -> None:
    """In whatever order the neighbours come back: so that the largest part fits again."""
    grown = Grown()
    taken = [grown.pool.take(size) for size in sizes]
    chance.shuffle(taken)
    for part in taken:
        grown.pool.give(*part)
    before = len(grown.segments)
    whole = [grown.pool.take(segment.nbytes) for segment in list(grown.segments)]
    assert len(grown.segments) == before
    assert {id(segment) for segment, _, _ in whole} == {id(s) for s in grown.segments}
    assert all(offset == 0 for _, offset, _ in whole)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(SIZES, st.integers(0, 6)), min_size=1, max_size=40))
def test_the_same_again_grows_nothing(plan: list[tuple[int, int]]) -> None:
    """Parts that each live for some steps, again and again."""
    grown = Grown()

    def once() -> None:
        living: list[tuple[int, tuple[Memory, int, int]]] = []
        for now, (size, life) in enumerate(plan):
            for end, part in living:
                if end == now:
                    grown.pool.give(*part)
            living = [(end, part) for end, part in living if end != now]
            living.append((now + 1 + life, grown.pool.take(size)))
        for _, part in living:
            grown.pool.give(*part)

    once()
    needed = grown.pool.nbytes
    for _ in range(3):
        once()
        assert grown.pool.nbytes == needed


def test_one_size_over_and_over_is_one_place() -> None:
    grown = Grown()
    places = set()
    for _ in range(1000):
        segment, offset, size = grown.pool.take(5000)
        places.add((id(segment), offset, size))
        grown.pool.give(segment, offset, size)
    assert len(places) == 1


def test_a_large_part_beside_many_small_ones_that_stay() -> None:
    """What lives long must not make what comes and goes grow."""
    grown = Grown()
    kept = []
    for _ in range(50):
        large = grown.pool.take(SEGMENT // 2)
        kept.append(grown.pool.take(LINE))
        grown.pool.give(*large)
    assert len(grown.segments) == 1
    assert len({offset for _, offset, _ in kept}) == 50


def test_a_pool_that_cannot_grow_goes_on_with_what_it_has() -> None:
    grown = Grown()
    part = grown.pool.take(SEGMENT)

    def refuse(nbytes: int) -> Memory:
        raise OSError("full")

    grown.pool._grow = refuse
    for _ in range(3):
        with pytest.raises(OSError, match="full"):
            grown.pool.take(1)
    grown.pool.give(*part)
    assert grown.pool.take(SEGMENT) == part
    assert grown.pool.nbytes == SEGMENT


def test_threads_may_give_while_another_takes() -> None:
    grown = Grown()
    parts: list[tuple[Memory, int, int]] = []
    lock, done = threading.Lock(), threading.Event()

    def give() -> None:
        while not done.is_set() or parts:
            with lock:
                part = parts.pop() if parts else None
            if part is not None:
                grown.pool.give(*part)

    threads = [threading.Thread(target=give) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(3000):
            part = grown.pool.take(100 * (number % 90))
            with lock:
                parts.append(part)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    count = len(grown.segments)
    for segment in list(grown.segments):
        grown.pool.take(segment.nbytes)
    assert len(grown.segments) == count
