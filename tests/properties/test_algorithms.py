"""Every algorithm against the oracle: many numbers of ranks, odd sizes, and hosts of any shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from support import oracle
from support.arrays import array_of, arrays_of, check_same
from support.bodies import movement, reductions
from support.bodies.movement import ALGORITHMS, check_movements
from support.bodies.reductions import CANONICAL, check_reductions
from support.cases import MANY_ELEMENTS
from support.spmd import run

import fsdpcore as fc
from fsdpcore.collectives.algorithms import halving
from fsdpcore.collectives.hierarchy import hierarchical
from fsdpcore.collectives.selection import table as algorithms

# A rank that waits in vain does so in every example: shrinking would take minutes.
SETTINGS = settings(
    deadline=None,
    max_examples=15,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# Deadlines in seconds, a thousand times as long as a call takes of few ranks, and of many.
SOON, LATER = 5.0, 10.0
MANY = settings(SETTINGS, max_examples=200, derandomize=False, database=None, phases=tuple(Phase))


def test_nobody_waits_in_vain() -> None:
    """Few ranks, little data and a short deadline: what does not fit together is told soon."""
    for size in (2, 3, 6, 7):
        counts, half = [rank % 3 for rank in range(size)], np.dtype(np.float16)
        for hosts in ([0] * size, [rank // 2 for rank in range(size)]):
            even = (hosts, size + 1, np.dtype(np.float32), "sum", 1)
            run(even_chunks, transport="sim", world_size=size, args=even, op_timeout=SOON)
            uneven = (hosts, counts, half, "mean", 1)
            run(uneven_chunks, transport="sim", world_size=size, args=uneven, op_timeout=SOON)


@st.composite
def _jobs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """The host of every rank, and the rows of every rank's chunk, often none."""
    size = draw(st.integers(1, 17))
    count = draw(st.integers(1, 4))
    hosts = draw(
        st.just([rank * min(count, size) // size for rank in range(size)])
        | st.just([rank % count for rank in range(size)])
        | st.lists(st.integers(0, count), min_size=size, max_size=size)
    )
    rows = st.integers(0, 3) | st.sampled_from([0, 0, 40])
    return hosts, draw(st.lists(rows, min_size=size, max_size=size))


UNEVEN: dict[str, Any] = {
    "job": _jobs(),
    "combination": st.sampled_from(oracle.COMBINATIONS),
    "columns": st.sampled_from([1, 3]),
    "eager_bytes": st.sampled_from([0, 4096]),
}
EVEN: dict[str, Any] = {
    "job": _jobs(),
    "rows": st.integers(0, 40),
    "combination": st.sampled_from(oracle.COMBINATIONS),
    "where": st.integers(0, 16),
}


@SETTINGS
@given(**UNEVEN)
@example(([0] * 17, [1] * 17), (np.dtype(np.float32), "sum"), 1, 0)
@example(([rank // 4 for rank in range(15)], [2] * 15), (oracle.HALVES[1], "mean"), 1, 0)
@example(([rank // 3 for rank in range(14)], [2] * 14), (oracle.HALVES[0], "sum"), 1, 0)
def test_uneven_chunks(
    job: tuple[list[int], list[int]], combination: Any, columns: int, eager_bytes: int
) -> None:
    _run_uneven(job, combination, columns, eager_bytes)


def _run_uneven(
    job: tuple[list[int], list[int]], combination: Any, columns: int, eager_bytes: int
) -> None:
    args = (*job, *combination, columns)
    options = {"eager_bytes": eager_bytes, "op_timeout": LATER}
    run(uneven_chunks, transport="sim", world_size=len(job[0]), args=args, **options)


def uneven_chunks(
    backend: Any, hosts: list[int], counts: list[int], dtype: Any, op: str, columns: int
) -> None:
    backend.hosts = tuple(hosts)
    me, p = backend.rank, backend.world_size
    ends = np.cumsum([0, *counts])
    parts = arrays_of(p, (sum(counts), columns), dtype)
    own = oracle.reduced(parts, op)[ends[me] : ends[me + 1]]
    mine = parts[me].copy()
    for name in CANONICAL["reduce_scatter"]:
        result = fc.reduce_scatter_v(mine, backend, counts, op=op, algorithm=name)
        check_same(result, own, f"reduce_scatter_v, {name}, {counts}, {hosts}")
        check_same(mine, parts[me], f"the input of {name}")
    chunks = [array_of(rank, (rows, columns), dtype) for rank, rows in enumerate(counts)]
    for name in ALGORITHMS["all_gather"]:
        result = fc.all_gather_v(chunks[me], backend, algorithm=name)
        check_same(result, oracle.joined(chunks), f"all_gather_v, {name}, {counts}, {hosts}")
    table = [[(s + counts[r] * r) % 4 for r in range(p)] for s in range(p)]
    sources = [array_of(rank, (sum(table[rank]), columns), dtype) for rank in range(p)]
    for name in ALGORITHMS["all_to_all"]:
        result = fc.all_to_all_v(sources[me], backend, table[me], algorithm=name)
        check_same(result, oracle.exchanged(sources, table, me), f"all_to_all_v, {name}")


@SETTINGS
@given(**EVEN)
def test_even_chunks(
    job: tuple[list[int], list[int]], rows: int, combination: Any, where: int
) -> None:
    _run_even(job, rows, combination, where)


def _run_even(job: tuple[list[int], list[int]], rows: int, combination: Any, where: int) -> None:
    hosts = job[0]
    args = (hosts, rows, *combination, where % len(hosts))
    run(even_chunks, transport="sim", world_size=len(hosts), args=args, op_timeout=LATER)


def even_chunks(backend: Any, hosts: list[int], rows: int, dtype: Any, op: str, root: int) -> None:
    backend.hosts = tuple(hosts)
    parts = arrays_of(backend.world_size, (rows,), dtype)
    check_reductions(backend, parts, op, root)
    check_movements(backend, parts, root)


def test_ragged_calls_choose_by_the_rows_of_all_ranks() -> None:
    """A rank with few rows, and one with most of them, take the same algorithm."""
    rooted = "tree:0-64KiB;star:65537-max"
    gathers = "direct:0-64KiB;ring:65537-max"
    overrides = {"all_gather": gathers, "gather": rooted, "scatter": rooted}
    options = {"algorithms": overrides, "shm": "off", "op_timeout": SOON}
    run(_very_different_rows, transport="sim", world_size=4, **options)


def _very_different_rows(backend: Any) -> None:
    me, p = backend.rank, backend.world_size
    for rows, rooted, other in (
        ([3, 20_000, 3, 5_000], "star", "ring"),
        ([3, 5, 0, 9], "tree", "direct"),
    ):
        parts = [np.full(count, rank, np.float32) for rank, count in enumerate(rows)]
        whole = oracle.joined(parts)
        for root in range(p):
            gathered = fc.gather_v(parts[me], backend, root=root)
            if me == root:
                check_same(gathered, whole, f"gather_v to {root}")
            given = (whole, rows) if me == root else (None, None)
            part = fc.scatter_v(given[0], backend, given[1], root=root)
            check_same(part, parts[me], f"scatter_v from {root}")
        check_same(fc.all_gather_v(parts[me], backend), whole, "all_gather_v")
        found = [each.carrier for each in backend.root.recorder.entries()][-3:]
        assert found == [rooted, rooted, other]


@pytest.mark.campaign
def test_chunks_of_many_jobs() -> None:
    MANY(given(**UNEVEN)(_run_uneven))()
    MANY(given(**EVEN)(_run_even))()


@pytest.mark.parametrize(("size", "hosts"), [(6, 2)])
@pytest.mark.parametrize("body", [reductions.large_arrays, movement.large_arrays])
def test_large_arrays_on_hosts(body: Any, size: int, hosts: int) -> None:
    """More than one block of the reductions for every rank's chunk."""
    options = {"hosts": hosts, "eager_bytes": 0, "op_timeout": LATER}
    run(body, transport="sim", world_size=size, args=(MANY_ELEMENTS,), **options)


def test_the_lists_above_are_complete() -> None:
    for collective, known in algorithms.ALGORITHMS.items():
        names = {**CANONICAL, **ALGORITHMS}[collective]
        assert {"auto", *(n for n, a in known.items() if a.canonical)} <= {*names}


# The plans behind them.


@pytest.mark.parametrize("p", range(1, 34))
def test_halving_plans_fit_together(p: int) -> None:
    """Whoever sends positions of its order, the receiver keeps the same chunks in that order."""
    plans = [halving.plan(rank, p) for rank in range(p)]
    kept = {}
    for rank, plan in enumerate(plans):
        assert sorted(plan.order) == list(range(p))
        for number, merge in enumerate(plan.merges):
            kept[merge.source, rank] = plan.order[merge.first : merge.end]
            inside = range(plan.merges[number - 1].first, plan.merges[number - 1].end)
            assert number == 0 or {merge.first, merge.end - 1} <= {*inside}
    sent = {
        (rank, send.target): plan.order[send.first : send.end]
        for rank, plan in enumerate(plans)
        for merge in plan.merges
        for send in merge.sends
    }
    assert sent == kept
    left = next(w for w in (1, 2, 4, 8, 16, 32) if 2 * w >= p)
    assert all(plan.order == plans[0].order for plan in plans[: p if p == 2 * left else left])
    for rank, plan in enumerate(plans if p > 1 else []):
        last = plan.merges[-1]
        assert plan.order[last.first : last.end] == [rank]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_blocks_of_hosts_cover_each_rank_once(hosts: list[int]) -> None:
    """They are aligned subtrees, within one host, and no two of them are one subtree."""
    arrangement = hierarchical.Arrangement(hosts)
    seen = []
    for host, blocks in arrangement.blocks.items():
        for low, high in blocks:
            assert set(hosts[low:high]) == {host}
            size = 1
            while size < high - low:
                size *= 2
            assert low % size == 0
            assert high in (low + size, len(hosts))
            seen += range(low, high)
            sibling = low - size if low // size % 2 else low + size
            other = (sibling, min(sibling + size, len(hosts)))
            assert other not in blocks or sibling >= len(hosts)
    assert sorted(seen) == list(range(len(hosts)))
