"""Links between hosts as ranks find them: what is measured of them, and what passes what."""

from __future__ import annotations

import numpy as np
import pytest
from support.hosts.lab import Lab
from support.hosts.ranks import on_hosts
from support.zmq_ranks import Line, Outcome

import fsdpcore as fc

pytestmark = pytest.mark.usefixtures("needs_hosts")


def passing(backend: fc.Backend, line: Line) -> tuple[float, float, bool]:
    """Have a small message pass a large one; what the links cost, and whether it did."""
    large, small, passed = np.ones(1 << 17), np.ones(1), True
    if backend.rank == 1:
        sending = backend.isend(large, 2)
        backend.send(small, 2, tag=1)
        sending.wait()
    elif backend.rank == 2:
        coming = backend.irecv(np.empty_like(large), 1)
        backend.recv(np.empty_like(small), 1, tag=1)
        passed = not coming.done()
        coming.wait()
    backend.barrier()
    link = backend.root.policy.link
    assert link is not None
    return link.latency, link.beta, passed


def test_ranks_go_by_the_slowest_link_between_their_hosts() -> None:
    """All by the same numbers; and no small message waits for what a slow link has not taken.

    They listen at all addresses, and are found where they came from.
    """
    delay, rate = 0.025, 40e6  # bits per second, on the way to and from the last host
    with Lab(3, rate=5 * rate, delay=delay) as lab:
        lab.set_rate(2, rate)
        with on_hosts(passing, lab, interface="0.0.0.0") as ranks:
            found = [rank.outcome() for rank in ranks]
    assert {one.error for one in found} == {""}, found
    latency, beta, passed = found[2].result
    assert [one.result[:2] for one in found] == [(latency, beta)] * 3
    # A machine that is busy makes them worse, but none takes a round trip for a way.
    assert delay * 0.95 < latency < delay * 1.9
    assert rate / 8 * 0.3 < 1 / beta < rate / 8 * 1.6
    assert passed


def summing(backend: fc.Backend, line: Line) -> int:
    """A sum of all ranks."""
    return int(fc.all_reduce(np.int64(backend.rank + 1), backend))


def test_a_rank_may_connect_from_another_address_than_it_listens_at() -> None:
    """The one by which its host reaches the others, where that has several."""
    with Lab(2) as lab:
        first, second = lab.hosts
        for host, address in ((first, first.address), (second, "10.78.0.2")):
            lab.ip(
                host.number,
                "link add beside type veth peer name beside-end",
                f"address add {address}/32 dev beside",
                "link set beside up",
            )
        lab.ip(first.number, f"route add 10.78.0.2/32 via {second.address}")
        with on_hosts(summing, lab, interface="beside") as ranks:
            assert [rank.outcome() for rank in ranks] == [Outcome(3)] * 2


def test_rank_0_may_listen_at_an_address_that_is_not_its_hosts_first() -> None:
    """It connects from there, since the others let in who comes from where ranks listen."""
    with Lab(2) as lab:
        host = lab.hosts[0]
        lab.ip(
            host.number,
            f"address delete {host.address}/24 dev eth0",
            "address add 10.77.0.100/24 dev eth0",
            f"address add {host.address}/24 dev eth0",
        )
        with on_hosts(summing, lab) as ranks:
            assert [rank.outcome() for rank in ranks] == [Outcome(3)] * 2
