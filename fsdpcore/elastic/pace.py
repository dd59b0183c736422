"""Who was slow: the seconds that each rank computed between commits."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence

_LOG = logging.getLogger("fsdpcore")
_FACTOR, _COMMITS = 1.5, 10
_LEAST_SECONDS = 0.001  # what takes less tells nothing


class Pace:
    """Step times of all ranks, and a warning about the one that holds up the others.

    Attributes:
        seconds: of each rank, at the last commit; empty before the first.
    """

    def __init__(self) -> None:
        self.seconds: tuple[float, ...] = ()
        self._slow, self._commits = -1, 0

    @property
    def slowest(self) -> int | None:
        """The rank that took longest; None before the first commit."""
        return self.seconds.index(max(self.seconds)) if self.seconds else None

    def note(self, seconds: Sequence[float], *, warn: bool) -> None:
        """Take the seconds of all ranks at a commit; log who was slow for long, if ``warn``."""
        self.seconds = tuple(seconds)
        rank, median = self.seconds.index(max(seconds)), statistics.median(seconds)
        slow = max(seconds) >= max(_FACTOR * median, _LEAST_SECONDS) and len(seconds) > 1
        self._commits = self._commits + 1 if slow and rank == self._slow else int(slow)
        self._slow = rank if slow else -1
        if warn and self._commits == _COMMITS:
            _LOG.warning(
                "rank %d holds up the others: for %d commits it has computed %.3g s each, and the "
                "median of all ranks is %.3g s",
                rank,
                _COMMITS,
                max(seconds),
                median,
            )
