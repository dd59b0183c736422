"""Flows end when the textbook's method, in fractions, says that they do; no byte is lost."""

from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.naive_flows import Sent, naive_ends, naive_route

from fsdpcore.simulation import flows as flows_module
from fsdpcore.simulation.flows import Flows
from fsdpcore.simulation.network import Level, Link, Network

RATES = st.sampled_from([1.0, 2.0, 3.0, 7.0, 10.0, 64.0, math.inf])
NAMES = ("rank", "host", "rack", "pod")


@st.composite
def loads(draw):
    """A network, its ranks, and what they send: (time, source, destination, bytes), in order."""
    sizes = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 2)))] + [0]
    rates = [draw(RATES) for _ in sizes]
    ranks = draw(st.integers(1, 12))
    members = st.tuples(st.integers(0, len(sizes) - 1), st.integers(0, 5))
    own = draw(st.dictionaries(members, RATES, max_size=3))
    own = {
        (level, member): rate
        for (level, member), rate in own.items()
        if member * math.prod(sizes[:level]) < ranks  # there is such a member
    }
    rank = st.integers(0, ranks - 1)
    # Few times and sizes, so that much happens at one moment; and others.
    sizes_of_flows = st.sampled_from([0, 1, 6, 12, 12, 30]) | st.integers(1, 1000)
    flow = st.tuples(st.sampled_from([0, 0, 1, 2.5, 3]), rank, rank, sizes_of_flows)
    sent = sorted(draw(st.lists(flow, max_size=24)), key=lambda each: each[0])
    return sizes, rates, ranks, own, sent


def run(network, ranks, sent, *, held=True):
    """The end of each flow in the order of starts; and by link the bytes that its rates make."""
    flows = Flows(network, ranks)
    ahead, live, moved = list(sent), [], defaultdict(float)
    ends, now = {}, 0.0
    while ahead or live:
        then = min(flows.next_end(), ahead[0][0] if ahead else math.inf)
        load = defaultdict(float)
        for flow in live if then > now else ():
            for link in flow.links:
                load[link] += flows.rate(flow)
        for link, rate in load.items():
            assert not held or rate <= network.rate(link) * (1 + 1e-9)
            moved[link] += rate * (then - now)
        now = then
        gone = flows.ended(now)
        assert [flow.number for flow in gone] == sorted(flow.number for flow in gone)
        for flow in gone:
            ends[flow.number] = now
            live.remove(flow)
        while ahead and ahead[0][0] == now:
            live.append(flows.start(*ahead.pop(0)))
    assert flows.next_end() == math.inf
    return flows, ends, moved


@pytest.mark.parametrize("few", [64, 0], ids=["few", "many"])
@given(load=loads())
@settings(max_examples=150, deadline=None)
def test_flows_end_as_the_textbook_says(few, load):
    sizes, rates, ranks, own, sent = load
    network = Network(
        tuple(
            Level(NAMES[n + 1], size, rate, 0.0)
            for n, (size, rate) in enumerate(zip(sizes, rates, strict=True))
        ),
        {f"{NAMES[level]} {member}": Link(rate=rate) for (level, member), rate in own.items()},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flows_module, "_FEW", few)
        flows, ends, moved = run(network, ranks, sent)
        again = run(network, ranks, sent)
    assert (again[1], again[2]) == (ends, moved)

    routes = [naive_route(src, dst, sizes) for _, src, dst, _ in sent]
    capacities = {}
    for link in {link for route in routes for link in route}:
        level, member, _ = link.split(".")
        rate = own.get((int(level), int(member)), rates[int(level)])
        if rate < math.inf:
            capacities[link] = Fraction(rate)
    wanted = naive_ends(
        [
            Sent(Fraction(time), route, nbytes)
            for (time, _, _, nbytes), route in zip(sent, routes, strict=True)
        ],
        capacities,
    )
    assert [ends[n] for n in range(len(sent))] == pytest.approx(list(map(float, wanted)), rel=1e-9)

    carried = defaultdict(int)
    for (_, _, _, nbytes), route in zip(sent, routes, strict=True):
        for link in route:
            carried[link] += nbytes
    assert sorted(flows.bytes_by_link.values()) == sorted(carried.values())
    for link, nbytes in flows.bytes_by_link.items():
        if link in flows.busy_by_link:
            limited = sum(  # bytes of flows that some link slows: others need no time
                n
                for (_, src, dst, n), route in zip(sent, routes, strict=True)
                if link in network.route(src, dst)[0] and any(each in capacities for each in route)
            )
            assert moved[link] == pytest.approx(limited, rel=1e-9)
            assert flows.busy_by_link[link] >= nbytes / network.rate(link) * (1 - 1e-9) or (
                limited < nbytes
            )


def idle_times(sent, rate, burst):
    """When a link with a bucket has carried all that there was, each time; in fractions."""
    found, now, left, bucket = [], Fraction(0), Fraction(0), Fraction(burst)
    for time, nbytes in [*sent, (math.inf, 0)]:
        while left and now < time:
            speed = 100 * rate if bucket else rate  # as the model has it
            step = left / speed
            if bucket:
                step = min(step, bucket / (speed - rate))
            if now + step > time:
                step = time - now
            now, left, bucket = now + step, left - speed * step, bucket - (speed - rate) * step
            if not left:
                found.append(now)
        if time < math.inf:
            now, bucket = Fraction(time), min(burst, bucket + rate * (time - now))
            left += nbytes
    return found


@given(
    burst=st.integers(0, 5000),
    sent=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 6000)), min_size=1, max_size=12),
)
@settings(max_examples=100, deadline=None)
def test_a_link_is_done_when_its_bucket_says(burst, sent):
    """Only rank 0's link is slow, and all others send to it."""
    sent.sort()
    network = Network(
        (Level("switch", 0, math.inf, 0.0),), {"rank 0": Link(rate=1000.0, burst=burst)}
    )
    loads = [(float(time), n + 1, 0, nbytes) for n, (time, nbytes) in enumerate(sent)]
    _, ends, _ = run(network, len(sent) + 1, loads, held=False)
    wanted = idle_times([(Fraction(time), nbytes) for time, nbytes in sent], 1000, burst)
    assert max(ends.values()) == pytest.approx(float(wanted[-1]), abs=0.01)
    for moment in map(float, wanted):  # less than a byte in the bucket is nothing
        assert any(end == pytest.approx(moment, abs=0.01) for end in ends.values())
