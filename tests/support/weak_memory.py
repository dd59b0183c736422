"""``WeakMemory``: words that show old values where C11 lets them; a seed says when.

All accesses are relaxed; fences acquire and release, by the rule of ``core.fence``. A load that is
made later than a store behind it is not played.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from greenlet import getcurrent, greenlet

_Places = dict[int, int]  # of words: numbers of stores


class WeakMemory:
    """Words of any address, 0 at first, each of which one thread writes.

    Args:
        seed: which thread goes on after each access, and how old what it loads is.
    """

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        # All values of each word in order, with what its writer had released.
        self._stores: dict[int, list[tuple[int, _Places]]] = {}
        # By thread: the oldest values that it may see, what these become at its next fence, and
        # what they were at its last one.
        self._known: dict[Any, _Places] = {}
        self._coming: dict[Any, _Places] = {}
        self._released: dict[Any, _Places] = {}

    def run(self, threads: Sequence[Callable[[], None]]) -> None:
        """Run threads until all have ended, or one has failed."""
        running = [greenlet(thread) for thread in threads]
        while running:
            chosen = self._chance.choice(running)
            chosen.switch()
            running = [thread for thread in running if not thread.dead]

    def _turn(self) -> Any:
        """Let others have their turns; return this thread."""
        me = getcurrent()
        if me.parent is not None:
            me.parent.switch()
        for places in (self._known, self._coming, self._released):
            places.setdefault(me, {})
        return me

    def __getitem__(self, at: int) -> int:
        me, stores = self._turn(), self._stores.setdefault(at, [(0, {})])
        known = self._known[me]
        known[at] = self._chance.randrange(known.get(at, 0), len(stores))
        value, released = stores[known[at]]
        _join(self._coming[me], released)
        return value

    def __setitem__(self, at: int, value: int) -> None:
        me, stores = self._turn(), self._stores.setdefault(at, [(0, {})])
        stores.append((value, self._released[me]))
        self._known[me][at] = len(stores) - 1

    def fence(self) -> None:
        """Pass a fence."""
        me = self._turn()
        _join(self._known[me], self._coming[me])
        self._released[me] = dict(self._known[me])


def _join(places: _Places, others: _Places) -> None:
    for at, place in others.items():
        places[at] = max(place, places.get(at, 0))
