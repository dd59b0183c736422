"""What a planned step writes down: its collectives, its events, and what is alive at the peak."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from fsdpcore.fsdp.plan.times import Compute, Event, Issue, WaitFor

StepPhase = Literal["forward", "backward", "update"]
CollectiveKind = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "all_to_all_v", "all_gather_v"
]


@dataclass(frozen=True)
class PlannedCollective:
    """One collective of a step, as one rank sees it.

    Attributes:
        phase: of the step.
        kind: the collective; those with ``_v`` sum the gradients of virtual ranks.
        unit: name of the unit; empty for what concerns all of them.
        microbatch: number, from 0.
        group_size: ranks that take part.
        nbytes: of the full buffer, padding included.
        padding: how many of these are padding.
        bytes_sent: by this rank, with an algorithm that sends as little as possible.
        live_bytes: gathered parameters and full gradients once it is issued.
        background: the rank goes on computing in the meantime.
        seconds: that it takes; None where the costs of the transport are not known.
    """

    phase: StepPhase
    kind: CollectiveKind
    unit: str
    microbatch: int
    group_size: int
    nbytes: int
    padding: int
    bytes_sent: int
    live_bytes: int
    background: bool
    seconds: float | None = None

    @property
    def padding_sent(self) -> Fraction:
        """How much of ``bytes_sent`` is padding, as the mean over the ranks of the group."""
        return Fraction(self.bytes_sent * self.padding, self.nbytes) if self.nbytes else Fraction(0)


@dataclass(frozen=True)
class Live:
    """Bytes that are alive during a step only.

    Attributes:
        parameters: gathered, and larger parts than the own shard.
        gradients: full ones, which are written or reduced or wait for that.
    """

    parameters: int
    gradients: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients


class StepLog:
    """One step, as far as it has come.

    Attributes:
        phase, microbatch: where it is.
        computes: the rank computes in its passes, and does not just make them with others.
        collectives: in the order in which they are issued.
        events: what the rank does, for ``times.simulate``.
        peak: what is alive at the moment when most is.
    """

    def __init__(self) -> None:
        self.phase: StepPhase = "forward"
        self.microbatch = 0
        self.computes = True
        self.collectives: list[PlannedCollective] = []
        self.events: list[Event] = []
        self.peak = Live(0, 0)
        self._parameters = 0  # alive now, as in Live
        self._gradients = 0

    def issue(
        self,
        kind: CollectiveKind,
        unit: str,
        ranks: int,
        nbytes: int,
        padding: int,
        *,
        sent: int,
        background: bool,
    ) -> int:
        """Issue a collective; return its number."""
        collective = PlannedCollective(
            phase=self.phase,
            kind=kind,
            unit=unit,
            microbatch=self.microbatch,
            group_size=ranks,
            nbytes=nbytes,
            padding=padding,
            bytes_sent=sent,
            live_bytes=self._parameters + self._gradients,
            background=background,
        )
        self.collectives.append(collective)
        self.events.append(Issue(len(self.collectives) - 1))
        return len(self.collectives) - 1

    def wait(self, collective: int) -> None:
        """Wait for a collective, by its number."""
        self.events.append(WaitFor(collective))

    def compute(self, unit: int, factor: int) -> None:
        """Compute with a unit, ``factor`` times as long as in a forward pass."""
        if self.computes:
            self.events.append(Compute(unit, factor))

    def take(self, *, parameters: int = 0, gradients: int = 0) -> None:
        """Take memory, or give it back."""
        self._parameters += parameters
        self._gradients += gradients
        if self._parameters + self._gradients > self.peak.total:
            self.peak = Live(self._parameters, self._gradients)
