"""``hierarchical`` with memory inside of hosts: what it sends, where it is taken, failures."""

from __future__ import annotations

import itertools
import logging
import threading
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fsdpcore.transports.simulated.backend import SimBackend
from support import oracle
from support.arrays import arrays_of, check_same
from support.bodies import movement, reductions
from support.counting import CountingSim, counters
from support.sharing import SharingSim
from support.spmd import meet, run, run_on

import fsdpcore as fc
from fsdpcore.collectives.hierarchy import costs as hierarchy_costs
from fsdpcore.collectives.operations.table import OPERATIONS
from fsdpcore.collectives.selection.choose import cheapest
from fsdpcore.collectives.shared.region import SharedRegion
from fsdpcore.collectives.state import state_of
from fsdpcore.core.capabilities import Capabilities
from fsdpcore.core.device import HOST
from fsdpcore.core.policy import Costs, Policy, Tuning

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


# What crosses between hosts.


def _subtrees(first: int, end: int, p: int) -> int:
    """How many nodes of the canonical tree it takes to cover the ranks from first to end."""
    if first == end:
        return 0
    size = 1
    while first % (2 * size) == 0 and (first + 2 * size <= end or end == p > first + size):
        size *= 2
    return 1 + _subtrees(min(first + size, end), end, p)


