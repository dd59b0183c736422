"""How long the communication of a planned step takes, and how much of it is not hidden.

Pure arithmetic on the cost formulas of the collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fsdpcore.collectives.selection.choose import predict
from fsdpcore.collectives.selection.table import ALGORITHMS
from fsdpcore.core.capabilities import Capabilities
from fsdpcore.core.policy import Costs


class Issue(NamedTuple):
    """An operation is started."""

    operation: int


class WaitFor(NamedTuple):
    """The rank waits for the end of an operation."""

    operation: int


class Compute(NamedTuple):
    """The rank computes with a unit, ``factor`` times as long as in a forward pass."""

    unit: int
    factor: int


Event = Issue | WaitFor | Compute


class Times(NamedTuple):
    """Seconds of a step: all of it, without the optimizer, and waiting for communication only."""

    step: float
    exposed: float


def seconds(collective: str, ranks: int, nbytes: int, costs: Costs | Capabilities) -> float:
    """Return what the cheapest algorithm takes by the formulas.

    Args:
        collective: "all_gather", "reduce_scatter" or "all_reduce"; or "all_to_all_v" and
            "all_gather_v", which are taken for what moves equal parts.
        ranks: in the group.
        nbytes: of the full buffer, on each rank.
        costs: of the transport.
    """
    if ranks == 1 or not nbytes:
        return 0.0
    plain = Costs(costs.alpha, costs.beta, costs.gamma, costs.latency)
    return _cheapest(collective.removesuffix("_v"), ranks, nbytes, plain)


@functools.lru_cache(maxsize=4096)
def _cheapest(collective: str, ranks: int, nbytes: int, costs: Costs) -> float:
    known = [item for item in ALGORITHMS[collective].values() if item.canonical]
    return min(predict(item, ranks, nbytes, costs) for item in known)


def simulate(
    events: Iterable[Event], operations: Mapping[int, float], compute: Sequence[float]
) -> Times:
    """Play a step back: one rank that computes, and one line for all of its operations.

    Operations go one after the other, in the order in which they are issued. So what is in the
    background delays what comes after it, as it does where the links are busy.

    Args:
        events: of the step, in order.
        operations: the seconds that each takes, by number.
        compute: seconds of each unit's forward pass.
    """
    clock = free = computed = 0.0
    ends: dict[int, float] = {}
    for event in events:
        if isinstance(event, Compute):
            taken = event.factor * compute[event.unit]
            clock, computed = clock + taken, computed + taken
        elif isinstance(event, Issue):
            free = max(clock, free) + operations[event.operation]
            ends[event.operation] = free
        else:
            clock = max(clock, ends[event.operation])
    return Times(clock, max(0.0, clock - computed))
