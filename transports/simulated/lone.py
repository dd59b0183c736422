"""``played=one``: the first rank of a job in virtual time, taken to stand for all of them.

A collective takes as long as it takes between all ranks of the job, of which every group like this
one carries out the same at the same time: that is simulated message by message, once for each kind
of call, and remembered.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import fsdpcore.collectives as collectives
from fsdpcore.collectives import lone
from fsdpcore.collectives.selection.choose import predict
from fsdpcore.collectives.selection.table import ALGORITHMS
from fsdpcore.comm.backend import Backend
from fsdpcore.core.algorithm import Algorithm
from fsdpcore.core.errors import ConfigError
from fsdpcore.simulation.abstract import abstract
from fsdpcore.simulation.fibers import VirtualClock

from .backend import SimBackend
from .virtual import VirtualBackend, ranks, scene
from .wire import Wire

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fsdpcore.comm.config import TransportConfig

# Messages of a collective that are simulated one by one at most; of more, a formula tells the time.
_MOST = 400_000
_Key = tuple[Any, ...]


class LoneBackend(VirtualBackend):
    """The rank that is played.

    Attributes:
        spent: seconds of collectives, by kind: what it is, its algorithm, ranks, and bytes.
    """

    def __init__(
        self, world_size: int, config: TransportConfig, clock: VirtualClock, wire: Wire
    ) -> None:
        super().__init__(0, [], world_size, config, clock, wire)
        self.alike = self
        self.spent: dict[_Key, list[float]] = {}
        self._config = config
        self._known: dict[_Key, float] = {}
        self._line = self.clock.lock()  # the collectives of a rank share its links

    def algorithms(self, backend: Backend) -> Mapping[str, Mapping[str, Algorithm]]:
        return lone.algorithms()

    def take_part(self, group: Backend, collective: str, algorithm: str, nbytes: int) -> None:
        """See ``lone.Alike``."""
        if group.world_size == 1:
            return
        key = collective, algorithm, group.ranks, nbytes
        if key not in self._known:
            self._known[key] = self._seconds(*key)
        seconds = self._known[key]
        with self._line:
            self.clock.sleep(seconds)
        self.spent.setdefault(key, []).append(seconds)

    def _seconds(self, collective: str, algorithm: str, ranks: Sequence[int], nbytes: int) -> float:
        p = len(ranks)
        known = ALGORITHMS[collective][algorithm] if algorithm else None
        messages = self.world_size * (known.cost(p).alpha if known else 2 * p.bit_length())
        if known is not None and (self._wire.network is None or messages > _MOST):
            return predict(known, p, nbytes, self.policy.link or self.capabilities)
        if self._wire.network is None:
            return 0.0

        def call(group: Backend) -> None:
            if known is None:
                group.barrier()
                return
            size = nbytes if collective not in _JOINING else nbytes // p
            array = abstract(max(size, 1), "uint8")
            op = {"op": "max"} if collective in _REDUCING else {}
            getattr(collectives, collective)(array, group, algorithm=algorithm, **op)

        return simulated(self._config, self.world_size, siblings(ranks, self.world_size), call)


_JOINING = ("all_gather", "gather")
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
# When all ranks begin what is timed: they are through with everything else long before.
_BEGIN = 1e3


def siblings(ranks: Sequence[int], world_size: int) -> list[range]:
    """The groups like one of evenly spaced ranks that together have all ranks of a job."""
    p = len(ranks)
    step = ranks[1] - ranks[0] if p > 1 else 1
    evenly = all(b - a == step for a, b in itertools.pairwise(ranks))
    if not evenly or step <= 0 or world_size % (p * step):
        raise ConfigError(
            "played=one: a group is not one of several that are alike, and the others cannot be "
            "taken to do the same; play all ranks (played=all)"
        )
    blocks = range(0, world_size, p * step)
    return [range(block + i, block + p * step, step) for block in blocks for i in range(step)]


def simulated(
    config: TransportConfig,
    world_size: int,
    groups: Sequence[range],
    call: Callable[[Backend], None],
) -> float:
    """Return the seconds that a call takes in several groups at once, message by message."""
    options = dataclasses.replace(config.transport_options, played="all", arrays="abstract")
    world = ranks(world_size, dataclasses.replace(config, transport_options=options))
    clock = world[0].clock
    ends: list[float] = []

    def play(rank: Backend, members: range) -> None:
        group = rank.sub(members) if len(members) < world_size else rank
        group.barrier()  # the first collective of a group finds things out
        clock.sleep(_BEGIN - clock.now())
        call(group)
        ends.append(clock.now())

    tasks = [
        clock.start(functools.partial(play, world[number], members), f"rank-{number}")
        for members in groups
        for number in members
    ]
    clock.run(tasks)
    return max(ends) - _BEGIN


def one(world_size: int, config: TransportConfig) -> list[SimBackend]:
    """Make the backend of the rank that is played."""
    clock, wire = scene(world_size, config)
    return [LoneBackend(world_size, config, clock, wire)]
