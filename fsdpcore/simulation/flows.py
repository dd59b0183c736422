"""The bytes that are under way at a time, and when each flow of them ends."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdpcore.simulation.bursts import FASTER, Bucket, Bursts
from fsdpcore.simulation.network import Network
from fsdpcore.simulation.sharing import fair_rates

# Ends that differ by less, relative to the time, are one moment: else rounding would make thousands
# of moments of one. At 1,000 seconds that is 14 picoseconds.
_ROUNDING = 64 * float(np.finfo(np.float64).eps)
# As many flows are found one by one. Of more, all that are under way are looked at, at once.
_FEW = 64


@dataclass(eq=False, slots=True)
class Flow:
    """Bytes on their way from one rank to another.

    Attributes:
        number: flows are numbered in the order in which they were started.
        links: the directed links that it crosses.
    """

    src: int
    dst: int
    nbytes: int
    number: int
    links: tuple[int, ...]
    slot: int = -1


class Flows:
    """The flows of a job, which share the links of its network fairly (max-min).

    Latency is the caller's: whoever sends at ``t`` starts the flow at ``t`` plus the latency of
    the route, and the last byte arrives when the flow ends.

    Moments only go forward, and none passes over an end: ``start`` and ``ended`` are called with a
    time that is neither before the last one nor after ``next_end()``. What is started and taken
    out at one moment changes the rates once, when ``next_end`` is asked for: ask once all of them
    are in. Rates are worked out anew for flows that share a link with these, directly or through
    others.

    Attributes:
        bytes_by_link: what each directed link has carried of flows that have ended.
        busy_by_link: for how many seconds there were flows on each, up to when it was last idle.
    """

    def __init__(self, network: Network, world_size: int) -> None:
        network.check_room(world_size)
        self._network = network
        self._limits = _limits(network, world_size)
        self._bursts = _bursts(network, self._limits)
        self._spreads = _spreads(network, self._limits)
        self._idle = len(self._limits) - 1  # the number of no link
        self._counts = (self._limits < math.inf).tolist()
        self._now = 0.0
        self._numbers = itertools.count()
        self._on: list[set[int]] = [set() for _ in self._limits]
        self._busy_since = [0.0] * len(self._limits)
        self._changed: dict[int, None] = {}  # links whose flows have others than before
        self._done: list[Flow] = []  # what needs no time
        self._next = math.inf
        self.bytes_by_link: dict[int, int] = {}
        self.busy_by_link: dict[int, float] = {}
        # The places of flows under way, with room for more. ``left`` and ``rate`` of a flow are as
        # of ``since``, when its rate last changed; from then on it is due at ``end``.
        self._flows: list[Flow | None] = []
        self._free: list[int] = []
        self._routes = np.full(
            (2 * len(network.levels) + 2 * bool(network.cores), 16), self._idle, np.intp
        )
        self._left, self._rate, self._since = np.zeros(16), np.zeros(16), np.zeros(16)
        self._end = np.full(16, math.inf)
        self._local = np.zeros(len(self._limits), np.intp)

    def start(self, now: float, src: int, dst: int, nbytes: int) -> Flow:
        """Let so many bytes begin to move from one rank to another."""
        self._move(now)
        links, _ = self._network.route(src, dst)
        flow = Flow(src, dst, nbytes, next(self._numbers), links)
        if nbytes > 0 and any(self._counts[link] for link in links):
            self._enter(flow)
        else:
            self._done.append(flow)
        return flow

    def next_end(self) -> float:
        """Return when the next flow ends if none is started before; infinity if there is none."""
        self._settle()
        return self._now if self._done else self._next

    def ended(self, now: float) -> list[Flow]:
        """Move on to a moment, and take out the flows that have ended, in the order of starts."""
        self._move(now)
        self._settle()
        used = len(self._flows)
        slots = np.flatnonzero(self._end[:used] <= now * (1 + _ROUNDING)).tolist()
        self._changed.update(dict.fromkeys(self._bursts.ended(now)))
        done, self._done = self._done, []
        for slot in slots:
            flow = self._flows[slot]
            assert flow is not None
            self._leave(flow)
            done.append(flow)
        for flow in done:
            for link in flow.links:
                self.bytes_by_link[link] = self.bytes_by_link.get(link, 0) + flow.nbytes
        done.sort(key=lambda flow: flow.number)
        return done

    def rate(self, flow: Flow) -> float:
        """Return the bytes per second at which a flow moves now; 0 once it has ended."""
        self._settle()
        return float(self._rate[flow.slot]) if flow.slot >= 0 else 0.0

    def _move(self, now: float) -> None:
        if now != self._now:
            self._settle()
            assert now > self._now, f"{now} is before {self._now}"
            assert now <= self._next * (1 + _ROUNDING), f"{now} is after the end at {self._next}"
            assert not self._done, f"{now} is after an end at {self._now}"
            self._now = now

    def _enter(self, flow: Flow) -> None:
        slot = flow.slot = self._free.pop() if self._free else self._new_slot()
        self._flows[slot] = flow
        self._routes[: len(flow.links), slot] = flow.links
        self._left[slot] = flow.nbytes
        self._rate[slot] = 0.0
        self._since[slot] = self._now
        for link in flow.links:
            there = self._on[link]
            if not there:
                self._busy_since[link] = self._now
            there.add(slot)
            if self._counts[link]:
                self._changed[link] = None

    def _leave(self, flow: Flow) -> None:
        slot, flow.slot = flow.slot, -1
        self._flows[slot] = None
        self._free.append(slot)
        self._routes[:, slot] = self._idle
        self._end[slot] = math.inf
        for link in flow.links:
            there = self._on[link]
            there.remove(slot)
            if not there:
                busy = self._now - self._busy_since[link]
                self.busy_by_link[link] = self.busy_by_link.get(link, 0.0) + busy
            if self._counts[link]:
                self._changed[link] = None

    def _new_slot(self) -> int:
        slot = len(self._flows)
        self._flows.append(None)
        if slot == len(self._left):
            self._routes = np.pad(self._routes, ((0, 0), (0, slot)), constant_values=self._idle)
            self._left, self._rate, self._since = (
                np.pad(each, (0, slot)) for each in (self._left, self._rate, self._since)
            )
            self._end = np.pad(self._end, (0, slot), constant_values=math.inf)
        return slot

    def _settle(self) -> None:
        """Work out the rates anew that are others since something was started or has ended."""
        if not self._changed:
            return
        slots, links = self._touched()
        self._changed.clear()
        self._local[links] = np.arange(1, len(links) + 1)
        limits = np.concatenate(([math.inf], self._limits[links]))
        if self._bursts:
            self._bursts.limits(links.tolist(), limits[1:], self._now)
        if self._spreads:
            self._spread(links.tolist(), limits[1:])
        routes = self._local[self._routes[:, slots]]
        routes = routes[routes.any(axis=1)]
        rates = fair_rates(routes, limits) if slots.size else np.empty(0)
        self._set_rates(slots, rates)
        self._next = float(self._end[: len(self._flows)].min())
        if self._bursts:
            self._bursts.carry(links.tolist(), routes, rates)
            self._next = min(self._next, self._bursts.next_end())

    def _spread(self, links: Sequence[int], limits: NDArray[np.float64]) -> None:
        """Lower the limits of links that go to several others; these have no bursts meanwhile.

        What a link does not carry then would come back as a burst, and it would carry all again.
        """
        for at, link in enumerate(links):
            most = self._spreads.get(link, math.inf)
            if most < limits[at] and len(self._ways_on(link)) > 1:
                limits[at] = most

    def _ways_on(self, link: int) -> set[int]:
        """Where flows on a link up to a level go down from there."""
        found = set()
        for slot in self._on[link]:
            flow = self._flows[slot]
            assert flow is not None
            found.add(flow.links[-1 - flow.links.index(link)])
        return found

    def _set_rates(self, slots: NDArray[np.intp], rates: NDArray[np.float64]) -> None:
        old = self._rate[slots]
        other = rates != old
        slots, rates, old = slots[other], rates[other], old[other]
        moved = old * (self._now - self._since[slots])
        left = np.maximum(self._left[slots] - moved, 0.0)
        takes = left / rates
        self._left[slots], self._rate[slots], self._since[slots] = left, rates, self._now
        self._end[slots] = self._now + takes

    def _touched(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the flows that what has changed may touch, and the links with limits they cross.

        From a link to its flows, and from a flow to its links.
        """
        links = dict.fromkeys(self._changed)
        slots: set[int] = set()
        ahead = list(links)
        while ahead:
            new = self._on[ahead.pop()] - slots
            slots |= new
            if len(slots) > _FEW:
                return self._touched_of_many(links)
            for slot in new:
                flow = self._flows[slot]
                assert flow is not None
                for link in flow.links:
                    if self._counts[link] and link not in links:
                        links[link] = None
                        ahead.append(link)
        return np.array(sorted(slots), np.intp), np.array(sorted(links), np.intp)

    def _touched_of_many(self, links: Iterable[int]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        routes = self._routes[:, : len(self._flows)]
        counts = self._limits < math.inf
        reached = np.zeros(len(self._limits), np.bool_)
        reached[list(links)] = True
        while True:
            slots = np.flatnonzero(reached[routes].any(axis=0))
            before = np.count_nonzero(reached)
            reached[routes[:, slots]] = True
            reached &= counts
            if np.count_nonzero(reached) == before:
                return slots, np.flatnonzero(reached)


def _limits(network: Network, world_size: int) -> NDArray[np.float64]:
    """Return the rate of each directed link; infinity where those below can never fill it.

    The last is the rate of no link.
    """
    limits = np.full(2 * len(network.levels) * world_size + 1, math.inf)
    below = [math.inf] * world_size  # what can come from below at most, by member
    for level in range(len(network.levels)):
        ups = [network.link(level, m) for m in range(network.members(level, world_size))]
        if level:
            size = network.levels[level - 1].size
            below = [math.fsum(below[m * size : (m + 1) * size]) for m in range(len(ups))]
        for member, up in enumerate(ups):
            rate = network.rate(up)
            if rate < below[member]:
                limits[up : up + 2] = rate
                below[member] = min(rate * (FASTER if network.burst(up) else 1), below[member])
    return limits


def _spreads(network: Network, limits: NDArray[np.float64]) -> dict[int, float]:
    """Return the rates of links while they go to several others, where these are lower."""
    limited = np.flatnonzero(limits[:-1] < math.inf).tolist()
    found = {link: network.spread(link) for link in limited}
    return {link: part * float(limits[link]) for link, part in found.items() if part < 1}


def _bursts(network: Network, limits: NDArray[np.float64]) -> Bursts:
    """Return what links let pass faster than their rate: those with a limit."""
    limited = np.flatnonzero(limits < math.inf).tolist()
    sizes = {link: network.burst(link) for link in limited}
    return Bursts(
        {link: Bucket(size, float(limits[link]), size) for link, size in sizes.items() if size}
    )
