"""How many one-way trips calls take where ranks send messages, counted and not computed.

At 20 ms a round trip this is all that counts for small arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fsdpcore.transports.simulated.backend import SimBackend
from support.counting import ROOTED
from support.formulas import depth
from support.spmd import run_on
from support.trips import trips

import fsdpcore as fc
from fsdpcore.collectives.selection.choose import choose
from fsdpcore.collectives.selection.table import ALGORITHMS
from fsdpcore.core.policy import Costs, Policy

SIZES = (2, 3, 5, 7, 8)
EVERY = [(name, algorithm) for name, known in ALGORITHMS.items() for algorithm in known]


def _call(collective: str, p: int, **options: Any) -> Callable[[Any], Any]:
    if collective in ROOTED:
        options["root"] = 0
    return lambda backend: getattr(fc, collective)(np.ones(4 * p), backend, **options)


@pytest.mark.parametrize("p", SIZES)
@pytest.mark.parametrize(("collective", "algorithm"), EVERY)
def test_a_call_takes_the_trips_of_its_algorithm(collective: str, algorithm: str, p: int) -> None:
    """No more: that all ranks call the same is found out on the way. No less: costs are true."""
    expected = ALGORITHMS[collective][algorithm].cost(p).latency
    if collective == "scatter":  # what is scattered is told along a tree
        expected = max(expected, p.bit_length() - 1)
    assert trips(_call(collective, p, algorithm=algorithm), p) == expected


@pytest.mark.parametrize("p", SIZES)
def test_ranks_that_have_to_meet(p: int) -> None:
    """For a barrier, and where they tell each other their rows."""
    rows = np.ones((3, 2))
    assert trips(fc.barrier, p) == depth(p)
    assert trips(lambda b: fc.all_gather_v(rows, b, algorithm="direct"), p) == depth(p) + 1
    assert trips(lambda b: fc.gather_v(rows, b, root=0, algorithm="star"), p) == depth(p) + 1


@pytest.mark.parametrize("p", [2, 4, 7])
def test_many_calls_take_the_trips_of_each(p: int) -> None:
    """Calls whose results depend on all ranks; in one of 64 they meet besides."""
    assert (
        trips(lambda b: [_call("all_gather", p, algorithm="direct")(b) for _ in range(10)], p) == 10
    )
    many = trips(lambda b: [_call("all_gather", p, algorithm="direct")(b) for _ in range(64)], p)
    assert many == 64 + depth(p)


def test_a_root_does_not_wait_for_the_others() -> None:
    def body(backend: Any) -> None:
        for _ in range(10):
            fc.broadcast(np.ones(3), backend, algorithm="star")

    assert trips(body, 5) == 1


LINKS = {
    "20 ms": Costs(30e-6, 0.2e-9, 0.1e-9, 10e-3),
    "and 100 Mbit": Costs(30e-6, 85e-9, 0, 10e-3),
}
AT_BEST = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "broadcast": 1, "reduce": 1}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("collective", AT_BEST)
def test_auto_goes_by_the_link_between_hosts(collective: str, link: str) -> None:
    """Small arrays: the fewest trips. On one host nothing changes."""

    def body(backend: Any) -> None:
        backend.policy = replace(backend.policy, link=LINKS[link])
        _call(collective, 4)(backend)

    assert trips(body, 4, hosts=4) == AT_BEST[collective]


# A gigabit, as it is measured where hosts are busy and where they are not.
GIGABIT = [Costs(60e-6, 1 / rate, 0.1e-9, 10e-3) for rate in (80e6, 118e6)]


def _chosen(p: int, calls: list[tuple[str, int, Costs]]) -> list[str]:
    def body(backend: Any) -> list[str]:
        found = []
        for name, nbytes, link in calls:
            backend.policy = Policy(link=link)
            found.append(choose(name, "auto", nbytes, backend).name)
        return found

    first, *others = run_on(SimBackend, body, world_size=p, shm="off", hosts=p)
    assert others == [first] * (p - 1)
    return list(first)


def test_auto_for_large_arrays_between_hosts() -> None:
    calls = [(name, 2**20, link) for link in LINKS.values() for name in ("all_reduce", "broadcast")]
    assert _chosen(4, calls) == ["direct", "star", "direct", "direct"]


@pytest.mark.parametrize(("link", "mebibyte"), [*zip(GIGABIT, ("direct", "star"), strict=True)])
def test_a_broadcast_far_away_goes_straight_to_all(link: Costs, mebibyte: str) -> None:
    """In one trip; in two where the root's link would be busy for longer than that takes."""
    sizes = 8, 2**16, 2**20, 2**22, 2**26
    calls = [("broadcast", nbytes, link) for nbytes in sizes]
    assert _chosen(4, calls) == ["star", "star", mebibyte, "direct", "direct"]
    assert _chosen(8, calls[2:]) == ["direct"] * 3
