"""What the algorithms send, counted, against the formulas in their modules' docstrings."""

from __future__ import annotations

import itertools
import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from support import oracle
from support.counting import ROOTED, CountingSim, Traffic, counters, measure
from support.formulas import EXPECTED, depth
from support.spmd import run_on

import fsdpcore as fc
from fsdpcore.collectives.hierarchy import costs as hierarchy
from fsdpcore.collectives.operations.table import OPERATIONS
from fsdpcore.collectives.selection.table import ALGORITHMS
from fsdpcore.collectives.shared import algorithm as shared
from fsdpcore.core.policy import Tuning

# Around powers of two, and halfway; the others are a campaign.
SIZES = [2, 3, 4, 5, 6, 7, 8]
OTHERS = [9, 10, 11, 12, 13, 14, 15, 16, 17]
EVERY = [(collective, name) for collective, known in ALGORITHMS.items() for name in known]


def test_every_algorithm_has_a_formula() -> None:
    assert set(EXPECTED) == set(EVERY)


@pytest.mark.parametrize("p", SIZES)
@pytest.mark.parametrize(("collective", "algorithm"), EVERY)
def test_every_rank_sends_what_the_formula_says(collective: str, algorithm: str, p: int) -> None:
    assert measure(collective, algorithm, p) == EXPECTED[collective, algorithm](p)


@pytest.mark.parametrize("p", SIZES)
def test_the_docstrings_simple_cases(p: int) -> None:
    """What the tables say for the busiest rank where p is a power of two, or for the root."""
    k = depth(p)
    root = measure("broadcast", "tree", p)[0]
    assert (root.sent, root.out) == (k, k)
    root = measure("broadcast", "scatter_gather", p)[0]
    assert (root.sent, root.out) == (2 * k, Fraction(2 * (p - 1), p))
    for collective, sums in (("gather", False), ("reduce", True)):
        root = measure(collective, "tree", p)[0]
        assert (root.received, root.into) == (k, k if sums else Fraction(p - 1, p))
    if p == 2**k:
        share = Fraction(p - 1, p)
        assert set(measure("all_reduce", "doubling", p)) == {Traffic(k, k, k, k, k)}
        halved = Traffic(k, share, k, share, share)
        assert set(measure("reduce_scatter", "halving", p)) == {halved}
        whole = Traffic(2 * k, 2 * share, 2 * k, 2 * share, share)
        assert set(measure("all_reduce", "rabenseifner", p)) == {whole}
        gathered = Traffic(k, share, k, share)
        assert set(measure("all_gather", "doubling", p)) == {gathered}
        exchanged = Traffic(k, Fraction(k, 2), k, Fraction(k, 2))
        assert set(measure("all_to_all", "bruck", p)) == {exchanged}


@pytest.mark.parametrize("p", SIZES)
@pytest.mark.parametrize(("collective", "algorithm"), EVERY)
def test_the_table_agrees_with_the_busiest_rank(collective: str, algorithm: str, p: int) -> None:
    _check_the_table(collective, algorithm, p, measure(collective, algorithm, p))


UNEVEN = [
    (collective, algorithm)
    for collective, algorithm in EVERY
    if algorithm in ("doubling", "halving", "rabenseifner")
]


@pytest.mark.parametrize(("collective", "algorithm"), [*UNEVEN, ("all_to_all", "bruck")])
def test_the_table_knows_the_busiest_of_many_ranks(collective: str, algorithm: str) -> None:
    """It does not look at each of them: the formulas do, rank by rank."""
    for p in (*range(2, 131), 255, 257, 511, 513, 682, 683, 1023, 1025):
        _check_the_table(collective, algorithm, p, EXPECTED[collective, algorithm](p))


