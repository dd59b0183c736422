"""The shared region: every collective through memory that all ranks see, ranks being threads."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fsdpcore.transports.simulated.backend import SimBackend
from support import oracle
from support.arrays import arrays_of, check_same
from support.bodies import asynchronous, layouts, movement, reductions, scans
from support.counting import CountingSim, counters
from support.sharing import ReluctantSim, SharingSim, _OfRank
from support.spmd import meet, run_on
from support.waits import waiting_asleep

import fsdpcore as fc
from fsdpcore.collectives.shared import algorithm as shared
from fsdpcore.collectives.shared import interpreter, region
from fsdpcore.collectives.shared.thread_region import ThreadRegion
from fsdpcore.collectives.state import state_of

SIZES = (1, 3, 7)


@pytest.fixture(autouse=True)
def _threads_let_each_other_run() -> Iterator[None]:
    with waiting_asleep():
        yield


def _shares(backend: fc.Backend) -> bool:
    backend.barrier()
    assert state_of(backend).context is not None
    return state_of(backend).context.region is not None


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("body", [reductions.every_shape, movement.every_shape, scans.shapes])
def test_auto_goes_through_the_region(body: Any, world_size: int) -> None:
    run_on(SharingSim, _auto, world_size=world_size, args=(body,), max_delay=1e-4, seed=1)


@pytest.mark.parametrize("world_size", [5])
@pytest.mark.parametrize(
    "body",
    [scans.combinations, scans.exclusive, scans.exclusive_of_nothing, scans.where_results_go],
)
def test_scans_go_through_the_region(body: Any, world_size: int) -> None:
    run_on(SharingSim, _auto, world_size=world_size, args=(body,), max_delay=1e-4, seed=1)


@pytest.mark.parametrize("world_size", [3])
@pytest.mark.parametrize("body", [reductions.every_dtype_and_op, movement.every_dtype])
def test_every_dtype_goes_through_the_region(body: Any, world_size: int) -> None:
    run_on(SharingSim, _auto, world_size=world_size, args=(body,), max_delay=1e-4, seed=1)


@pytest.mark.campaign
@pytest.mark.parametrize("world_size", [1, 2, 5, 8])
@pytest.mark.parametrize("body", [reductions.every_dtype_and_op, movement.every_dtype])
def test_every_dtype_on_other_numbers_of_ranks(body: Any, world_size: int) -> None:
    run_on(SharingSim, _auto, world_size=world_size, args=(body,), max_delay=1e-4, seed=1)


def _auto(backend: fc.Backend, body: Any, *args: int) -> None:
    assert _shares(backend) == (backend.world_size > 1)
    body(backend, *args)
    if backend.world_size > 1:
        names = {
            spec.record.algorithm for spec in state_of(backend).specs.values() if spec.collective
        }
        assert shared.NAME in names


@pytest.mark.parametrize("world_size", [2, 5])
@pytest.mark.parametrize("over", [-8, 0, 8, 1 << 20])
def test_arrays_around_the_size_of_a_room(world_size: int, over: int) -> None:
    run_on(SharingSim, _around_a_room, world_size=world_size, args=(over,))


def _around_a_room(backend: fc.Backend, over: int) -> None:
    p, me = backend.world_size, backend.rank
    room = region.staging_bytes(p)
    for nbytes in (room + over, p * room + over, shared.SMALL + over):
        parts = arrays_of(p, (nbytes // 8,), np.dtype(np.float64))
        mine, total = parts[me], oracle.reduced(parts, "sum")
        check_same(fc.all_reduce(mine, backend), total, "all_reduce")
        check_same(fc.all_gather(mine, backend), oracle.joined(parts), "all_gather")
        check_same(fc.broadcast(mine, backend, root=p - 1), parts[p - 1], "broadcast")
        own = oracle.pieces(total, p)[me]
        check_same(fc.reduce_scatter(mine, backend), own, "reduce_scatter")
        check_same(fc.reduce_scatter(mine.copy(), backend, op="sum"), own, "reduce_scatter")
        arriving = oracle.joined([oracle.pieces(part, p)[me] for part in parts])
        check_same(fc.all_to_all(mine, backend), arriving, "all_to_all")
        root = 1 % p
        reduced = fc.reduce(mine, backend, root=root)
        gathered = fc.gather(mine, backend, root=root)
        scattered = fc.scatter(mine if me == root else None, backend, root=root)
        check_same(scattered, oracle.pieces(parts[root], p)[me], "scatter")
        if me == root:
            check_same(reduced, total, "reduce")
            check_same(gathered, oracle.joined(parts), "gather")


@pytest.mark.parametrize("world_size", [2, 3])
def test_calls_of_one_kind_take_turns_where_each_rank_has_a_core(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cores in (world_size, world_size - 1):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: range(cores))
        written = run_on(SharingSim, _one_after_the_other, world_size=world_size)
        if cores < world_size:  # one place in steps of either parity
            assert all(places <= 2 and looks == 0 for places, looks in written)
        else:
            assert all(places >= 8 and looks > 0 for places, looks in written)


def _one_after_the_other(backend: fc.Backend) -> tuple[int, int]:
    p, me = backend.world_size, backend.rank
    written = set()
    for number in range(40):  # more than there are places, in steps of either parity
        parts = [_counting(region.staging_bytes(p) // 64, p * number + r) for r in range(p)]
        total = oracle.reduced(parts, "sum")
        check_same(fc.all_reduce(parts[me], backend, algorithm="shared"), total, "all_reduce")
        check_same(fc.all_gather(parts[me], backend), oracle.joined(parts), "all_gather")
        check_same(fc.reduce_scatter(parts[me], backend), oracle.pieces(total, p)[me], "scatter")
        written.update(_places_of(backend, parts[me][-1]))
    return len(written), region.region_of(state_of(backend).context).looks


def test_a_thread_that_was_woken_too_often_does_not_look_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = []
    monkeypatch.setattr(ThreadRegion, "_look_for_others", lambda *args: looks.append(args))

    def gather(backend: fc.Backend) -> None:
        given, taken = np.zeros(1 << 17), np.zeros(1 << 18)
        for _ in range(100):
            fc.all_gather(given, backend, out=taken)

    fc.launch(gather, world_size=2, transport="sim")
    assert len(looks) < 20  # some after a long wait, where the machine is busy


def _places_of(backend: fc.Backend, value: Any) -> list[int]:
    """Where a value is in this rank's staging buffers."""
    context = state_of(backend).context
    assert context is not None
    shared_region = region.region_of(context)
    assert shared_region is not None
    buffers = shared_region.staging(np.dtype(np.int32), shared_region.staging_bytes // 4)
    return [int(at) for ranks in buffers for at in np.flatnonzero(ranks[backend.rank] == value)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ragged_calls_of_very_different_sizes(world_size: int) -> None:
    run_on(SharingSim, _ragged, world_size=world_size)


def _counting(count: int, start: int) -> Any:
    return np.arange(start, start + count, dtype=np.int32)


def _ragged(backend: fc.Backend) -> None:
    p, me = backend.world_size, backend.rank
    many = 2 * region.staging_bytes(p) // 4 + 3
    rows = [0] * p
    rows[-1] = many
    parts = [_counting(count, r) for r, count in enumerate(rows)]
    check_same(fc.all_gather_v(parts[me], backend), oracle.joined(parts), "all_gather_v")
    gathered = fc.gather_v(parts[me], backend, root=0)
    if me == 0:
        check_same(gathered, oracle.joined(parts), "gather_v")
    whole = _counting(many, 9)
    own = fc.scatter_v(whole if me == 0 else None, backend, rows if me == 0 else None)
    check_same(own, whole if me == p - 1 else whole[:0], "scatter_v")
    counts = [[(r * p + s) % 3 * (many // 4) for s in range(p)] for r in range(p)]
    sources = [_counting(sum(row), r) for r, row in enumerate(counts)]
    result = fc.all_to_all_v(sources[me], backend, counts[me])
    check_same(result, oracle.exchanged(sources, counts, me), "all_to_all_v")
    for turn in range(3):  # rank 0 sends the same every time, and gets something else
        counts = [[2 + turn * r] * p for r in range(p)]
        sources = [_counting(sum(row), r) for r, row in enumerate(counts)]
        result = fc.all_to_all_v(sources[me], backend, counts[me], algorithm="shared")
        check_same(result, oracle.exchanged(sources, counts, me), "all_to_all_v, again")


def test_who_exchanges_little_takes_as_many_turns_as_the_others() -> None:
    run_on(SharingSim, _one_pair_exchanges_much, world_size=3)


def _one_pair_exchanges_much(backend: fc.Backend) -> None:
    p, me = backend.world_size, backend.rank
    many = 2 * region.staging_bytes(p) // 4 + 3
    counts = [[many if (r, s) == (0, 1) else 1 for s in range(p)] for r in range(p)]
    sources = [_counting(sum(row), r) for r, row in enumerate(counts)]
    result = fc.all_to_all_v(sources[me], backend, counts[me], algorithm="shared")
    check_same(result, oracle.exchanged(sources, counts, me), "all_to_all_v")


def test_own_parts_of_what_is_copied_late() -> None:
    """Above some MiB a rank copies its own part after the first turn, whatever is staged."""
    run_on(SharingSim, _own_parts_of_large_arrays, world_size=2)


def _own_parts_of_large_arrays(backend: fc.Backend) -> None:
    p, me = backend.world_size, backend.rank
    parts = [_counting(interpreter._EARLY // 4 + 8, r) for r in range(p)]
    joined = fc.all_gather(parts[me], backend, algorithm="shared")
    check_same(joined, oracle.joined(parts), "all_gather")
    gathered = fc.gather(parts[me], backend, root=1, algorithm="shared")
    if me == 1:
        check_same(gathered, oracle.joined(parts), "gather")
    scattered = fc.scatter(parts[1] if me == 1 else None, backend, root=1, algorithm="shared")
    check_same(scattered, oracle.pieces(parts[1], p)[me], "scatter")
    arriving = oracle.joined([oracle.pieces(part, p)[me] for part in parts])
    check_same(fc.all_to_all(parts[me], backend, algorithm="shared"), arriving, "all_to_all")


def test_layouts() -> None:
    for body in (layouts.every_layout, layouts.own_chunk_in_place, layouts.partial_overlap):
        run_on(SharingSim, body, world_size=3)


def test_async_operations_and_groups_have_regions_of_their_own() -> None:
    run_on(SharingSim, asynchronous.every_collective, world_size=4)
    run_on(SharingSim, _groups, world_size=4)


def _groups(backend: fc.Backend) -> None:
    pair = backend.sub([0, 1] if backend.rank < 2 else [2, 3])
    works = []
    for number in range(20):
        works.append(fc.all_reduce(np.full(3, backend.rank + number), backend, async_op=True))
        works.append(fc.all_reduce(np.full(3, backend.rank * number), pair, async_op=True))
    for number in range(20):
        assert works[2 * number].wait().tolist() == [6 + 4 * number] * 3
        low = 2 * (backend.rank // 2)
        assert works[2 * number + 1].wait().tolist() == [(2 * low + 1) * number] * 3
    assert _shares(pair)
    assert state_of(pair).context is not state_of(backend).context
    assert state_of(pair).context is not None
    assert state_of(backend).context is not None
    assert state_of(pair).context.region is not state_of(backend).context.region
    pair.close()
    assert _shares(backend)


def test_one_rank_that_cannot_map_it_keeps_all_away_from_it() -> None:
    assert run_on(ReluctantSim, _shares, world_size=3) == [False] * 3
    assert run_on(ReluctantSim, _shares, world_size=2) == [True] * 2


def test_hosts_do_not_share() -> None:
    assert run_on(SharingSim, _shares, world_size=3, hosts=2) == [False] * 3


def test_an_explicit_choice() -> None:
    run_on(SharingSim, _explicit, world_size=3)


def _explicit(backend: fc.Backend) -> None:
    result = fc.all_reduce(np.arange(4), backend, algorithm="shared")
    assert result.tolist() == [0, 3, 6, 9]
    with pytest.raises(fc.ArgumentError, match="'shared'"):
        fc.all_reduce(np.arange(4), backend, algorithm="shred")


def test_ranks_that_disagree_are_told() -> None:
    run_on(SharingSim, _disagree, world_size=3)


def _disagree(backend: fc.Backend) -> None:
    assert _shares(backend)
    with pytest.raises(fc.MismatchError) as caught:
        fc.all_reduce(np.zeros(2 + (backend.rank == 1)), backend)
    assert "rank 1: all_reduce(sum, float64 of shape (3,))" in str(caught.value)
    assert "ranks 0, 2: all_reduce(sum, float64 of shape (2,))" in str(caught.value)


def test_a_rank_that_does_not_come_is_named() -> None:
    run_on(SharingSim, _absent, world_size=3, timeout=15)


def _absent(backend: fc.Backend) -> None:
    assert _shares(backend)
    if backend.rank == 1:
        gone.wait(10)
        return
    try:
        # The first to give up tells the other.
        # A slow machine may keep one of the others away for as long.
        missing = r"ranks? (0, )?1(, 2)? (is|are) missing"
        with pytest.raises((fc.CommTimeoutError, fc.PeerFailedError), match=missing):
            fc.all_reduce(np.zeros(2), backend, timeout=0.3)
    finally:
        waiting.discard(backend.rank)
        if not waiting:
            gone.set()


gone = threading.Event()
waiting = {0, 2}


def test_one_deadline_counts_for_all_ranks_that_are_late() -> None:
    """The second call of a kind takes the fast path, where there is one."""
    args = (threading.Event(), {})
    run_on(SharingSim, _late, world_size=3, op_timeout=3.0, args=args)


def _late(backend: fc.Backend, over: threading.Event, times: dict[str, float]) -> None:
    array = np.zeros(2)
    fc.all_reduce(array, backend)
    assert {
        spec.fast_path is not None for spec in state_of(backend).specs.values() if spec.collective
    } == {True}
    if backend.rank == 0:
        with pytest.raises(fc.CommTimeoutError, match=r"ranks? (1, )?2 (is|are) missing"):
            fc.all_reduce(array, backend)
        times["given up"] = time.monotonic()
        over.set()
    else:
        if backend.rank == 1:
            time.sleep(2.0)
            times["second"] = time.monotonic()
        else:
            over.wait(15.0)
        with contextlib.suppress(fc.PeerFailedError):
            fc.all_reduce(array, backend)
    meet()
    # A deadline that began anew with rank 1 would have ended three seconds after that.
    assert times["given up"] - times["second"] < 3.0


def test_groups_that_are_dropped_are_forgotten_with_their_memory() -> None:
    run_on(SharingSim, _drop_groups, world_size=2)


def _drop_groups(backend: fc.Backend) -> None:
    groups = []
    for _ in range(5):
        group = backend.sub([0, 1])
        fc.all_reduce(np.zeros(2), group)
        fc.all_reduce(np.zeros(2), group)
        assert state_of(group).context is not None
        groups.append(weakref.ref(state_of(group).context.region))
    del group
    backend.barrier()
    end = time.monotonic() + 10
    while any(group() for group in groups) and time.monotonic() < end:
        gc.collect()  # does nothing while the thread of another rank collects
        time.sleep(0.01)
    assert [group() for group in groups] == [None] * 5


def test_a_wrong_root_is_refused_whatever_was_called_before() -> None:
    run_on(SharingSim, _wrong_root, world_size=2)


def _wrong_root(backend: fc.Backend) -> None:
    for root in (1.0, 1, 1.0):
        if isinstance(root, int):
            fc.broadcast(np.zeros(2), backend, root=root)
        else:
            with pytest.raises(fc.ArgumentError, match="a rank must be an integer"):
                fc.broadcast(np.zeros(2), backend, root=root)  # type: ignore[arg-type]


@pytest.mark.parametrize("shift", [1, -1, 50_000])
def test_out_that_overlaps_the_input_in_part(shift: int) -> None:
    run_on(SharingSim, _overlap, world_size=2, args=(shift,))


def _overlap(backend: fc.Backend, shift: int) -> None:
    size = 3 * region.staging_bytes(2) // 8
    buffer = np.arange(size + abs(shift), dtype=np.float64)
    source, out = buffer[:size], buffer[abs(shift) :]
    if shift < 0:
        source, out = out, source
    expected = 2 * source
    check_same(fc.all_reduce(source, backend, out=out), expected, "all_reduce")


_TABLE = """
format = 1
[sim]
alpha = 30e-6
beta = 0.04e-9
gamma = 0.1e-9
[[sim.measured]]
ranks = 3
hosts = 1
all_gather = "direct:0-max"
all_reduce = "direct:0-max"
broadcast = "tree:0-max"
gather = "star:0-max"
reduce_scatter = "direct:0-max"
scatter = "star:0-max"
"""


@pytest.mark.parametrize("ranks", [SharingSim, SimBackend])
def test_the_fast_path_and_the_ordinary_way_mix_whatever_the_table_says(
    ranks: Any, tmp_path: Path
) -> None:
    """Which way a rank goes is its own affair: here every third call has a deadline."""
    table = tmp_path / "table.toml"
    table.write_text(_TABLE)
    run_on(ranks, _mixed_ways, world_size=3, tuning=str(table))


def _mixed_ways(backend: fc.Backend) -> None:
    p, me = backend.world_size, backend.rank
    for count in (2, 1000, 2046, 2049, 3 * 2048, 90_000):
        source = np.full(count, me + 1.0, np.float32)
        for turn in range(6):
            options = {"timeout": 50.0} if (me + turn) % 3 == 0 else {}
            whole = fc.all_gather(source, backend, **options)
            assert (whole.reshape(p, count) == [[1], [2], [3]]).all()
            assert (fc.all_reduce(source, backend, **options) == 6).all()
            assert (fc.reduce_scatter(source, backend, **options) == 6).all()
            assert (fc.broadcast(source, backend, root=2, **options) == 3).all()
            gathered = fc.gather(source, backend, root=1, **options)
            assert me != 1 or (gathered.reshape(p, count) == [[1], [2], [3]]).all()
            ragged = fc.all_gather_v(source[: me * count // 2], backend, **options)
            assert ragged.tolist() == [2.0] * (count // 2) + [3.0] * count
            part = fc.scatter(source if me == 0 else None, backend, **options)
            assert (part == 1).all()
            assert part.size == count // p + (me < count % p)


def test_arrays_in_memory_of_a_rank_alone_go_by_the_fallback(tmp_path: Path) -> None:
    """From the first call on, also where the ranks choose once they know all sizes."""
    table = tmp_path / "table.toml"
    table.write_text(_TABLE)
    run_on(_CountingSharing, _by_fallback, world_size=3, tuning=str(table))


class _CountingSharing(CountingSim, SharingSim):
    pass


def _by_fallback(backend: fc.Backend) -> None:
    source = np.ones(3000)
    for _ in range(2):
        fc.all_reduce(source, backend)
        fc.all_gather_v(source, backend)
    found = [(each.call.operation, each.carrier) for each in backend.root.recorder.entries()]
    assert found == 2 * [("all_reduce", "direct"), ("all_gather_v", "direct")]
    sent = counters(backend)[0]
    with fc.coalesce(backend) as batch:
        batch.all_reduce(source)
    assert counters(backend)[0] > sent


@pytest.mark.parametrize("ranks", [SharingSim, SimBackend])
def test_a_rank_lets_go_of_what_it_has_published(ranks: Any) -> None:
    run_on(ranks, _lets_go, world_size=3)


def _lets_go(backend: fc.Backend) -> None:
    for _ in range(2):
        source = np.ones(3000)
        kept = weakref.ref(source)
        fc.all_reduce(source, backend)
        del source
        meet()
        assert kept() is None


def test_a_rank_whose_failure_has_no_words_keeps_all_from_sharing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def meet(self: Any, introduction: bytes) -> None:
        if self._rank == 1:
            raise OSError

    monkeypatch.setattr(_OfRank, "meet", meet)
    assert run_on(SharingSim, _shares, world_size=2) == [False, False]


@pytest.mark.parametrize("ranks", [SharingSim, SimBackend])
def test_a_group_is_closed_while_another_thread_is_in_a_collective_of_it(ranks: Any) -> None:
    run_on(ranks, _close_while_waiting, world_size=2)


def _close_while_waiting(backend: fc.Backend) -> None:
    group = backend.sub([0, 1])
    fc.all_reduce(np.ones(2), group)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(fc.all_reduce(np.ones(2), group)))
    if backend.rank == 0:
        thread.start()
        while group.order.begun < 2:
            time.sleep(0.001)
        closing = threading.Thread(target=group.close)
        closing.start()
        backend.barrier()
        closing.join()
    else:
        backend.barrier()
        thread.start()
    thread.join()
    assert (results[0] == 2).all()
    backend.barrier()


@pytest.mark.parametrize("world_size", [17, 18, 19, 300])
def test_the_last_of_many_threads_wakes_all(world_size: int) -> None:
    # In virtual time, where a rank that is left asleep sleeps on for a time that is known.
    pytest.importorskip("greenlet")
    taken = fc.launch(_steps, world_size=world_size, transport="sim", clock="virtual")
    assert max(taken) < 0.01


def _steps(backend: fc.Backend) -> float:
    start = backend.clock.now()
    for _ in range(5):
        backend.barrier()
    taken = backend.clock.now() - start
    assert _shares(backend)
    total = np.full(3, float(backend.world_size))
    check_same(fc.all_reduce(np.ones(3), backend), total, "all_reduce")
    return taken


def test_one_of_many_threads_calls_something_else_or_leaves() -> None:
    pytest.importorskip("greenlet")
    for odd, words in ((_calls_another, "broadcast"), (_leaves, "rank 7 has left the job")):
        with pytest.raises(fc.RankFailedError, match=words):
            fc.launch(odd, world_size=100, transport="sim", clock="virtual")


def _calls_another(backend: fc.Backend) -> None:
    backend.barrier()
    if backend.rank == 7:
        fc.broadcast(np.ones(3), backend)
    else:
        backend.barrier()


def _leaves(backend: fc.Backend) -> None:
    backend.barrier()
    if backend.rank != 7:
        backend.barrier(timeout=1e3)


def test_who_has_come_and_left_while_it_was_looked_for_has_come() -> None:
    size = 2
    here = region.SharedRegion(np.zeros(region.nbytes(size), np.uint8), 0, size, None)
    at = here._all[1][1]

    def departed(rank: int) -> bool:
        here.flags[at] = 1  # the last that it does
        return True

    missed = lambda rank: AssertionError(f"rank {rank} is missed")  # noqa: E731
    context = SimpleNamespace(check=lambda: None, departed=departed, missed=missed)
    if not here.arrived(at, 1, context):  # asked again, it has
        assert here.arrived(at, 1, context)
