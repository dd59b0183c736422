"""What was measured of a case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from checkpoint_bench.cases import COPY, OURS, Case
from fsdpcore.bench.results import Spread


@dataclass
class Row:
    """One contestant.

    Attributes:
        samples: for each round, the seconds on each rank.
        durable: likewise, of saves in the background: until it was on disk.
        added: bytes that the first time added to the resident set of each rank, at its peak.
        wrong: elements that were wrong in the end, over all ranks; None where nobody looked.
    """

    samples: list[list[float]] = field(default_factory=list)
    durable: list[list[float]] = field(default_factory=list)
    added: list[float] = field(default_factory=list)
    wrong: int | None = None

    @property
    def rounds(self) -> list[float]:
        """Seconds of the slowest rank in each round."""
        return [max(ranks) for ranks in self.samples]

    @property
    def seconds(self) -> Spread:
        """The same, over the rounds."""
        return Spread.of(self.rounds)

    @property
    def durable_seconds(self) -> float | None:
        """The median over the rounds of the slowest rank's seconds until all was on disk."""
        return median(map(max, self.durable)) if self.durable else None


@dataclass(frozen=True)
class Result:
    """One case, with all contestants.

    Attributes:
        case: what was measured.
        nbytes: of all arrays.
        rows: by contestant, ours first.
        filesystem: that it was measured on.
        setting: of the peer; empty where it has none, or there is no peer.
        trials: seconds of the peer's fastest save, by setting.
    """

    case: Case
    nbytes: int
    rows: Mapping[str, Row]
    filesystem: str
    setting: str
    trials: Mapping[str, float]

    def ratio(self, contestant: str) -> Spread:
        """Return its time over ours in the same round."""
        pairs = zip(self.rows[OURS].rounds, self.rows[contestant].rounds, strict=True)
        return Spread.of([theirs / ours for ours, theirs in pairs])

    def best_ratio(self, contestant: str) -> float:
        """Return the same between the fastest rounds of the two."""
        return min(self.rows[contestant].rounds) / min(self.rows[OURS].rounds)

    @property
    def stall(self) -> Spread | None:
        """Our stall over a memcpy of the shard in the same round."""
        if COPY not in self.rows:
            return None
        pairs = zip(self.rows[OURS].rounds, self.rows[COPY].rounds, strict=True)
        return Spread.of([ours / copy for ours, copy in pairs])
