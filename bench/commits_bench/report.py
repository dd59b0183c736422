"""How two commits differ: a line per case, a record per case, and a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import exp, log
from statistics import median
from typing import Any

from commits_bench.cases import Case, Setting
from fsdpcore.bench.harness.measurements import Measurement, median_interval
from fsdpcore.bench.harness.table import microseconds

OLD, NEW = "old", "new"
LIMIT = 1.05
"""A ratio beyond this is a defect, if the interval does not reach down to 1."""

_LINE = "{:<22}{:>10} {:<8}{:>11}{:>11}{:>8}{:>8}{:>8}  {}"


@dataclass
class Compared:
    """One case on the ranks of one setting.

    Attributes:
        setting, case: what was measured.
        starts: for each start of the ranks, seconds per iteration of old and new in each round.
        again: the same measured once more, where it seemed slower the first time.
    """

    setting: Setting
    case: Case
    starts: list[list[tuple[float, float]]] = field(default_factory=list)
    again: Compared | None = None

    def add(self, old: Measurement, new: Measurement) -> None:
        """Add what one start has given."""
        self.starts.append(list(zip(old.rounds, new.rounds, strict=True)))

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """Of all rounds."""
        return [pair for start in self.starts for pair in start]

    @property
    def ratio(self) -> float:
        """New over old, in the same round: more than 1 where new is slower."""
        return _ratio(self.pairs)

    @property
    def interval(self) -> tuple[float, float]:
        """Within which the median of the ratios lies, with 95 % confidence."""
        return median_interval([new / old for old, new in self.pairs])

    @property
    def slower(self) -> bool:
        """Whether new is slower by more than the limit, each time that this was measured.

        Of hundreds of cases a few seem slower by chance, and hardly one of them twice.
        """
        here = self.ratio > LIMIT and self.interval[0] > 1
        return here and (self.again is None or self.again.slower)

    @property
    def faster(self) -> bool:
        """Likewise."""
        return self.ratio < 1 / LIMIT and self.interval[1] < 1

    def line(self) -> str:
        """A line of the table."""
        old, new = (microseconds(median(values)) for values in zip(*self.pairs, strict=True))
        numbers = (f"{value:.3f}" for value in (self.ratio, *self.interval))
        word = "SLOWER" if self.slower else "faster" if self.faster else ""
        starts = " ".join(f"{_ratio(start):.2f}" for start in self.starts)
        case = self.case
        return _LINE.format(
            case.name, case.size, case.memory, old, new, *numbers, f"[{starts}] {word}"
        ).rstrip()

    def record(self) -> dict[str, Any]:
        """Everything about it, for JSON."""
        low, high = self.interval
        return {
            "transport": self.setting.transport,
            "ranks": self.setting.ranks,
            **asdict(self.case),
            "ratio": round(self.ratio, 4),
            "low": round(low, 4),
            "high": round(high, 4),
            "slower": self.slower,
            "again": None if self.again is None else round(self.again.ratio, 4),
            "starts_us": [
                [[round(1e6 * old, 3), round(1e6 * new, 3)] for old, new in start]
                for start in self.starts
            ],
        }


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return median(new / old for old, new in pairs)


def header(setting: Setting, versions: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The lines above a table, with the modules that were compared."""
    where = ", ".join(f"{name} {versions.get(name, {}).get('fsdpcore')}" for name in (OLD, NEW))
    names = (
        "# case",
        "size (B)",
        "arrays",
        "old (us)",
        "new (us)",
        "ratio",
        "low",
        "high",
        "starts",
    )
    return [f"# {setting.transport}, {setting.ranks} ranks; {where}", _LINE.format(*names)]


def summary(found: Sequence[Compared]) -> list[str]:
    """What a reader wants to know first."""
    if not found:
        return ["# nothing was measured"]
    slower = [one for one in found if one.slower]
    mean = exp(sum(log(one.ratio) for one in found) / len(found))
    lines = [
        f"# {len(found)} cases, geometric mean of the ratios {mean:.3f}; "
        f"{sum(one.faster for one in found)} faster and {len(slower)} slower by more than 5 %"
    ]
    for one in sorted(slower, key=lambda one: -one.ratio):
        lines.append(f"# SLOWER {one.setting.transport} {one.setting.ranks}: {one.line()}")
    return lines
