"""Faults that tests inject into the simulated transport: delays, lost messages, dying ranks."""

from __future__ import annotations

import random
import threading
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from fsdpcore.core.clock import Clock
from fsdpcore.core.errors import CommunicationError


class InjectedCrash(CommunicationError):  # noqa: N818 (what happened, not an error of the library)
    """Raised on a rank that a ``Faults`` plan lets die."""


@dataclass(frozen=True)
class Faults:
    """A reproducible plan of faults.

    Attributes:
        seed: of the delays; equal seeds give every rank the same sequence of delays.
        max_delay: every post of a message first sleeps between 0 and this many seconds.
        drop: for a sender and receiver, the numbers (from 0) of the messages that get lost.
        crash: for a rank, the number of posts after which it dies without a word, as a process
            would that is killed: its own calls raise, and its peers find it gone.
    """

    seed: int = 0
    max_delay: float = 0.0
    drop: Mapping[tuple[int, int], Container[int]] = field(default_factory=dict)
    crash: Mapping[int, int] = field(default_factory=dict)


class FaultInjector:
    """Carries a plan out on one rank."""

    def __init__(self, plan: Faults, rank: int, clock: Clock) -> None:
        self._clock = clock
        self._plan = plan
        self._rank = rank
        self._random = random.Random(f"{plan.seed}/{rank}")  # noqa: S311 (reproducible on purpose)
        self._lock = threading.Lock()
        self._posts = 0
        self._sent: dict[int, int] = {}

    def before_post(self) -> bool:
        """Delay one post; return whether this rank is to die now."""
        with self._lock:
            self._posts += 1
            delay = self._random.uniform(0, self._plan.max_delay)
            dies = self._posts > self._plan.crash.get(self._rank, self._posts)
        if self._plan.max_delay > 0:
            self._clock.sleep(delay)
        return dies

    def drops(self, dst: int) -> bool:
        """Count one message to ``dst``; return whether it gets lost."""
        with self._lock:
            number = self._sent.get(dst, 0)
            self._sent[dst] = number + 1
        return number in self._plan.drop.get((self._rank, dst), ())
