"""How ``algorithm="auto"`` is decided: settings, overrides and costs, the same on every rank.

A ``Policy`` is made from the configuration and stays with the transport. Ranks with different
policies could choose different algorithms and hang, so its ``digest`` is part of what the ranks
compare of each call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from fsdpcore.core.digests import hex_digest


class AlgorithmRange(NamedTuple):
    """An algorithm, for sizes from ``low`` to ``high`` bytes, both included; None for no end."""

    algorithm: str
    low: int = 0
    high: int | None = None

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.low}-{'max' if self.high is None else self.high}"


class AlgorithmRanges(tuple[AlgorithmRange, ...]):
    """Ranges that do not overlap, in ascending order; there may be gaps."""

    __slots__ = ()

    def at(self, nbytes: int) -> str | None:
        """The algorithm for a size; None in a gap."""
        for algorithm, low, high in self:
            if low <= nbytes and (high is None or nbytes <= high):
                return algorithm
        return None

    def __str__(self) -> str:
        return ";".join(str(item) for item in self)


@dataclass(frozen=True)
class Costs:
    """What messages and bytes cost, in seconds.

    Attributes:
        alpha: per message, of a rank that sends or receives several.
        beta, gamma: per byte moved, and per byte reduced.
        latency: per trip, beyond alpha: from when a message is sent until it is there. It counts
            for messages one after the other, each of which waits for the one before; alpha counts
            for those that leave at once, too. 0 where both ranks are on one host.
    """

    alpha: float
    beta: float
    gamma: float
    latency: float = 0.0


@dataclass(frozen=True)
class MeasuredAlgorithms:
    """The fastest algorithms, as they were measured in a group of ``ranks`` on ``hosts`` hosts.

    Attributes:
        best: by collective.
        general: by collective, the fastest of those that every transport has; for reductions
            and dtypes that the transport's own algorithms do not support.
    """

    ranks: int
    hosts: int = 1
    best: Mapping[str, AlgorithmRanges] = field(default_factory=dict)
    general: Mapping[str, AlgorithmRanges] = field(default_factory=dict)


@dataclass(frozen=True)
class Tuning:
    """What is known about the speed of one transport.

    Attributes:
        costs: None where nothing is known; the transport's ``Capabilities`` then count.
        own: costs of the transport's own algorithms by name, where they differ from ``costs``.
        measured: at most one entry for each number of ranks and hosts.
    """

    costs: Costs | None = None
    own: Mapping[str, Costs] = field(default_factory=dict)
    measured: tuple[MeasuredAlgorithms, ...] = ()

    def over(self, other: Tuning) -> Tuning:
        """This, and what ``other`` knows beyond it."""
        mine = {(entry.ranks, entry.hosts) for entry in self.measured}
        rest = tuple(e for e in other.measured if (e.ranks, e.hosts) not in mine)
        return Tuning(self.costs or other.costs, {**other.own, **self.own}, (*self.measured, *rest))

    def for_group(self, ranks: int, hosts: int) -> MeasuredAlgorithms | None:
        """What was measured in a group of this size."""
        for entry in self.measured:
            if (entry.ranks, entry.hosts) == (ranks, hosts):
                return entry
        return None


@dataclass(frozen=True)
class Policy:
    """How a job chooses algorithms; without arguments, from the transport's own costs alone.

    Attributes:
        deterministic: only algorithms that reduce in the canonical order.
        overrides: what the user wants, by collective; it wins over everything but a call's own
            ``algorithm=``.
        tuning: of the transport in use.
        link: what messages cost between the hosts of the job, as was measured when it began; equal
            on all ranks, and set before their first collective. It counts for groups that span
            hosts, unless ``tuning`` has the fastest algorithms for such a group.
    """

    deterministic: bool = False
    overrides: Mapping[str, AlgorithmRanges] = field(default_factory=dict)
    tuning: Tuning = field(default_factory=Tuning)
    link: Costs | None = None

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits that are equal where the choices are."""
        tuning = self.tuning
        entries = [
            (e.ranks, e.hosts, _text(e.best), _text(e.general))
            for e in sorted(tuning.measured, key=lambda e: (e.ranks, e.hosts))
        ]
        known = (tuning.costs, sorted(tuning.own.items()), entries)
        chosen_by = (self.deterministic, _text(self.overrides), _digest(known, 8), self.link)
        return _digest(chosen_by, 8)

    def __str__(self) -> str:
        """Say in short what the ranks may differ in; the digest comes first, to tell all apart."""
        words = ["deterministic"] if self.deterministic else []
        words += [f"{name}={text}" for name, text in _text(self.overrides)]
        words += [f"measured for {e.ranks} ranks on {e.hosts} hosts" for e in self.tuning.measured]
        return f"policy {self.digest} ({'; '.join(words) or 'nothing but costs'})"


def _text(ranges: Mapping[str, AlgorithmRanges]) -> list[tuple[str, str]]:
    return sorted((name, str(value)) for name, value in ranges.items())


def _digest(value: object, size: int) -> str:
    return hex_digest(repr(value).encode(), size)
