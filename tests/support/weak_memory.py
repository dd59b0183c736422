"""``WeakMemory``: words that show old values as often as C11 lets them; a seed says when.

All accesses are relaxed, and fences sequentially consistent, by the rules of ``core.fence``. Not
played are loads that come later than stores behind them, which the fourth rule is about.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from greenlet import getcurrent, greenlet


class WeakMemory:
    """Words of any address, 0 at first, each of which one thread writes.

    Args:
        seed: which thread goes on after each access, and how old what it loads is.
    """

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        # All values of each word, in order; the oldest of them that a thread may see, for each
        # thread, and what all of them may see behind their next fences.
        self._stores: dict[int, list[int]] = {}
        self._known: dict[Any, dict[int, int]] = {}
        self._fenced: dict[int, int] = {}

    def run(self, threads: Sequence[Callable[[], None]]) -> None:
        """Run threads until all have ended, or one has failed."""
        running = [greenlet(thread) for thread in threads]
        while running:
            chosen = self._chance.choice(running)
            chosen.switch()
            running = [thread for thread in running if not thread.dead]

    def _turn(self) -> dict[int, int]:
        """Let others have their turns; what this thread knows."""
        me = getcurrent()
        if me.parent is not None:
            me.parent.switch()
        return self._known.setdefault(me, {})

    def __getitem__(self, at: int) -> int:
        known, stores = self._turn(), self._stores.setdefault(at, [0])
        known[at] = self._chance.randrange(known.get(at, 0), len(stores))
        return stores[known[at]]

    def __setitem__(self, at: int, value: int) -> None:
        known, stores = self._turn(), self._stores.setdefault(at, [0])
        stores.append(value)
        known[at] = len(stores) - 1

    def fence(self) -> None:
        """Pass a fence."""
        known = self._turn()
        for at, place in self._fenced.items():
            known[at] = max(place, known.get(at, 0))
        self._fenced.update(known)
