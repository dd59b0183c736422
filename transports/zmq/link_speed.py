"""How fast the links between the hosts of a job are, measured when it begins.

One rank of each host, its leader, sends to that of the next host and receives from that of the
one before, all at the same time: first a few bytes there and back, then more and more behind a few
bytes, until it takes long enough from these to the last ones to tell the rate. When the others
begin, and how far away they are, is not in that. It is a fraction of a second. The slowest link
counts for all, so that all ranks go by the same numbers.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fsdpcore.collectives import all_reduce, broadcast
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.capabilities import Capabilities
from fsdpcore.core.policy import Costs
from fsdpcore.core.work import Deadline

from .outlet import UNCOPIED, Flow

# Round trips of which the quickest counts: as many, and more as long as they take that long in all.
# Hosts whose ranks share cores wake late, now and then; what waits for that is no part of the link.
_ROUNDS, _MOST_ROUNDS, _ROUNDS_SECONDS = 4, 64, 0.05
# 64 KiB to 4 MiB, the last of them again and again: TCP begins slowly. As long as bytes come faster
# than before by that factor, their rate is not what the link carries; nor if they take less than
# that time beyond the round trip. Fewer bytes tell nothing then: a link may let some pass at once.
_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 4 << 20, 4 << 20)
_GROWTH = 1.2
_ENOUGH_SECONDS = 0.03
# Signs of life wait behind what is sent. So more bytes than before are sent only if they keep the
# link busy for no longer than that part of a heartbeat. During so many round trips it may be idle:
# TCP begins slowly.
_BUSY_PART, _IDLE_TRIPS = 0.25, 4
# Who takes less than that for 1 MiB is too fast for segments and windows to matter.
_FAST_SECONDS = 0.005
# How long what is sent to a rank may wait behind what was sent to it before, and in how many
# segments. A rank that sends to several others keeps that much waiting for each of them. The more
# it is, the less evenly they share the links: an all_reduce of 8 MiB among four hosts of 100 Mbit/s
# takes 4 % more than a plain stream would, 6 % with 5 ms and 9 % with 30. With less, the link idles
# when the other rank computes and is late to say what has come.
_QUEUE_SECONDS, _QUEUED = 0.0035, 3
_LEAST_WINDOW, _MOST_WINDOW = 32 << 10, 16 << 20
_LEAST_SEGMENT = 8 << 10
_LEAST_AHEAD = 256 << 10
# A round trip that does not take longer than copying a large frame.
_NEAR_SECONDS = 0.5e-3


class LinkSpeed(NamedTuple):
    """The slowest of the links between hosts: seconds of a round trip, and bytes per second."""

    round_trip: float
    rate: float

    def costs(self, capabilities: Capabilities) -> Costs:
        """What messages cost over it."""
        latency, beta = self.round_trip / 2, 1 / self.rate
        return Costs(capabilities.alpha, beta, capabilities.gamma, latency)

    def flow(self, most: int) -> Flow:
        """How bytes go over it, so that none wait for longer than they must.

        Args:
            most: bytes of a segment.
        """
        window = int(self.rate * (self.round_trip + _QUEUE_SECONDS))
        window = min(max(window, _LEAST_WINDOW), _MOST_WINDOW)
        queue = max(int(self.rate * _QUEUE_SECONDS / _QUEUED), _LEAST_SEGMENT)
        near = self.round_trip <= _NEAR_SECONDS
        return Flow(
            min(queue, window // 2, most),
            window,
            max(window, _LEAST_AHEAD),
            UNCOPIED if near else sys.maxsize,
        )


def measure(backend: Backend, deadline: Deadline, heartbeat: float) -> LinkSpeed:
    """Measure the links between the hosts of a job; all its ranks call this. Blocks.

    Args:
        backend: all ranks.
        deadline: for all of it.
        heartbeat: seconds after which a link that is silent breaks.

    Raises:
        The errors of a collective.
    """
    hosts = backend.hosts
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    found = np.zeros(2)
    group = backend.sub(range(backend.world_size), name="link speed")
    if backend.rank in leaders:
        among = backend.sub(leaders, name="link speed of leaders")
        found[:] = _measure(among, deadline, heartbeat)
        among.close()
    broadcast(found, group, out=found, timeout=deadline.remaining())
    group.close()
    return LinkSpeed(*found.tolist())


def _measure(group: Backend, deadline: Deadline, heartbeat: float) -> LinkSpeed:
    """Measure among the leaders."""
    there, back = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    few = np.zeros(8, np.uint8)

    def trip(*arrays: Array, dst: int, src: int) -> list[float]:
        """Send arrays, and receive as many; when each of these was there."""
        receiving = [group.irecv(np.zeros_like(array), src) for array in arrays]
        sending = [group.isend(array, dst) for array in arrays]
        ends = []
        for work in receiving:
            work.wait(deadline.remaining())
            ends.append(time.perf_counter())
        for work in sending:
            work.wait(deadline.remaining())
        return ends

    def slowest(*seconds: float) -> list[float]:
        result = all_reduce(np.array(seconds), group, op="max", timeout=deadline.remaining())
        return result.tolist()  # type: ignore[no-any-return]

    def arrival(size: int) -> float:
        """How long bytes take to come, from the first ones to the last."""
        first, last = trip(few, np.zeros(size, np.uint8), dst=there, src=back)
        return slowest(last - first)[0]

    def quickest(rounds: int) -> float:
        """How long one of so many round trips takes at least."""
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            trip(few, dst=there, src=back)
            trip(few, dst=back, src=there)
            times.append(time.perf_counter() - start)
        return min(times)

    # The ranks may have been given different heartbeats: the shortest counts.
    own = quickest(_ROUNDS)
    round_trip, beats = slowest(own, 1 / heartbeat)
    more = min(int(_ROUNDS_SECONDS / max(round_trip, 1e-6)), _MOST_ROUNDS)
    if more:
        (round_trip,) = slowest(min(own, quickest(more)))
    idle = _IDLE_TRIPS * round_trip
    rates: dict[int, float] = {}
    rate = 0.0
    for size, following in pairwise((*_SIZES, _SIZES[-1])):
        enough = idle + _BUSY_PART / beats * size / following
        seconds = arrival(size)
        if seconds > enough:  # or the machine was busy, just then
            seconds = min(seconds, arrival(size))
        before, rate = rate, max(rates.get(size, 0.0), size / max(seconds, 1e-6))
        rates[size] = rate
        if seconds > enough:
            break
        if seconds > _ENOUGH_SECONDS + round_trip and rate < _GROWTH * before:
            break
        if size >= 1 << 20 and seconds < _FAST_SECONDS:
            break
    return LinkSpeed(round_trip, rate)
