"""Flows share links as closed forms say, and only what they touch is worked out anew."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest

from fsdpcore.core.errors import ConfigError
from fsdpcore.simulation import flows as flows_module
from fsdpcore.simulation import sharing
from fsdpcore.simulation.flows import Flows
from fsdpcore.simulation.network import Level, Network


def network(*levels: tuple[int, float]) -> Network:
    return Network(
        tuple(Level(f"level{n}", size, rate, 0.0) for n, (size, rate) in enumerate(levels))
    )


def drain(flows: Flows) -> dict[float, int]:
    """How many flows end at each moment from here on."""
    found = {}
    while (moment := flows.next_end()) < math.inf:
        found[moment] = len(flows.ended(moment))
    return found


def test_flows_of_one_link_share_it():
    flows = Flows(network((0, 100.0)), 8)
    for src in range(1, 8):
        flows.start(0.0, src, 0, 100)
    assert drain(flows) == {7.0: 7}
    down = flows._network.link(0, 0) + 1
    assert (flows.bytes_by_link[down], flows.busy_by_link[down]) == (700, 7.0)


def test_directions_of_a_link_do_not_slow_each_other():
    flows = Flows(network((0, 100.0)), 2)
    flows.start(0.0, 0, 1, 100)
    flows.start(0.0, 1, 0, 100)
    assert drain(flows) == {1.0: 2}


def test_an_uplink_with_too_little_for_all_is_what_limits_them():
    flows = Flows(network((8, 100.0), (0, 200.0)), 16)
    for src in range(8):
        flows.start(0.0, src, src + 8, 100)
    inside = flows.start(0.0, 0, 1, 300)  # has what the uplink leaves of the rank's own link
    assert flows.rate(inside) == 75.0
    assert drain(flows) == {4.0: 9}


def test_who_starts_late_shares_from_then_on():
    flows = Flows(network((0, 100.0)), 3)
    first = flows.start(0.0, 0, 2, 100)
    assert flows.next_end() == 1.0
    late = flows.start(0.5, 1, 2, 100)
    assert flows.next_end() == 1.5
    assert flows.ended(1.0) == []
    assert flows.ended(1.5) == [first]
    assert flows.next_end() == 2.0
    assert flows.ended(2.0) == [late]


@pytest.mark.parametrize("burst", [0, 50])
def test_who_sends_to_several_others_fills_a_part_of_the_link(burst):
    made = network((2, 1e6), (0, 100.0))
    last = dataclasses.replace(made.levels[-1], spread=0.8, burst=burst)
    flows = Flows(dataclasses.replace(made, levels=(*made.levels[:-1], last)), 6)
    flows.start(0.0, 0, 2, 80)
    flows.start(0.0, 1, 3, 80)  # to the same host
    early = burst / 100 / 99  # at a hundred times the rate
    assert flows.next_end() == pytest.approx(early or 1.6)
    while flows.next_end() < 1.0:
        flows.ended(flows.next_end())
    more = flows.start(1.0, 0, 4, 40)  # to another one
    left = 160 - burst - 100
    assert flows.rate(more) == pytest.approx(80 / 3)
    first = flows.next_end()
    assert first == pytest.approx(1 + left / 2 / (80 / 3))
    flows.ended(first)  # one is left, and has the link for itself, and what its bucket has saved
    assert flows.rate(more) == (100 * 100 if burst else 100)


def test_who_sends_farther_fills_a_part_of_the_link_too():
    """Hosts of two ranks, racks of two hosts: only a host's link is slow."""
    made = network((2, 1e6), (2, 100.0), (0, 1e6))
    host, rack, site = made.levels
    rack = dataclasses.replace(rack, spread=0.8)
    for other, rate in [(2, 40.0), (6, 40.0), (8, 40.0), (5, 50.0)]:  # 5 is on the host of 4
        flows = Flows(dataclasses.replace(made, levels=(host, rack, site)), 12)
        found = [flows.start(0.0, 0, 4, 100), flows.start(0.0, 1, other, 100)]
        assert [flows.rate(flow) for flow in found] == pytest.approx([rate] * 2), other


def test_what_needs_no_time_ends_at_once():
    flows = Flows(network((2, math.inf), (0, 100.0)), 4)
    begun = [flows.start(1.0, 0, 2, 0), flows.start(1.0, 3, 3, 10), flows.start(1.0, 0, 1, 10)]
    assert flows.next_end() == 1.0
    assert flows.ended(1.0) == begun
    assert flows.next_end() == math.inf


def test_equal_flows_end_at_one_moment(monkeypatch):
    calls = []
    solve = flows_module.fair_rates
    monkeypatch.setattr(flows_module, "fair_rates", lambda *a: calls.append(1) or solve(*a))
    flows = Flows(network((4, 0.7), (3, 1.1), (0, 0.9)), 48)
    for src in range(48):
        for step in range(1, 48):
            flows.start(0.1, src, (src + step) % 48, 1000)
    assert list(drain(flows).values()) == [48 * 3, 48 * 8, 48 * 36]
    assert len(calls) == 3  # once for all that starts, and after each end but the last


