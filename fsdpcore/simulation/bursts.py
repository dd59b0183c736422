"""What links let pass faster than their rate: a bucket each, as that of a shaper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# By how much a link is faster than its rate while its bucket is not empty, and how few bytes are
# nothing. What ends within that part of the time is one moment.
FASTER, _DROP = 100.0, 1.0
_ROUNDING = 64 * float(np.finfo(np.float64).eps)


@dataclass(slots=True)
class Bucket:
    """Of a link: it fills at the link's rate, and empties at that at which the link carries.

    Attributes:
        size: bytes that it has room for.
        rate: bytes per second of the link.
        left: bytes in it, as of ``since``.
        used: bytes per second that the link carries since then.
        empty: when it is empty; infinity if never.
    """

    size: float
    rate: float
    left: float
    since: float = 0.0
    used: float = 0.0
    empty: float = math.inf

    def limit(self, now: float) -> float:
        """Return the bytes per second that the link lets pass from now on."""
        left = self.left + (self.rate - self.used) * (now - self.since)
        if now >= self.empty * (1 - _ROUNDING):
            left = 0.0
        self.left, self.since = min(max(left, 0.0), self.size), now
        return self.rate * (FASTER if self.left > _DROP else 1.0)

    def carry(self, used: float) -> None:
        """Have the link carry so many bytes per second from then on."""
        self.used = used
        more = used - self.rate
        lasts = self.left / more if more > self.rate * _ROUNDING else math.inf
        self.empty = self.since + lasts


class Bursts:
    """The buckets of all links that have one, by link."""

    def __init__(self, buckets: dict[int, Bucket]) -> None:
        self._buckets = buckets

    def next_end(self) -> float:
        """Return when the next bucket is empty; infinity if none will be."""
        return min((bucket.empty for bucket in self._buckets.values()), default=math.inf)

    def ended(self, now: float) -> list[int]:
        """Return the links whose buckets have become empty."""
        then = now * (1 + _ROUNDING)
        return [link for link, bucket in self._buckets.items() if bucket.empty <= then]

    def limits(self, links: Sequence[int], limits: NDArray[np.float64], now: float) -> None:
        """Write over the limits of some links what these let pass now."""
        for at, link in enumerate(links):
            if link in self._buckets:
                limits[at] = self._buckets[link].limit(now)

    def carry(
        self, links: Sequence[int], routes: NDArray[np.intp], rates: NDArray[np.float64]
    ) -> None:
        """Have links carry flows from now on, as ``fair_rates`` has found.

        Args:
            links: of which the routes have the numbers from 1.
            routes, rates: of all flows that cross them.
        """
        weights = np.broadcast_to(rates, routes.shape).ravel()
        used = np.bincount(routes.ravel(), weights, len(links) + 1).tolist()
        for at, link in enumerate(links, 1):
            if link in self._buckets:
                self._buckets[link].carry(used[at])

    def __bool__(self) -> bool:
        return bool(self._buckets)
