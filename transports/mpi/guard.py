"""Watching over calls that block inside MPI, out of reach of deadlines and failures."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.core.text import rank_list

from .library import PROCESS

# A call that blocks inside MPI may still end by itself for so long after the job has failed.
_FAILED_SECONDS = 2.0
# One that looks at its deadline itself gets to raise its error.
_LATE_SECONDS = 1.0


class GuardedGroup(Protocol):
    """A group that calls MPI; ``ranks`` are its members in the whole job."""

    ranks: tuple[int, ...]


class BlockedCallGuard:
    """Ends the job when a call that blocks inside MPI has outlasted its deadline, or the job.

    Args:
        rank: this rank.
        failure: returns what the backend is broken by, if it is.

    Attributes:
        calls: the groups that are inside MPI, each with its call.
    """

    def __init__(self, rank: int, failure: Callable[[], BaseException | None]) -> None:
        self._rank = rank
        self._failure = failure
        self._failed_at: float | None = None
        self.calls: dict[GuardedGroup, CollectiveContext] = {}

    def check(self) -> None:
        """Abort the job if a call is overdue."""
        if not self.calls:
            return
        now, failure = time.monotonic(), self._failure()
        if failure is not None and self._failed_at is None:
            self._failed_at = now
        for group, context in list(self.calls.items()):
            call = f"{context.name} on ranks {rank_list(group.ranks)}"
            if now > context.end + _LATE_SECONDS and group in self.calls:
                PROCESS.abort(
                    f"rank {self._rank} failed: CommTimeoutError: {call} did not end in time "
                    "inside MPI, where nothing but the end of the job stops it; a rank of it is "
                    "stopped or lost\n"
                )
            if self._failed_at is not None and now > self._failed_at + _FAILED_SECONDS:
                why = str(failure).partition("\n")[0]
                PROCESS.abort(f"rank {self._rank}: stopped in {call} inside MPI, because {why}\n")
