"""How ranks that share memory wait for each other, where more of them run than there are cores.

By itself a rank looks at a flag for about two milliseconds before it sleeps, since it has a core of
its own. Here several have one in common, or one interpreter. Processes of ranks import this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fsdpcore.collectives.shared import region


def wait_mostly_asleep() -> None:
    """Have the ranks of this process look less often before they sleep, from now on."""
    region._YIELDS = region._LOOKS_BETWEEN_CHECKS


@contextmanager
def waiting_asleep() -> Iterator[None]:
    """Have ranks that are threads look once: who looks keeps the interpreter from the others."""
    before = region._LOOKS, region._YIELDS
    region._LOOKS, region._YIELDS = 1, 0
    try:
        yield
    finally:
        region._LOOKS, region._YIELDS = before
