"""``Capabilities``: what a transport says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do, the same on all ranks.

    Attributes:
        transport: its name, as in URLs.
        alpha, beta, gamma: seconds per message, per byte moved, and per byte reduced. They feed the
            choice of algorithms, and need to be right in proportion only.
        shared_window: ``Backend.shared_window`` works where all ranks are on one host.
        latency: seconds per trip between ranks, beyond alpha.
    """

    transport: str
    alpha: float
    beta: float
    gamma: float
    shared_window: bool = False
    latency: float = 0.0
