"""What one step did, measured on one rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepStats:
    """Of the last step of an engine.

    Seconds are those of the host, which goes ahead of a GPU but for one time in a step.

    Attributes:
        seconds: from the beginning of the ``with`` block to its end.
        waited: seconds in which the caller waited for communication: what is exposed of it.
        peak_buffers: most bytes of gathered parameters and full gradients at once.
        gathers: flat buffers that were gathered, apart from those in a window.
        reductions: how often gradients of a unit were reduced.
        bytes_sent: for these by this rank, if by algorithms that send no byte twice.
        whole: all units were gathered at once, by ``Step.whole``.
        began: when, by the clock of the job.
    """

    seconds: float = 0.0
    waited: float = 0.0
    peak_buffers: int = 0
    gathers: int = 0
    reductions: int = 0
    bytes_sent: int = 0
    whole: bool = False
    began: float = 0.0
