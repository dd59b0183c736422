"""Movements as data: one that no collective has goes through the same interpreter."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.sharing import SharingSim
from support.spmd import run_on
from support.waits import waiting_asleep

import fsdpcore as fc
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.movements import Move, Movement, inputs, outputs
from fsdpcore.collectives.operations.table import OPERATIONS
from fsdpcore.collectives.run import run
from fsdpcore.collectives.shared import region
from fsdpcore.collectives.shared.interpreter import SMALL, BoundMovement, move
from fsdpcore.collectives.shared.program import program
from fsdpcore.collectives.shared.schedule import RankSchedule
from fsdpcore.collectives.spec import Layout
from fsdpcore.collectives.state import state_of
from fsdpcore.core.reductions import Reduction


@pytest.fixture(autouse=True)
def _threads_let_each_other_run() -> Iterator[None]:
    with waiting_asleep():
        yield


def _neighbours(divided: bool, ranks: range, root: int) -> list[Move]:
    """To each rank its own input and the next rank's, reduced; to the last one its own."""
    last = ranks[-1]
    pairs = [Move(outputs([r]), inputs([r, r + 1]), divided) for r in ranks[:-1]]
    return [*pairs, Move(outputs([last]), inputs([last]), divided)]


_MOVEMENTS = [functools.partial(_neighbours, divided) for divided in (False, True)]


def _invented(backend: fc.Backend, movement: Movement, count: int, published: bool) -> None:
    me, dtype = backend.rank, np.dtype(np.int64)
    make = backend.empty if published else np.empty
    fc.all_reduce(np.zeros(count, dtype), backend, algorithm="shared")
    (spec,) = [spec for spec in state_of(backend).specs.values() if spec.collective]
    layout = Layout(0, Reduction.of("sum", dtype))
    for turn in range(3):
        source, out = make((count,), dtype), make((count,), dtype)
        source[:] = np.arange(count) + me + turn
        out[:] = -1

        def body(context: CollectiveContext, source: Any = source, out: Any = out) -> None:
            move(context, movement, layout, source, out)

        run(backend, spec, body, timeout=None, async_op=False)
        expected = np.arange(count) + me + turn
        if me < backend.world_size - 1:
            expected = 2 * expected + 1
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("count", [0, 5, 1000, 70_001])
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_a_movement_of_no_collective(
    world_size: int, divided: bool, count: int, published: bool
) -> None:
    args = (_MOVEMENTS[divided], count, published)
    run_on(SharingSim, _invented, world_size=world_size, args=args)


def _prefixes(backend: fc.Backend, count: int, published: bool, in_place: bool) -> None:
    me = backend.rank
    make = backend.empty if published else np.empty
    for scan, before in ((fc.scan, me + 1), (fc.exscan, me)):
        for turn in range(3):
            source = make((count,), np.dtype(np.int64))
            source[:] = np.arange(count) + me + turn
            out = source if in_place else make((count,), np.dtype(np.int64))
            assert scan(source, backend, out=out, algorithm="shared") is out
            expected = (np.arange(count) + turn) * before + before * (before - 1) // 2
            np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("count", [0, 5, 1000, 70_001])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_scans(world_size: int, count: int, published: bool, in_place: bool) -> None:
    args = (count, published, in_place)
    run_on(SharingSim, _prefixes, world_size=world_size, args=args)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_scans_of_several_blocks(world_size: int, in_place: bool) -> None:
    """Of published arrays: the chunk that a rank does is longer than what is reduced at once."""
    count = world_size * (2 * region.SharedRegion.block // 8 + 3)
    run_on(SharingSim, _prefixes, world_size=world_size, args=(count, True, in_place))


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_one_rank_does_grows_like_the_ranks(name: str) -> None:
    """Threads of one interpreter work it out one after the other, in the deadline of a call."""

    def parts(ranks: int) -> int:
        todo = program(OPERATIONS[name].movement, ranks, ranks - 1, 0)
        moves = [
            *todo.own,
            *todo.whole,
            *todo.published,
            *(m for part in todo.staged for m in part),
        ]
        return sum(len(move.targets) + len(move.sources) for move in moves)

    assert parts(128) <= 2 * parts(64) + 4


def test_two_ranks_divide_what_does_not_fit_twice_into_a_buffer() -> None:
    def steps(name: str, nbytes: int) -> int:
        bounds = (0, nbytes // 2, nbytes)
        movement = OPERATIONS[name].movement
        return len(RankSchedule(movement, 2, 0, 0, 1, nbytes, bounds, (), 1).staged)

    room = region.staging_bytes(2)
    assert [steps("all_reduce", nbytes) for nbytes in (room // 2, room // 2 + 2)] == [1, 2]
    assert steps("reduce", 4 * room) == 1  # which only one of them gets


def _ragged(backend: fc.Backend) -> None:
    first = SMALL // 8 + 1  # what moves shorter arrays lets go of its BoundMovement
    again = np.ones(first + 6)
    for turn in range(3):
        for size in range(first + 100 * turn, first + 100 * turn + 100):
            fc.all_reduce(np.ones(size), backend)
            fc.all_reduce(again, backend)
    gc.collect()
    mine = state_of(backend).context
    assert mine is not None
    made = [each for each in gc.get_objects() if type(each) is BoundMovement]
    kept = [each for each in made if each._context is mine]
    assert len(kept) <= 64 + 1


def test_a_size_that_comes_once_does_not_stay() -> None:
    """Of the kinds that a group has called once, it keeps what it has made for the last ones."""
    run_on(SharingSim, _ragged, world_size=2)


def _bound_once(backend: fc.Backend) -> None:
    array = np.ones(7)
    ways = []
    for _ in range(4):
        fc.all_reduce(array, backend)
        (spec,) = [spec for spec in state_of(backend).specs.values() if spec.collective]
        ways.append(spec.fast_path)
    assert ways[0] is not ways[1], "bound by the second call"
    assert ways[1] is ways[2] is ways[3], "and never again"


def test_a_kind_of_call_that_comes_again_is_bound_once() -> None:
    run_on(SharingSim, _bound_once, world_size=2)


def _root_alone(backend: fc.Backend, count: int) -> None:
    mine = np.full(count, backend.rank + 1)
    for _ in range(4):
        reduced = fc.reduce(mine, backend, root=1)
        gathered = fc.gather(mine, backend, root=1)
        if backend.rank != 1:
            assert reduced is None
            assert gathered is None
            continue
        np.testing.assert_array_equal(reduced, np.full(count, 6))
        np.testing.assert_array_equal(gathered, np.repeat([1, 2, 3], count))


@pytest.mark.parametrize("count", [5, 2000])
def test_only_the_root_has_a_result_however_often_it_is_called(count: int) -> None:
    run_on(SharingSim, _root_alone, world_size=3, args=(count,))
