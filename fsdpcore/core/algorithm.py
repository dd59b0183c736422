"""``Algorithm``: what is known of an algorithm of a collective, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from fsdpcore.core.policy import Costs


class CostTerms(NamedTuple):
    """A cost: messages, and bytes moved and reduced as multiples of n, on the busiest rank; trips.

    Messages and bytes are those that a rank sends or those that it receives, whichever are more;
    for ``star``, whose centre first receives and then sends, both together. The trips
    (``latency``) are the longest chain of messages each of which waits for the one before it.
    """

    alpha: float
    beta: float
    gamma: float
    latency: float = 0


class Comparison(Enum):
    """How the ranks' calls are compared while data moves, so that no step ahead of it is needed."""

    BY_MESSAGES = "a message is marked with the call, and taken in that call only"
    IN_MEMORY = "in the first step that the ranks take in their shared memory"
    NOT_AT_ALL = "what moves the data knows nothing of calls"


def _anything(dtype: np.dtype[Any] | None, op: str) -> bool:
    return True


class Algorithm(NamedTuple):
    """An algorithm for one collective.

    Attributes:
        module: has a function named like the collective; None where ``move`` carries it out.
        cost: for p ranks, all on one host as far as that makes a difference.
        canonical: its reductions follow the canonical order.
        supports: whether it can handle a dtype (None where it is not known yet) and reduction.
        costs: what its messages and bytes cost, where those are not the transport's.
        comparison: how the ranks' calls are compared while it moves data. One that moves it past
            the context that it is given, and past shared memory, compares nothing.
        publishes: above so many bytes it uses arrays in place if all ranks see them; 0 for never.
        besides: seconds that it takes beyond what ``cost`` tells, for so many bytes.
        crowds: all ranks of a host may send to other hosts at the same time, over its one link. If
            not, one does.
        move: ``move(context, movement, layout, source, out)`` carries any collective out by its
            movement.
    """

    module: object
    cost: Callable[[int], CostTerms]
    canonical: bool = True
    supports: Callable[[np.dtype[Any] | None, str], bool] = _anything
    costs: Costs | None = None
    comparison: Comparison = Comparison.BY_MESSAGES
    publishes: int = 0
    besides: Callable[[int], float] | None = None
    crowds: bool = True
    move: Callable[..., None] | None = None