def _sent(backend: Any, collective: str, rows: int) -> list[int]:
    """Messages and bytes that one call sends, less what it takes for an empty array."""
    counts = []
    for count in (0, rows):
        mine = np.zeros(count // (backend.world_size if collective == "all_gather" else 1))
        before = counters(backend)
        getattr(fc, collective)(mine, backend, algorithm="hierarchical")
        if count == 0:  # the first one finds out about the memory
            before = counters(backend)
            getattr(fc, collective)(mine, backend, algorithm="hierarchical")
        counts.append([b - a for a, b in zip(before, counters(backend), strict=True)])
    assert state_of(backend).context.inside is not None
    return [b - a for a, b in zip(*counts, strict=True)][:2]


@pytest.mark.parametrize("rows", [12, 6000])  # per rank, around where slabs are packed
@pytest.mark.parametrize(("p", "hosts"), [(4, 2), (5, 2), (6, 2), (7, 3), (8, 4), (11, 4), (16, 2)])
def test_only_what_the_docstring_says_is_sent(p: int, hosts: int, rows: int) -> None:
    ends = [next(r for r in range(p + 1) if r * hosts >= host * p) for host in range(hosts + 1)]
    pairs = list(itertools.pairwise(ends))
    across = sum(_subtrees(a, b, p) * (p - (b - a)) for a, b in pairs)
    m = pairs[0][1] - pairs[0][0]
    rows *= p * m
    scattered, gathered = [across, Fraction(across, p)], [p * (hosts - 1), hosts - 1]
    expected = {
        "reduce_scatter": scattered,
        "all_gather": gathered,
        "all_reduce": [a + b for a, b in zip(scattered, gathered, strict=True)],
        "broadcast": [m * (hosts - 1), hosts - 1],
    }
    for collective in COLLECTIVES:
        args = (collective, rows)
        ranks = run_on(CountingSim, _sent, world_size=p, args=args, hosts=hosts)
        messages, nbytes = (sum(column) for column in zip(*ranks, strict=True))
        assert [messages, Fraction(nbytes, 8 * rows)] == expected[collective], collective


# One host shares memory, another does not.


class _HalfSharing(SharingSim):
    """Rank 2 cannot map the memory of others, so its host sends messages."""

    refusing = frozenset({2})


def _mixed(backend: fc.Backend, body: Any, without: list[int]) -> None:
    backend.barrier()
    assert state_of(backend).context is not None
    assert state_of(backend).context.inside is not None
    assert (state_of(backend).context.inside.region is None) == (backend.rank in without)
    assert "hierarchical" not in state_of(backend).own_algorithms.get("all_reduce", {})
    body(backend)


@pytest.mark.parametrize("body", [reductions.every_shape, movement.every_shape])
@pytest.mark.parametrize(("p", "hosts", "without"), [(4, 2, [2, 3]), (7, 2, [0, 1, 2, 3])])
def test_hosts_need_not_be_alike(body: Any, p: int, hosts: int, without: list[int]) -> None:
    run_on(_HalfSharing, _mixed, world_size=p, args=(body, without), hosts=hosts)


def _with_groups(backend: fc.Backend) -> None:
    everybody = range(backend.world_size)
    for group in (backend, backend.sub(everybody), backend.sub(everybody), backend.host_group()):
        group.barrier()


def test_memory_out_of_reach_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fsdpcore"):
        run_on(_HalfSharing, _with_groups, world_size=4)
    words = "cannot share memory"
    found = [record for record in caplog.records if words in record.getMessage()]
    assert {record.levelno for record in found} == {logging.INFO, logging.WARNING}
    (warning,) = (record for record in found if record.levelno == logging.WARNING)
    assert "rank 2 cannot share memory" in warning.getMessage()
    assert "among ranks [0..3]: out of reach" in warning.getMessage()


@pytest.mark.parametrize("options", [{}, {"shm": "off"}])
def test_nothing_is_logged_where_all_is_as_it_was_asked_for(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fsdpcore"):
        run(_with_groups, transport="sim", world_size=4, hosts=2, **options)
    assert caplog.records == []


# Every kind of array, in place and out of place, for groups that come and go.


@pytest.mark.parametrize("sharing", [SimBackend, SharingSim])
@pytest.mark.parametrize("elements", [10, 5_000, 150_001])
def test_memory_and_messages_together(sharing: type[Any], elements: int) -> None:
    run_on(sharing, _together, world_size=6, args=(elements,), hosts=2, max_delay=1e-4, seed=3)


def _together(backend: fc.Backend, elements: int) -> None:
    p, me = backend.world_size, backend.rank
    parts = arrays_of(p, (elements,))
    total = oracle.reduced(parts, "sum")
    mine = backend.empty(elements, parts[me].dtype)
    mine[...] = parts[me]
    works = []
    for group in (backend, backend.sub(range(p))):
        for array in (mine, parts[me]):
            result = fc.all_reduce(array, group, algorithm="hierarchical")
            check_same(result, total, "all_reduce")
            again = array.copy()
            works.append(
                fc.all_reduce(again, group, out=again, algorithm="hierarchical", async_op=True)
            )
        check_same(mine, parts[me], "the input")
    for work in works:
        check_same(work.wait(), total, "all_reduce, started, in place")


def test_memory_goes_with_the_group() -> None:
    run(_close_groups, transport="sim", world_size=4, hosts=2)


def _close_groups(backend: fc.Backend) -> None:
    backend.barrier()
    known: list[SharedRegion] = [*backend.root.regions]
    assert len(known) == 1
    for _ in range(3):
        with backend.sub(range(4)) as group:
            group.barrier()
            assert len(backend.root.regions) == 2
    assert [*backend.root.regions] == known


# Failures inside of a host.


class _Stops(Exception):
    """What a rank is made to fail with."""


@pytest.mark.parametrize("hangs", [False, True])
def test_a_rank_that_stops_inside_of_its_host(hangs: bool) -> None:
    args: tuple[Any, ...] = (hangs, [], threading.Event())
    run_on(SharingSim, _stop, world_size=4, hosts=2, args=args)


def _stop(backend: fc.Backend, hangs: bool, ended: list[int], all_ended: threading.Event) -> None:
    backend.barrier()
    meet()  # or who is slow to leave the barrier hears of the failure in it
    assert state_of(backend).context is not None
    inside = state_of(backend).context.inside
    assert inside is not None

    def stop(*args: Any) -> None:
        if hangs:
            all_ended.wait(60)
        raise _Stops("this rank has had enough")

    if backend.rank == 3:
        inside.carrier = inside.carrier._replace(reduce_scatter=stop)
        with pytest.raises((_Stops, fc.CommunicationError)):
            fc.all_reduce(np.zeros(9), backend, algorithm="hierarchical")
        return
    limit = 2.0 if hangs else 60.0
    try:
        with pytest.raises(fc.CommunicationError) as caught:
            fc.all_reduce(np.zeros(9), backend, algorithm="hierarchical", timeout=limit)
    finally:
        ended.append(backend.rank)
        if len(ended) == 3:
            all_ended.set()
    words = "all_reduce #2 on ranks [0..3] timed out" if hangs else "rank 3 failed"
    assert words in str(caught.value)


# What it costs.


def _group(hosts: list[int], capabilities: Capabilities, *, shares: bool) -> Any:
    own = hierarchy_costs.algorithms(hosts, Tuning(), OPERATIONS) if shares else {}
    return SimpleNamespace(
        world_size=len(hosts),
        rank=0,
        hosts=hosts,
        capabilities=capabilities,
        collectives=SimpleNamespace(own_algorithms=own),
        moves=HOST,
        root=SimpleNamespace(policy=Policy()),
    )


NETWORK = Capabilities("network", alpha=50e-6, beta=1e-9, gamma=0.1e-9)
LAYOUTS = {
    "blocks": [rank // 4 for rank in range(16)],
    "two": [rank // 8 for rank in range(16)],
    "of threes": [rank // 3 for rank in range(9)],
    "uneven": [0, 0, 0, 0, 1, 1, 1, 1, 2, 2],
}


@pytest.mark.parametrize("nbytes", [10**5, 10**8])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_it_is_taken_where_hosts_share_memory(collective: str, layout: str, nbytes: int) -> None:
    hosts = LAYOUTS[layout]
    names = [
        cheapest(collective, nbytes, _group(hosts, NETWORK, shares=shares))
        for shares in (True, False)
    ]
    assert names[0] == "hierarchical"
    assert names[1] != "hierarchical"


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_it_is_not_taken_where_it_does_not_pay(collective: str) -> None:
    many = [rank // 2 for rank in range(64)]  # as many messages as hosts, against a few steps
    assert cheapest(collective, 64, _group(many, NETWORK, shares=True)) != "hierarchical"
    fast = Capabilities("fast", alpha=1e-9, beta=1e-12, gamma=0.1e-9)
    assert cheapest(collective, 10**7, _group([0, 0, 1, 1], fast, shares=True)) != "hierarchical"


def test_every_subtree_of_a_host_counts() -> None:
    """Hosts in turn send every rank's contribution by itself, as any other algorithm does."""
    for hosts, taken in (([rank % 8 for rank in range(16)], False), (LAYOUTS["two"], True)):
        name = cheapest("reduce_scatter", 10**7, _group(hosts, NETWORK, shares=True))
        assert (name == "hierarchical") == taken


def test_what_memory_costs_beside_the_messages() -> None:
    """The busiest host's slabs, each in the steps of one; and the bytes of the largest host."""
    hosts = [0, 0, 1, 1, 1, 1]  # so host 0 takes a slab of its own and two of the other's

    def seconds(collective: str, *costs: float) -> float:
        tuning = Tuning(own={"shared": Costs(*costs)})
        known = hierarchy_costs.algorithms(hosts, tuning, OPERATIONS)[collective]
        besides = known[hierarchy_costs.NAME].besides
        assert besides is not None
        return besides(100)

    for collective, steps, copied, reduced in (
        ("reduce_scatter", 1, 75, 100),
        ("all_gather", 1, 125, 0),
        ("all_reduce", 2, 200, 100),
        ("broadcast", 1, 100, 0),
    ):
        assert seconds(collective, 1, 0, 0) == 3 * steps
        assert seconds(collective, 0, 1, 0) == copied
        assert seconds(collective, 0, 0, 1) == reduced


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 2], [0, 1, 1, 0, 2]])
def test_auto_knows_of_it_once_the_group_has_met(hosts: list[int]) -> None:
    found = run(_offered, transport="sim", world_size=len(hosts), args=(hosts,))
    assert found == [len(set(hosts)) < len(hosts)] * len(hosts)


def _offered(backend: Any, hosts: list[int]) -> bool:
    backend.hosts = tuple(hosts)
    fc.all_reduce(np.zeros(3), backend)
    known = state_of(backend).own_algorithms.get("all_reduce", {})
    return hierarchy_costs.NAME in known and known[hierarchy_costs.NAME].besides is not None
