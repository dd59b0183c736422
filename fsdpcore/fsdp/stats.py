"""What one step did, measured on one rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepStats:
    """Of the last step of an engine.

    Attributes:
        seconds: from the beginning of the ``with`` block to its end.
        waited: seconds in which the caller waited for communication: what is exposed of it.
        peak_buffers: most bytes of gathered parameters and full gradients at once.
        began: when, on the clock ``time.perf_counter``.
    """

    seconds: float = 0.0
    waited: float = 0.0
    peak_buffers: int = 0
    began: float = 0.0
