"""``played=one``: the first rank of a job in virtual time, taken to stand for all of them.

A collective takes as long as it takes between all ranks of the job, of which every group like this
one carries out the same at the same time: that is simulated message by message, once for each kind
of call, and remembered.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import fsdpcore.collectives as collectives
from fsdpcore.collectives import lone
from fsdpcore.collectives.selection.choose import predict
from fsdpcore.collectives.selection.table import ALGORITHMS
from fsdpcore.comm.backend import Backend
from fsdpcore.comm.envelope import Envelope
from fsdpcore.core.algorithm import Algorithm, CostTerms
from fsdpcore.core.buffers import Bytes, split_sizes
from fsdpcore.core.capabilities import Capabilities
from fsdpcore.core.errors import ConfigError, UnsupportedError
from fsdpcore.core.policy import Costs
from fsdpcore.core.work import Pending
from fsdpcore.simulation.abstract import abstract
from fsdpcore.simulation.fibers import VirtualClock
from fsdpcore.simulation.network import Network

from .backend import SimBackend
from .virtual import VirtualBackend, ranks, wire_of
from .wire import Wire

if TYPE_CHECKING:
    from fsdpcore.comm.config import TransportConfig

# Messages of a collective that are simulated one by one at most; of more, a formula tells the time.
_MOST = 400_000
# Of more than so many, a formula tells it too where there are few bytes: messages take their
# latency then, whatever they share.
_FEW, _SMALL = 2000, 1 << 24


_Key = tuple[str, str, tuple[int, ...], int, "np.dtype[Any] | None"]


@dataclass
class _Kind:
    """One kind of collective: what it takes, and how often there was one.

    Attributes:
        formula: told the time.
        latency: of ``seconds``, those in which messages are on their way, one after the other.
    """

    seconds: float
    carried: Mapping[str, int]
    calls: int = 0
    latency: float = 0.0
    formula: bool = False


class LoneBackend(VirtualBackend):
    """The rank that is played."""

    def __init__(self, world_size: int, config: TransportConfig, wire: Wire) -> None:
        if wire.network is not None and wire.network.memory:
            raise ConfigError(
                "played=one: a network whose ranks share memory (memory= in its file) needs all of "
                "them (played=all)"
            )
        super().__init__(0, [], world_size, config, wire)
        # What is left of a burst is not remembered from one collective to the next: there is none.
        self._network = None if wire.network is None else wire.network.without_bursts()
        self.alike = self
        self.reduce_rate = None  # it is in what a collective takes
        self._config = config
        self._kinds: dict[_Key, _Kind] = {}
        self._line = self.clock.lock()  # the collectives of a rank share its links

    def algorithms(self, backend: Backend) -> Mapping[str, Mapping[str, Algorithm]]:
        return lone.algorithms()

    def take_part(
        self,
        group: Backend,
        collective: str,
        algorithm: str = "",
        nbytes: int = 0,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        """See ``lone.Alike``."""
        if group.world_size == 1:
            return
        key = collective, algorithm, group.ranks, nbytes, dtype
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = self._work_out(*key)
        # Only what leaves keeps other collectives of this rank waiting: they share its links.
        self.clock.sleep(kind.latency)
        with self._line:
            self.clock.sleep(kind.seconds - kind.latency)
        kind.calls += 1

    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        raise _refused()

    def post_recv(self, out: Bytes, src: int, envelope: Envelope) -> Pending:
        raise _refused()

    def post_probe(self, src: int, envelope: Envelope) -> Pending:
        raise _refused()

    def drain(self) -> list[lone.Use]:
        """See ``lone.Alike``."""
        uses = [
            lone.Use(
                collective,
                algorithm,
                len(members),
                nbytes,
                seconds=kind.seconds,
                carried=kind.carried,
                formula=kind.formula,
                calls=kind.calls,
            )
            for (collective, algorithm, members, nbytes, _), kind in self._kinds.items()
            if kind.calls
        ]
        for kind in self._kinds.values():
            kind.calls = 0
        return uses

    def _work_out(
        self,
        collective: str,
        algorithm: str,
        members: Sequence[int],
        nbytes: int,
        dtype: np.dtype[Any] | None,
    ) -> _Kind:
        p, network = len(members), self._network
        alike = siblings(members, self.world_size)
        if dtype is None:
            costs, _ = self._costs(members, crowds=True)
            seconds = (p - 1).bit_length() * (2 * costs.alpha + costs.latency)
            return _Kind(seconds, {}, formula=True)
        known = ALGORITHMS[collective][algorithm]
        costs, senders = self._costs(members, crowds=known.crowds)
        terms = known.cost(p)
        messages = self.world_size * terms.alpha
        light = nbytes * senders <= _SMALL and messages > _FEW
        if network is None or collective not in _SIMULATED or messages > _MOST or light:
            seconds = self._by_formula(known, p, nbytes, costs)
            if seconds == math.inf:
                raise UnsupportedError(
                    f"played=one: no formula tells what {algorithm!r} takes among {p} ranks; take "
                    f"another algorithm of {collective}, or play all (played=all)"
                )
            carried: Mapping[str, int] = {}
            if network is not None and algorithm == "ring":
                carried = self._carried_around(network, members, round(terms.beta * nbytes))
            latency = min(self._trips(terms, nbytes) * costs.latency, seconds)
            return _Kind(seconds, carried, latency=latency, formula=True)

        def call(group: Backend) -> None:
            size = nbytes // dtype.itemsize
            array, out = abstract(size, dtype), abstract(size, dtype)
            if collective == "all_gather":
                array = abstract(size // p, dtype)
            elif collective == "reduce_scatter":
                out = abstract(split_sizes(size, p)[group.rank], dtype)
            elif collective == "broadcast":
                out = array
            function = getattr(collectives, collective)
            function(array, group, out=out, algorithm=algorithm)

        found = simulated(self._config, network, self.world_size, alike, call)
        latency = min(self._trips(terms, nbytes) * costs.latency, found.seconds)
        return _Kind(found.seconds, found.carried, latency=latency)

    def _trips(self, terms: CostTerms, nbytes: int) -> float:
        """How many latencies of messages are one after the other in a collective."""
        network = self._network
        asked = network is not None and nbytes * terms.beta > terms.alpha * network.eager
        return terms.latency * (3 if asked else 1)  # offered, asked for, and sent

    def _by_formula(
        self, known: Algorithm, p: int, nbytes: int, costs: Costs | Capabilities
    ) -> float:
        """What an algorithm takes, with as many latencies as its messages have."""
        seconds = predict(known, p, nbytes, dataclasses.replace(costs, latency=0.0))
        return seconds + self._trips(known.cost(p), nbytes) * costs.latency

    def _carried_around(
        self, network: Network, members: Sequence[int], nbytes: int
    ) -> Mapping[str, int]:
        """The bytes that links carry where all ranks send so many to the next in their groups."""
        found: Counter[int] = Counter()
        for group in siblings(members, self.world_size):
            for rank, after in zip(group, [*group[1:], group[0]], strict=True):
                links, _ = network.route(rank, after)
                found.update(dict.fromkeys(links, nbytes))
        return {network.link_name(link): carried for link, carried in found.items()}

    def _costs(self, members: Sequence[int], *, crowds: bool) -> tuple[Costs | Capabilities, int]:
        """What messages cost among evenly spaced ranks, where all groups like theirs do the same.

        Args:
            members: of the group.
            crowds: as of ``Algorithm``.

        Returns:
            Also how many ranks send over the link that is the slowest for each of them.
        """
        network = self._network
        if network is None:
            return self.capabilities, 1
        step, below, slowest, farthest = members[1] - members[0], 1, (0.0, 1), 0.0
        for level, span in enumerate(network.spans):
            senders = below if crowds else min(step, below)
            rate, latency = network.slowest(level)
            slowest, farthest = max(slowest, (senders / rate, senders)), max(farthest, latency)
            if span is None or members[0] // span == members[-1] // span:
                break
            below = span
        beta, senders = slowest
        return Costs(network.message, beta, 1 / network.reduce, farthest), senders


# What training spends its time in; of the others a formula tells the time.
_SIMULATED = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
# When all ranks begin what is timed, in latencies and in seconds: they are through with everything
# else long before.
_BEGIN = 1e3


def siblings(members: Sequence[int], world_size: int) -> list[range]:
    """The groups like one of evenly spaced ranks that together have all ranks of a job."""
    p = len(members)
    step = members[1] - members[0] if p > 1 else 1
    evenly = all(b - a == step for a, b in itertools.pairwise(members))
    if not evenly or step <= 0 or world_size % (p * step):
        raise UnsupportedError(
            "played=one: a group is not one of several that are alike, and the others cannot be "
            "taken to do the same; play all ranks (played=all)"
        )
    blocks = range(0, world_size, p * step)
    return [range(block + i, block + p * step, step) for block in blocks for i in range(step)]


def simulated(
    config: TransportConfig,
    network: Network,
    world_size: int,
    groups: Sequence[range],
    call: Callable[[Backend], None],
) -> _Kind:
    """Find out what a call takes in several groups at once, message by message."""
    options = dataclasses.replace(config.transport_options, played="all", arrays="abstract")
    clock = VirtualClock()
    wire = Wire(clock, network, world_size)
    world = ranks(world_size, dataclasses.replace(config, transport_options=options), wire)
    assert wire.flows is not None
    carried, before, ends = wire.flows.bytes_by_link, dict[int, int](), list[float]()
    farthest = max(network.slowest(level)[1] for level in range(len(network.levels)))
    begin = _BEGIN * (1 + farthest)
    clock.at(begin / 2, lambda: before.update(carried))

    def play(rank: Backend, members: range) -> None:
        group = rank.sub(members) if len(members) < world_size else rank
        group.barrier()  # the first collective of a group finds things out
        clock.sleep(begin - clock.now())
        call(group)
        ends.append(clock.now())

    tasks = [
        clock.start(functools.partial(play, world[number], members), f"rank-{number}")
        for members in groups
        for number in members
    ]
    clock.run(tasks)
    moved = {link: nbytes - before.get(link, 0) for link, nbytes in carried.items()}
    named = {network.link_name(link): nbytes for link, nbytes in moved.items() if nbytes}
    return _Kind(max(ends) - begin, named)


def one(world_size: int, config: TransportConfig) -> list[SimBackend]:
    """Make the backend of the rank that is played."""
    return [LoneBackend(world_size, config, wire_of(world_size, config))]


def _refused() -> UnsupportedError:
    return UnsupportedError(
        "played=one: a message between two ranks is not the same for all; play all (played=all)"
    )