@pytest.mark.parametrize(("begin", "rate"), [(0.1, 0.7), (1e4, 7e6)], ids=["long", "late"])
def test_ends_that_only_rounding_tells_apart_are_one_moment(begin, rate):
    """A link that is never idle ends at one time, however its bytes are cut and when they come."""
    rng = random.Random(5)
    flows, starts, ranks = Flows(network((0, rate)), 48), [], 16
    for dst in range(ranks):
        cuts = sorted(rng.sample(range(1, 10_000), 20 * dst))
        sizes = [b - a for a, b in itertools.pairwise([0, *cuts, 10_000])]
        later = [0.0, *(rng.random() * 0.7 / rate for _ in cuts)]
        starts += [(begin + t, dst, size) for t, size in zip(later, sizes, strict=True)]
    for time, dst, size in sorted(starts):
        flows.start(time, ranks + dst, dst, size)
    assert list(drain(flows).values())[-1] == ranks


def test_shares_that_only_rounding_tells_apart_are_one(monkeypatch):
    """Each link has a tenth for each of its flows; a tenth is no sum of powers of two."""
    rng = np.random.default_rng(5)
    routes = np.stack([rng.integers(1, 500, 4000), rng.integers(500, 999, 4000)])
    limits = np.bincount(routes.ravel(), minlength=999) * 0.1
    limits[0] = math.inf
    rounds, count = [], np.bincount
    monkeypatch.setattr(np, "bincount", lambda *a, **k: rounds.append(1) or count(*a, **k))
    assert sharing.fair_rates(routes, limits) == pytest.approx(0.1, rel=1e-12)
    assert len(rounds) == 2  # of the one round that there is


def test_only_flows_that_share_a_link_are_worked_out_anew(monkeypatch):
    seen = []
    solve = flows_module.fair_rates
    monkeypatch.setattr(
        flows_module, "fair_rates", lambda *a: seen.append(a[0].shape[1]) or solve(*a)
    )
    # Uplinks that take all that their ranks can send connect nothing.
    flows = Flows(network((2, 50.0), (0, 100.0)), 200)
    for src in range(0, 200, 2):
        flows.start(0.0, src, (src + 2) % 200, 1000)
    assert flows.next_end() == 20.0
    flows.start(1.0, 1, 4, 1000)
    assert flows.next_end() == 20.0
    assert seen == [100, 2]


def test_a_network_has_places_for_so_many_ranks():
    Flows(network((2, 1.0), (3, 1.0)), 6)
    with pytest.raises(ConfigError, match="places for 6 ranks, not for 7"):
        Flows(network((2, 1.0), (3, 1.0)), 7)


def bursting(burst: int, *levels: tuple[int, float]) -> Network:
    """Of which only the last level's links let some bytes pass at once."""
    made = network(*levels)
    last = dataclasses.replace(made.levels[-1], burst=burst)
    return dataclasses.replace(made, levels=(*made.levels[:-1], last))


def ends(flows: Flows) -> list[float]:
    return [moment for moment, count in drain(flows).items() if count]


def test_a_link_that_rested_lets_some_bytes_pass_at_once():
    flows = Flows(bursting(50, (0, 100.0)), 3)
    flows.start(0.0, 0, 1, 100)
    assert ends(flows) == pytest.approx([0.5])  # 50 at once, and 50 at 100 a second
    flows.start(0.5, 0, 1, 100)  # there is nothing left
    assert ends(flows) == pytest.approx([1.5])
    flows.ended(1.6)
    flows.start(1.6, 0, 1, 100)  # what came back meanwhile: 10
    assert ends(flows) == pytest.approx([2.5])
    flows.ended(90.0)
    flows.start(90.0, 0, 1, 100)  # as much as there may be
    assert ends(flows) == pytest.approx([90.5])


def test_what_passes_below_at_once_waits_above():
    first = bursting(1000, (2, 100.0)).levels[0]
    flows = Flows(Network((first, *network((1, 1.0), (2, 100.0)).levels[1:])), 4)
    flows.start(0.0, 0, 2, 100)
    assert ends(flows) == pytest.approx([1.0])


def test_two_flows_share_what_passes_at_once():
    flows = Flows(bursting(100, (0, 100.0)), 3)
    flows.start(0.0, 1, 0, 100)
    flows.start(0.0, 2, 0, 200)
    # Up to when they have moved 200 in all, half each, 100 have passed at once.
    assert ends(flows) == pytest.approx([1.0, 2.0])


def test_what_a_slower_link_keeps_back_is_not_let_pass():
    flows = Flows(bursting(50, (4, 40.0), (0, 100.0)), 8)
    flows.start(0.0, 0, 4, 100)
    assert ends(flows) == pytest.approx([2.5])
    assert flows._bursts.next_end() == math.inf


def test_what_comes_back_while_little_moves_is_there_for_the_next():
    flows = Flows(bursting(50, (4, 60.0), (0, 100.0)), 8)
    for src in range(4):
        flows.start(0.0, src, src + 4, 60)  # 240 a second at first, 100 once 50 more have passed
    (first,) = ends(flows)
    assert first == pytest.approx(50 / 140 + (240 - 50 - 50 / 1.4) / 100)
    flows.start(first, 0, 4, 60)  # moves at 60, and 40 come back
    assert ends(flows) == pytest.approx([first + 1])
    for src in range(4):
        flows.start(first + 1, src, src + 4, 60)
    assert ends(flows) == pytest.approx([first + 1 + 40 / 140 + (240 - 40 - 40 / 1.4) / 100])
