"""``Wire``: how messages get from rank to rank in virtual time.

What one rank sends to another is a stream, as over TCP: its bytes leave one message after the
other, and it arrives in the order in which it was sent. Streams share the links of the network
fairly. Without a network every message takes no time, or, where the schedule is drawn, a time that
is drawn for it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fsdpcore.core.policy import Costs
from fsdpcore.simulation.fibers import VirtualClock
from fsdpcore.simulation.flows import Flow, Flows
from fsdpcore.simulation.network import Network

# The longest time that is drawn for a message where there is no network.
_LONGEST = 1e-3
# As many bytes of a message as a core moves before it does something else.
_PART = 128 * 1024


@dataclass(eq=False)
class _Parcel:
    """A message of a stream.

    Attributes:
        nbytes: that flow.
        ready: when its first byte may arrive.
        arrived: what to do when it has, and all before it that are handed over in order.
        in_order: it is, behind those before it.
        here: it has arrived.
    """

    nbytes: int
    ready: float
    arrived: Callable[[], None]
    in_order: bool
    here: bool = False


@dataclass(eq=False)
class _Stream:
    """What is under way from one rank to another.

    Attributes:
        leaving: parcels that cores move out to the link, one after the other.
        flowing: parcels whose bytes have not all arrived; those of the first one move.
        taken_in: when cores have moved in what has arrived.
        coming: those to be handed over in order, until they are.
        parcels: how many have not been handed over.
    """

    leaving: deque[_Parcel] = field(default_factory=deque)
    flowing: deque[_Parcel] = field(default_factory=deque)
    taken_in: float = 0.0
    coming: deque[_Parcel] = field(default_factory=deque)
    parcels: int = 0


class Wire:
    """The streams between all ranks of a job.

    Args:
        clock: of the job.
        network: over which they go; None for one that takes no time.
        world_size: number of ranks.

    Attributes:
        clock: as given.
        hosts, costs: where there is a network, the number of each rank's host, and what a message
            costs between the ranks that are farthest from each other.
    """

    def __init__(self, clock: VirtualClock, network: Network | None, world_size: int) -> None:
        self.network, self.clock = network, clock
        if network is not None:
            network.check_room(world_size)
            self.costs = _costs(network, world_size)
        self.hosts = tuple(network.hosts(world_size)) if network is not None else ()
        self.flows = None if network is None else Flows(network, world_size)
        self._cores = 0 if network is None else min(network.cores, world_size)
        self._copy_seconds = 1 / network.copy if network is not None and network.cores else 0.0
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._moving: dict[Flow, tuple[_Stream, _Parcel]] = {}
        self._free: dict[int, list[float]] = {}  # when each of the cores that ranks share is
        self._alarms = itertools.count()
        self._alarm = -1
        self._settling = False

    def latency(self, src: int, dst: int) -> float:
        """Seconds until something small has come from one rank to another, however busy."""
        if self.network is not None:
            return self.network.route(src, dst)[1]
        drawn = self.clock.random
        return 0.0 if drawn is None else drawn.uniform(0, _LONGEST)

    def processed(self, rank: int, seconds: float) -> float:
        """Have a rank's core do something now; return when that is done.

        What is done on cores that ranks share begins when one of these is free.
        """
        network, now = self.network, self.clock.now()
        assert network is not None
        if not network.cores:
            return now + seconds
        free = self._free.setdefault(network.processor(rank), [0.0] * self._cores)
        end = max(now, free[0]) + seconds
        heapq.heapreplace(free, end)
        return end

    def send(self, src: int, dst: int, nbytes: int, arrived: Callable[[], None]) -> None:
        """Send a message; ``arrived`` is called when it has come, and all that was sent before.

        Without bytes it does not wait for those of others.
        """
        self._send(src, dst, nbytes, arrived, in_order=True)

    def move(self, src: int, dst: int, nbytes: int, arrived: Callable[[], None]) -> None:
        """Send the bytes of a message that was sent without; ``arrived`` is called when all are."""
        self._send(src, dst, nbytes, arrived, in_order=False)

    def answer(self, src: int, dst: int, arrived: Callable[[], None]) -> None:
        """Say something small that no message waits for."""
        self.clock.at(self.clock.now() + self.latency(src, dst), arrived)

    def _send(
        self, src: int, dst: int, nbytes: int, arrived: Callable[[], None], *, in_order: bool
    ) -> None:
        stream = self._streams.setdefault((src, dst), _Stream())
        ready = self.clock.now() + self.latency(src, dst)
        parcel = _Parcel(nbytes, ready, arrived, in_order)
        stream.parcels += 1
        if in_order:
            stream.coming.append(parcel)
        if nbytes == 0 or self.flows is None:
            self.clock.at(ready, lambda: self._hand_over(src, dst, stream, parcel))
        elif self._copy_seconds:
            stream.leaving.append(parcel)
            if len(stream.leaving) == 1:
                self._copy(src, dst, stream, nbytes)
        else:
            self._flow(src, dst, stream, parcel)

    def _flow(self, src: int, dst: int, stream: _Stream, parcel: _Parcel) -> None:
        """Let the bytes of a parcel move behind those before it."""
        stream.flowing.append(parcel)
        if len(stream.flowing) == 1:
            self._start(src, dst, stream)

    def _copy(self, src: int, dst: int, stream: _Stream, left: int) -> None:
        """Have cores move what is left of a parcel, part by part: out where it is, in there."""
        parcel, nbytes = stream.leaving[0], min(left, _PART)
        seconds = nbytes * self._copy_seconds
        latency = self.latency(src, dst)

        def is_out() -> None:
            part = _Parcel(nbytes, self.clock.now() + latency, has_come, in_order=False)
            stream.parcels += 1
            self._flow(src, dst, stream, part)
            if left > nbytes:
                self._copy(src, dst, stream, left - nbytes)
                return
            stream.leaving.popleft()
            if stream.leaving:
                self._copy(src, dst, stream, stream.leaving[0].nbytes)

        def has_come() -> None:
            end = self.processed(dst, seconds)
            stream.taken_in = max(stream.taken_in, end)
            if left == nbytes:
                at = stream.taken_in
                self.clock.at(at, lambda: self._hand_over(src, dst, stream, parcel))

        self.clock.at(self.processed(src, seconds), is_out)

    def under_way(self, src: int, dst: int) -> bool:
        """Whether something from one rank has not come to another yet."""
        return (src, dst) in self._streams

    def _hand_over(self, src: int, dst: int, stream: _Stream, parcel: _Parcel) -> None:
        """Take note that a parcel has come; hand over what nothing before it keeps back."""
        parcel.here = True
        coming = stream.coming
        handed = [] if parcel.in_order else [parcel]
        while coming and coming[0].here:
            handed.append(coming.popleft())
        for each in handed:
            stream.parcels -= 1
            if not stream.parcels:
                del self._streams[src, dst]
            each.arrived()

    def _start(self, src: int, dst: int, stream: _Stream) -> None:
        """Let the bytes of the first parcel of a stream move as soon as they may."""
        parcel, now = stream.flowing[0], self.clock.now()

        def begin() -> None:
            assert self.flows is not None
            flow = self.flows.start(self.clock.now(), src, dst, parcel.nbytes)
            self._moving[flow] = stream, parcel
            self._settle_soon()

        if parcel.ready > now or self.clock.computing:  # flows go by the time of all
            self.clock.at(max(parcel.ready, now), begin)
        else:
            begin()

    def _settle_soon(self) -> None:
        """Ask for the next end when all has been started and taken out that is due now."""
        if not self._settling:
            self._settling = True
            self.clock.at(self.clock.now(), self._settle)

    def _settle(self) -> None:
        assert self.flows is not None
        self._settling = False
        self._alarm = alarm = next(self._alarms)
        end = self.flows.next_end()
        if self._moving:
            self.clock.at(max(end, self.clock.now()), lambda: self._take_out(alarm))

    def _take_out(self, alarm: int) -> None:
        """Hand over what has come by now, unless the ends have moved since."""
        if alarm != self._alarm or self.flows is None:
            return
        for flow in self.flows.ended(self.clock.now()):
            stream, parcel = self._moving.pop(flow)
            stream.flowing.popleft()
            if stream.flowing:
                self._start(flow.src, flow.dst, stream)
            self._hand_over(flow.src, flow.dst, stream, parcel)
        self._settle_soon()


def _costs(network: Network, world_size: int) -> Costs:
    """What a message costs over the highest links that there are between the ranks."""
    below = (1, *network.spans)  # ranks under each member that a level connects
    used = [
        level
        for level, span in zip(network.levels, below, strict=False)
        if span is not None and span < world_size
    ]
    highest = used[-1] if used else network.levels[0]
    return Costs(network.message, 1 / highest.rate, 1 / network.reduce, highest.latency)
