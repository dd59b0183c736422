"""What is measured, on which hosts, and the least that it can take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

MIB = 1 << 20
EXCHANGE, BARRIER = "exchange", "barrier"


class Link(NamedTuple):
    """What plain TCP found of a link in the same run.

    Attributes:
        goodput: bytes per second that one stream carries.
        together: bytes per second of each stream, where every host sends one and receives one.
        round_trip: seconds.
    """

    goodput: float
    together: float
    round_trip: float


@dataclass(frozen=True)
class Case:
    """A collective, a barrier, or pairs of ranks that exchange messages.

    Attributes:
        operation: its name.
        size: in bytes, as in ``fsdpcore bench``; of an exchange, of the message each way.
        pairs: of an exchange: ranks 0 and 1, 2 and 3, and so on; the others do nothing.
        late: seconds after which one rank of each pair begins.
        parts: of an exchange: in how many messages each way.
        times: how often in a row, for the time of one. Links let some bytes pass at once after they
            were idle; in a row they do not.
        limit: seconds that it may take, where the bound does not say it.
    """

    operation: str
    size: int = 0
    pairs: int = 0
    late: float = 0.0
    parts: int = 1
    times: int = 1
    limit: float = 0.0

    @property
    def name(self) -> str:
        """For tables."""
        parts = [f"{self.pairs} pairs," if self.pairs > 1 else "1 pair," if self.pairs else ""]
        if self.size:
            whole = self.size % MIB == 0
            parts.append(f"{self.size // MIB} MiB" if whole else f"{self.size} B")
        if self.parts > 1:
            parts.append(f"in {self.parts} messages,")
        late = f", one {1e3 * self.late:g} ms later" if self.late else ""
        return " ".join(filter(None, [*parts, self.operation])) + late

    def order(self) -> dict[str, Any]:
        """As a rank gets it, in JSON."""
        return asdict(self)

    def bound(self, ranks: int, link: Link) -> float:
        """Seconds that it takes at least where every rank has a link of its own.

        That is what the busiest link has to carry, at the rate of a plain stream, and the way
        from one host to another where that is long.
        """
        share = (ranks - 1) / ranks
        parts = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share}
        moving = self.size * parts.get(self.operation, 1.0) / link.goodput
        return self.late + moving + link.round_trip / 2


@dataclass(frozen=True)
class Scenario:
    """Hosts, their links, and what is measured on them.

    Attributes:
        name: for ``--parts``.
        hosts, per_host: of the ranks.
        rate: of each link, in bits per second; ``slowest`` is that of the last host's.
        delay: from one host to another, in seconds.
        cases: one after the other.
    """

    name: str
    hosts: int
    rate: float
    cases: tuple[Case, ...]
    per_host: int = 1
    delay: float = 0.0
    slowest: float = 0.0

    @property
    def large(self) -> tuple[Case, ...]:
        """By which the rate of the links is found: each takes about half a second.

        In the first one all hosts send at the same time, in the last one does.
        """
        size = MIB * max(2, round(16 * self.rate / 1e9))
        return Case("all_gather", size, times=4), Case("broadcast", size, times=4)

    @property
    def alone(self) -> dict[str, Case]:
        """By which what the processor takes is found, over links without a limit.

        A byte, a message that comes behind others, and one that a rank has to be woken for.
        """
        stream = Case(EXCHANGE, 256 << 10, self.ranks // 2, parts=64, times=8)
        return {"byte": _COPIED, "message": stream, "wake": _SMALL}

    @property
    def ranks(self) -> int:
        """Of all hosts."""
        return self.hosts * self.per_host

    @property
    def title(self) -> str:
        """In words."""
        words = f"{self.hosts} hosts, {self.ranks} ranks, links of {_in_words(self.rate)}"
        if self.slowest:
            words += f", the last one's of {_in_words(self.slowest)}"
        return words + (f", round trip {2e3 * self.delay:g} ms" if self.delay else "")


def _in_words(rate: float) -> str:
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


_LARGE = (Case("all_reduce", 8 * MIB), Case("all_gather", 8 * MIB), Case("broadcast", 8 * MIB))
_PAIRS = tuple(Case(EXCHANGE, MIB, pairs, late) for late in (0.0, 0.01) for pairs in (1, 2))
_SEVERAL = tuple(
    Case(operation, size, times=times)
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    for size, times in ((256 << 10, 16), (4 * MIB, 2), (16 * MIB, 1))
)
_COPIED = Case("all_gather", 2 * MIB, times=4)
_SMALL = Case("all_gather", 64 << 10, times=32)
_FAR = (
    Case(BARRIER, limit=0.023),
    Case("all_reduce", 8, limit=0.023),
    Case("broadcast", 8, limit=0.023),
    Case("all_gather", 8, limit=0.023),
    Case("all_reduce", MIB, limit=0.070),
    Case("broadcast", MIB, limit=0.045),
)

SCENARIOS: tuple[Scenario, ...] = (
    Scenario("rate", 4, 100e6, _LARGE),
    Scenario("pairs", 4, 100e6, _PAIRS),
    Scenario("slow", 4, 100e6, _LARGE, slowest=50e6),
    Scenario("far", 4, 1e9, _FAR, delay=0.01),
    Scenario("shared", 2, 100e6, (Case("all_reduce", 8 * MIB), Case("all_reduce", 65536)), 2),
    *(
        Scenario(f"{hosts}x{name}", hosts, rate, tuple(c for c in _SEVERAL if c.size <= largest))
        for name, rate, largest in (("100m", 100e6, 4 * MIB), ("1g", 1e9, 16 * MIB))
        for hosts in (2, 4, 8)
    ),
)


# Enough units that the first gather and the last reduction, which nothing can hide, are small. The
# first one sends more than it computes, the second one computes more.
_SENDING = {"layers": 8, "width": 256, "heads": 4, "context": 64, "batch": 8}
_COMPUTING = {"layers": 8, "width": 128, "heads": 2, "context": 128, "batch": 192}


class Way(NamedTuple):
    """How an engine trains: its strategy, and ``compress`` and ``every`` as of ``Training``."""

    strategy: str
    compress: str = ""
    every: int = 0

    @property
    def name(self) -> str:
        """For tables."""
        what = f"outer steps, every {self.every}" if self.every else self.strategy
        return f"{what}, {self.compress}" if self.compress else what


_STRATEGIES = ("full_shard", "shard_grad_op", "shard_optimizer", "hybrid_shard", "no_shard")
_COMPRESSED = (
    Way("full_shard"),
    Way("full_shard", "int8"),
    Way("full_shard", "int4"),
    Way("full_shard", "int8,int4,keep"),
    Way("shard_grad_op"),
    Way("shard_grad_op", "int4"),
    Way("no_shard", "int4", 12),
)


@dataclass(frozen=True)
class TrainingScenario:
    """A GPT that is trained on a few hosts, in one way after the other.

    Attributes:
        name: for ``--parts``.
        rate: of each link, in bits per second.
        ways: to train.
        sizes: of the model and the batch, as ``Training`` takes them.
    """

    name: str
    rate: float
    ways: tuple[Way, ...] = field(default=tuple(Way(each) for each in _STRATEGIES))
    hosts: int = 2
    per_host: int = 2
    sizes: Mapping[str, Any] = field(default_factory=lambda: dict(_SENDING))

    @property
    def ranks(self) -> int:
        """Of all hosts."""
        return self.hosts * self.per_host

    @property
    def title(self) -> str:
        """In words."""
        links = f"links of {_in_words(self.rate)}"
        return f"training a GPT: {self.hosts} hosts, {self.ranks} ranks, {links}"


TRAININGS = (
    TrainingScenario("train-100m", 100e6),
    TrainingScenario("train-1g", 1e9, sizes=_COMPUTING),
    TrainingScenario("slow-100m", 100e6, _COMPRESSED, hosts=4, per_host=1),
    TrainingScenario("slow-1g", 1e9, _COMPRESSED, hosts=4, per_host=1),
)
