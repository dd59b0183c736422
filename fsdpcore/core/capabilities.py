"""``Capabilities``: what a transport says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do, the same on all ranks.

    ``alpha`` (seconds per message), ``beta`` (seconds per byte moved) and ``gamma`` (seconds per
    byte reduced) feed the choice of algorithms; they need to be right in proportion only.
    """

    transport: str
    alpha: float
    beta: float
    gamma: float
    shared_window: bool = False