def test_costs_of_many_ranks_take_no_time() -> None:
    """A table that looked at each rank, or pair of them, would take seconds to hours."""
    start = time.perf_counter()
    for p in range(2**40 - 20, 2**40):
        for collective, algorithm in [*UNEVEN, ("all_to_all", "bruck")]:
            ALGORITHMS[collective][algorithm].cost(p)
    hierarchy.algorithms([rank // 8 for rank in range(4096)], Tuning(), OPERATIONS)
    assert time.perf_counter() - start < 1


def _check_the_table(collective: str, algorithm: str, p: int, ranks: list[Traffic]) -> None:
    terms = ALGORITHMS[collective][algorithm].cost(p)
    messages = max(max(rank.sent, rank.received) for rank in ranks)
    moved = max(max(rank.out, rank.into) for rank in ranks)
    if algorithm == "star":  # the centre does one after the other
        messages = max(rank.sent + rank.received for rank in ranks)
        moved = max(rank.out + rank.into for rank in ranks)
    if algorithm == "tree" and collective in ("gather", "scatter"):
        moved *= 2  # as its docstring says
    if algorithm == "direct" and collective == "broadcast":  # likewise
        moved += Fraction(p - 2, 8 * (p - 1))
    assert terms.alpha == messages
    assert terms.beta == pytest.approx(float(moved))
    assert terms.gamma == pytest.approx(float(max(rank.reduced for rank in ranks)))


@pytest.mark.parametrize("p", SIZES)
@pytest.mark.parametrize("collective", ROOTED)
def test_any_root(collective: str, p: int) -> None:
    """Another root turns the ranks around; ``reduce`` by the tree keeps their order."""
    for algorithm in ALGORITHMS[collective]:
        root = p // 2
        ranks = measure(collective, algorithm, p, root=root)
        expected = EXPECTED[collective, algorithm](p)
        if collective == "reduce" and algorithm == "tree":
            result = Traffic(1, Fraction(1), 0, Fraction(0))
            arriving = Traffic(0, Fraction(0), 1, Fraction(1))
            for rank, more in ((0, result), (root, arriving)):
                expected[rank] = Traffic.total([expected[rank], more])
        elif algorithm in ("star", "direct", "hierarchical"):
            expected[0], expected[root] = expected[root], expected[0]
        else:
            expected = expected[-root:] + expected[:-root]
        assert ranks == expected, algorithm


# Hosts.


def _host_sizes(p: int, hosts: int) -> list[int]:
    return [len([rank for rank in range(p) if rank * hosts // p == host]) for host in range(hosts)]


def _subtrees(first: int, end: int, p: int) -> int:
    """How many nodes of the canonical tree it takes to cover the ranks from first to end."""
    if first == end:
        return 0
    size = 1
    while first % (2 * size) == 0 and (first + 2 * size <= end or end == p > first + size):
        size *= 2
    return 1 + _subtrees(min(first + size, end), end, p)


NUMBERS_OF_HOSTS = (2, 3, 4, 8)
HOSTS = [(p, hosts) for p in SIZES for hosts in NUMBERS_OF_HOSTS if hosts <= p]


@pytest.mark.parametrize(("p", "hosts"), HOSTS)
def test_hierarchical_totals(p: int, hosts: int) -> None:
    sizes = _host_sizes(p, hosts)
    ends = np.cumsum([0, *sizes]).tolist()
    k = [_subtrees(a, b, p) for a, b in itertools.pairwise(ends)]
    inside = sum(m * (m - 1) for m in sizes)
    across = sum(trees * (p - m) for trees, m in zip(k, sizes, strict=True))
    reduced = Traffic.total(measure("reduce_scatter", "hierarchical", p, hosts=hosts))
    assert reduced.sent == reduced.received == inside + across
    assert reduced.out == reduced.into == p - hosts + Fraction(across, p)
    assert reduced.reduced == p - 1
    gathered = Traffic.total(measure("all_gather", "hierarchical", p, hosts=hosts))
    assert gathered.sent == gathered.received == inside + p * (hosts - 1)
    assert gathered.out == gathered.into == p - 1
    both = Traffic.total(measure("all_reduce", "hierarchical", p, hosts=hosts))
    assert both == Traffic.total([reduced, gathered])
    for root in (0, p - 1):
        m = sizes[root * hosts // p]
        # Pieces of equal size, whatever the number of ranks on the root's host.
        ranks = measure("broadcast", "hierarchical", p, hosts=hosts, root=root, rows=12 * m * p)
        sent = Traffic.total(ranks)
        elsewhere = sum(size - 1 for size in sizes) - (m - 1)
        assert sent.sent == sent.received == m * (m - 1) + m * (hosts - 1) + m * elsewhere
        assert sent.out == sent.into == p - 1


@pytest.mark.parametrize(("p", "hosts"), [(p, hosts) for p, hosts in HOSTS if p % hosts == 0])
def test_hierarchical_on_equal_hosts(p: int, hosts: int) -> None:
    m, others, share = p // hosts, hosts - 1, Fraction(p - 1, p)
    for rank, traffic in enumerate(measure("reduce_scatter", "hierarchical", p, hosts=hosts)):
        first = rank // m * m
        k = _subtrees(first, first + m, p)
        assert traffic.sent == m - 1 + k * others
        assert traffic.out == Fraction(m - 1, m) + Fraction(k * others, p)
        if m == 2 ** depth(m):
            assert k == 1
            assert traffic == Traffic(m - 1 + others, share, m - 1 + others, share, share)
    messages = m - 1 + others
    expected = Traffic(messages, share, messages, share)
    assert set(measure("all_gather", "hierarchical", p, hosts=hosts)) == {expected}
    root = measure("broadcast", "hierarchical", p, hosts=hosts)[0]
    messages = 2 * (m - 1) + others
    assert (root.sent, root.out) == (messages, Fraction(messages, m))


# Special cases.


@pytest.mark.parametrize(
    ("collective", "algorithm", "factor"),
    [
        ("all_reduce", "direct", 1),
        ("reduce_scatter", "direct", 1),
        ("all_reduce", "star", 1),
        ("all_gather", "doubling", 1),
        ("all_gather", "ring", 1),
        ("all_gather", "bruck", 1),
        ("all_reduce", "doubling", 2),
        ("reduce_scatter", "ring", 2),
        ("reduce_scatter", "halving", 2),
        ("all_reduce", "ring", Fraction(3, 2)),
        ("all_reduce", "rabenseifner", Fraction(3, 2)),
        ("reduce", "tree", 2),
    ],
)
def test_half_precision(collective: str, algorithm: str, factor: int | Fraction) -> None:
    """Where partial sums travel, they travel as float32."""
    narrow = measure(collective, algorithm, 4, dtype=oracle.HALVES[1])
    integers = measure(collective, algorithm, 4, dtype=np.int16)
    for half, whole in zip(narrow, integers, strict=True):
        assert half.sent == whole.sent
        assert half.out == factor * whole.out


def test_half_precision_across_hosts() -> None:
    """Inside of a host what travels is the input, across hosts partial sums as float32."""
    narrow = measure("reduce_scatter", "hierarchical", 4, dtype=np.float16, hosts=2)
    assert {rank.out for rank in narrow} == {Fraction(1, 2) + 2 * Fraction(1, 4)}


def _set_bits(end: int) -> int:
    """How many bits are set in all numbers below ``end``."""
    return sum(bin(number).count("1") for number in range(end))


# In memory: the steps, what the busiest rank copies as p-th parts of n, and what it reduces.
IN_MEMORY = {
    "all_reduce": lambda p: (2, 2 * p - 1, p),
    "reduce": lambda p: (2, 2 * p - 1, p) if p > 2 else (1, p, 2 * p),
    "reduce_scatter": lambda p: (1, p - 1, p),
    "scan": lambda p: (2, 2 * p - 1, _set_bits(p)),
    "exscan": lambda p: (2, 2 * p - 1, _set_bits(p - 1)),
    "all_gather": lambda p: (1, p + 1, 0),
    "broadcast": lambda p: (1, p, 0),
    "gather": lambda p: (1, p, 0),
    "scatter": lambda p: (1, p, 0),
    "all_to_all": lambda p: (1, 2 * p - 1, 0),
}


@pytest.mark.parametrize("p", SIZES)
@pytest.mark.parametrize("collective", OPERATIONS)
def test_shared_memory(collective: str, p: int) -> None:
    """What is computed from a movement is what the docstring of ``shared`` says."""
    steps, copied, reduced = IN_MEMORY[collective](p)
    found = shared.algorithms(OPERATIONS)[collective][shared.NAME].cost(p)
    assert found == pytest.approx((steps, copied / p, reduced / p, 0))


def test_star_in_segments() -> None:
    """A reduction of more elements than one segment counts alpha once for each."""
    rows = 3 * 256 * 1024 - 6
    centre, *others = measure("reduce", "star", 3, rows=rows)
    assert (centre.received, centre.into) == (2 * 3, 2)
    assert {(rank.sent, rank.out) for rank in others} == {(3, 1)}


@pytest.mark.parametrize("p", SIZES)
def test_agreement_and_barrier(p: int) -> None:
    """A barrier: ceil(lg p) messages, 8 bytes for each other rank. Ahead of data: nothing."""
    ranks = run_on(CountingSim, _count_barrier, world_size=p, shm="off")
    assert ranks == [[depth(p), 8 * (p - 1)] * 2] * p
    assert run_on(CountingSim, _count_empty, world_size=p, shm="off") == [[0, 0, 0, 0]] * p


def _count_barrier(backend: Any) -> list[int]:
    fc.barrier(backend)
    return counters(backend)[:4]


def _count_empty(backend: Any) -> list[int]:
    fc.all_gather(np.zeros((0, 5)), backend, algorithm="ring")
    return counters(backend)[:4]


@pytest.mark.campaign
@pytest.mark.parametrize("p", OTHERS)
def test_other_numbers_of_ranks(p: int) -> None:
    for collective, algorithm in EVERY:
        test_every_rank_sends_what_the_formula_says(collective, algorithm, p)
        test_the_table_agrees_with_the_busiest_rank(collective, algorithm, p)
    for collective in ROOTED:
        test_any_root(collective, p)
    for hosts in NUMBERS_OF_HOSTS:
        test_hierarchical_totals(p, hosts)
        if p % hosts == 0:
            test_hierarchical_on_equal_hosts(p, hosts)
    test_the_docstrings_simple_cases(p)
    test_agreement_and_barrier(p)
