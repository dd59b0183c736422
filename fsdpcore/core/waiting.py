"""Several operations in flight: waiting for all of them, or for the first that ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from fsdpcore.core.checks import as_instance
from fsdpcore.core.clock import WALL, Clock
from fsdpcore.core.errors import ArgumentError, CommTimeoutError
from fsdpcore.core.work import SLICE_SECONDS, Deadline, Pending, Work

# How often an operation is looked at that tells nobody when it ends: one of a GPU, say.
_LOOK_SECONDS = 0.0005


def wait_all(works: Iterable[Work], timeout: float | None = None) -> list[Any]:
    """Wait until all of some operations have ended, and return their results in that order.

    ::

        works = [backend.irecv(out, rank) for rank, out in enumerate(outs)]
        fc.wait_all(works, timeout=5)

    Args:
        works: what ``isend``, ``irecv`` and collectives with ``async_op=True`` return.
        timeout: seconds for all of them together; by default as long as each may take by itself.

    Returns:
        Their results, in the order of ``works``.

    Raises:
        ArgumentError: one of them is no ``Work``.
        CommTimeoutError: the time is over; the operations go on and can be waited for again.
        CommunicationError: that of the first one, in the order given, that has failed.
    """
    listed = _listed(works, "wait_all()")
    deadline = None if timeout is None else Deadline(timeout, _clock_of(listed))
    return [work.wait(None if deadline is None else deadline.remaining()) for work in listed]


def wait_any(works: Iterable[Work], timeout: float | None = None) -> int:
    """Wait until one of some operations has ended, and return its place in the list.

    ::

        while works:
            work = works.pop(fc.wait_any(works))
            print(work.wait())

    It may have failed: the work's own ``wait``, which does not block any more, returns its result
    or raises its error. Where several have ended, it is the first in the list.

    Args:
        works: as of ``wait_all``, at least one.
        timeout: seconds; by default as long as any of them may take by itself.

    Returns:
        The place in ``works`` of one that has ended.

    Raises:
        ArgumentError: there is none, or one of them is no ``Work``.
        CommTimeoutError: none has ended in this time; they go on.
    """
    listed = _listed(works, "wait_any()")
    if not listed:
        raise ArgumentError("wait_any(): there is no operation to wait for")
    limit = max(work._limit() for work in listed) if timeout is None else timeout
    deadline = Deadline(limit, _clock_of(listed))
    while (place := _first_ended(listed)) is None:
        if not deadline.remaining():
            several = f"none of {len(listed)} operations has ended; the first: "
            raise CommTimeoutError(f"{several if listed[1:] else ''}{listed[0]._timed_out(limit)}")
        _await_change(listed, deadline.remaining())
    return place


class AllOf(Work):
    """Several operations as one; with none, it has ended. Its result is that of the last."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = tuple(works)

    def done(self) -> bool:
        return all(work.done() for work in self._works)

    def _words(self) -> str:
        return f"{len(self._works)} operations"

    def _ends(self) -> list[Pending]:
        return _ends_of([work for work in self._works if not work.done()])

    def _limit(self) -> float:
        return sum(work._limit() for work in self._works)

    def wait(self, timeout: float | None = None) -> Any:
        return (wait_all(self._works, timeout) or [None])[-1]


def _listed(works: Iterable[Work], what: str) -> list[Work]:
    words = f"an operation of {what}"
    return [as_instance(work, Work, words, "a Work, as isend() returns one") for work in works]


def _clock_of(works: Sequence[Work]) -> Clock:
    return works[0]._clock if works else WALL


def _first_ended(works: Sequence[Work]) -> int | None:
    return next((place for place, work in enumerate(works) if work.done()), None)


def _ends_of(works: Sequence[Work]) -> list[Pending]:
    """What finishes when one of some operations ends; nothing where one of them does not say."""
    ends = [work._ends() for work in works]
    return list(itertools.chain(*ends)) if all(ends) else []


def _await_change(works: Sequence[Work], seconds: float) -> None:
    """Block until one of them has ended, and no longer than some seconds."""
    ends = _ends_of(works)
    if not ends:
        _clock_of(works).sleep(min(seconds, _LOOK_SECONDS))
        return
    lock = _clock_of(works).lock
    first = next((end for end in ends if end.polled), ends[0]).signal(lock)
    for work in works:
        work._blocks(True)
    try:
        for end in ends:
            end.watch(first)
        # In slices: two threads that watch the same message at once may miss its end.
        first.settle(min(seconds, SLICE_SECONDS))
    finally:
        for end in ends:
            end.unwatch(first)
        for work in works:
            work._blocks(False)
