"""What was measured: samples of a contestant, and two contestants compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from statistics import mean, median
from typing import NamedTuple

from fsdpcore.bench.harness.memory import Memory

OURS = "fsdpcore"


@dataclass
class Measurement:
    """One contestant on whatever was measured.

    Attributes:
        iterations: back to back, in each round.
        wrong: elements that were wrong, over all ranks; None where nobody looked.
        samples: for each round, the seconds of one iteration on each rank.
        memory: of each rank's process, at the end.
    """

    contestant: str
    iterations: int
    wrong: int | None = None
    samples: list[list[float]] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)

    @property
    def rounds(self) -> list[float]:
        """Seconds of one iteration in each round, the mean over the ranks."""
        return [mean(ranks) for ranks in self.samples]

    @property
    def seconds(self) -> float:
        """Seconds of one iteration: the median over the rounds."""
        return median(self.rounds)

    @property
    def best(self) -> float:
        """Seconds of one iteration in the fastest round."""
        return min(self.rounds)

    @property
    def fastest_rank(self) -> float:
        """As ``seconds``, but of the rank that was the fastest in each round."""
        return median(min(ranks) for ranks in self.samples)

    @property
    def slowest_rank(self) -> float:
        """As ``seconds``, but of the rank that was the slowest in each round."""
        return median(max(ranks) for ranks in self.samples)


class Spread(NamedTuple):
    """A quantity that has one value per round."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise values, of which there is at least one."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Comparison:
    """A peer beside ours, on one case, round by round.

    Attributes:
        ratio: the peer's time over ours: more than 1 where ours is faster.
        difference: our time less the peer's, in seconds.
        overhead: the difference in per cent of the peer's time.
        share: the difference in per cent of our time.
        best_difference: between the fastest rounds of the two, in seconds: what is left of the
            difference where something else disturbs most rounds.
        best_ratio: likewise, the peer's time over ours.
    """

    ratio: Spread
    difference: Spread
    overhead: Spread
    share: Spread
    best_difference: float
    best_ratio: float


def compare(ours: Measurement, theirs: Measurement) -> Comparison:
    """Compare two on the same case, each round of one with the same round of the other."""
    pairs = list(zip(ours.rounds, theirs.rounds, strict=True))
    return Comparison(
        Spread.of([b / a for a, b in pairs]),
        Spread.of([a - b for a, b in pairs]),
        Spread.of([100 * (a - b) / b for a, b in pairs]),
        Spread.of([100 * (a - b) / a for a, b in pairs]),
        ours.best - theirs.best,
        theirs.best / ours.best,
    )


def beside_ours(rows: Mapping[str, Measurement]) -> dict[str, Comparison]:
    """Compare every other contestant of a case with ours."""
    return {name: compare(rows[OURS], row) for name, row in rows.items() if name != OURS}


def wrong_in(rows: Mapping[str, Measurement]) -> int:
    """How much was wrong, over all contestants of a case."""
    return sum(row.wrong or 0 for row in rows.values())


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The interval that holds the median, by the sign test; all of them where they are few.

    It supposes nothing about how the values are distributed: of so many independent ones, the
    number that lie below the true median is binomial.
    """
    ordered = sorted(values)
    count = len(ordered)
    below, outside = 0.0, 0
    for number in range(count // 2):
        below += comb(count, number) / 2**count
        if 2 * below > 1 - confidence:
            break
        outside = number + 1
    first = max(0, outside - 1)
    return ordered[first], ordered[count - 1 - first]
