"""What one step did, measured on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdpcore.core.clock import WALL
from fsdpcore.fsdp.step.step_times import StepTimes


@dataclass
class StepStats:
    """Of the last step of an engine.

    Seconds are those of the host, which goes ahead of a GPU but for one time in a step.

    Attributes:
        seconds: from the beginning of the ``with`` block to its end.
        peak_buffers: most bytes of gathered parameters and full gradients at once.
        gathers: flat buffers that were gathered, apart from those in a window.
        reductions: how often gradients of a unit were reduced.
        bytes_sent: for these by this rank, if by algorithms that send no byte twice.
        whole: all units were gathered at once, by ``Step.whole``.
        times: where the seconds went, by unit and pass.
    """

    seconds: float = 0.0
    peak_buffers: int = 0
    gathers: int = 0
    reductions: int = 0
    bytes_sent: int = 0
    whole: bool = False
    times: StepTimes = field(default_factory=lambda: StepTimes(WALL.nanoseconds), repr=False)

    @property
    def waited(self) -> float:
        """Seconds in which the caller waited for communication: what is exposed of it."""
        return self.times.by_part()["waiting"]
