"""What a run is asked for, and how its lines are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from fsdpcore.bench.harness.measurements import OURS

# Ours with what it says encrypted; by the transport's own option.
ENCRYPTED = "encrypted"
# What virtual time says that ours takes.
SIMULATED = "simulated"


@dataclass(frozen=True)
class HostsRun:
    """What to measure, and where the results go.

    Attributes:
        parts: names of scenarios.
        transport: URL of ours.
        against: names of peers.
        rounds: how often the contestants take turns.
        json: file to write.
    """

    parts: tuple[str, ...]
    transport: str = "zmq://"
    against: tuple[str, ...] = ()
    rounds: int = 5
    json: Path | None = None

    @property
    def urls(self) -> dict[str, str]:
        """Transports of ours, by contestant."""
        found = {OURS: self.transport}
        if ENCRYPTED in self.against:
            found[ENCRYPTED] = self.transport.replace("security=none", "security=curve")
        return found

    @property
    def simulated(self) -> bool:
        """Whether virtual time is held against what was measured."""
        return SIMULATED in self.against


def error(samples: Mapping[str, Sequence[float]]) -> float:
    """How far off the simulated time is."""
    return median(samples[SIMULATED]) / median(samples[OURS]) - 1


def line(
    name: str, bound: float, samples: Mapping[str, Sequence[float]], limit: float = 0.0
) -> str:
    """What is printed of a case: seconds in ms."""
    parts = [f"  {name:42} bound {1e3 * bound:8.1f} ms"]
    for contestant, taken in samples.items():
        parts.append(
            f"{contestant} {1e3 * median(taken):8.1f} ms ({median(taken) / bound:.2f} of the "
            f"bound, {1e3 * min(taken):.1f} to {1e3 * max(taken):.1f})"
        )
    if SIMULATED in samples:
        parts.append(f"off by {100 * error(samples):+.1f} %")
    if limit:
        parts.append(f"limit {1e3 * limit:g} ms")
    return "; ".join(parts)


def milliseconds(samples: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """As they are saved."""
    return {name: [1e3 * each for each in taken] for name, taken in samples.items()}
