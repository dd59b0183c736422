"""What one rank does in a test: run a body, meet the other ranks outside of the backend, report."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fsdpcore import Backend

Body = Callable[..., Any]


@dataclass(frozen=True)
class Job:
    """One run of a body on all ranks; ``timeout`` in seconds is for all of it."""

    body: Body
    world_size: int
    args: tuple[Any, ...]
    timeout: float
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: a result; or an error in short, and where it was."""

    result: Any = None
    traceback: str = ""
    error: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.error)


class Meeting:
    """Lets all ranks wait for each other, whatever state their backend is in.

    Ends in an error instead of a wait as soon as one rank has ended without coming.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._gone: set[int] = set()
        self._waiting: set[int] = set()

    def arrive(self, rank: int) -> dict[int, bool]:
        """Note that ``rank`` has come.

        Returns:
            The ranks that need not wait any more, and whether all have come.
        """
        self._waiting.add(rank)
        return self._release()

    def leave(self, rank: int) -> dict[int, bool]:
        """Note that ``rank`` has ended; returns the same as ``arrive``."""
        self._gone.add(rank)
        return self._release()

    def _release(self) -> dict[int, bool]:
        complete = len(self._waiting) == self._size
        if not complete and not self._gone:
            return {}
        released, self._waiting = self._waiting, set()
        return dict.fromkeys(released, complete)


# Of a rank, whether it has a thread of its own or shares one in virtual time.
_meet_others: ContextVar[Callable[[], None] | None] = ContextVar("meet_others", default=None)


def meet() -> None:
    """Wait, in a body, until all ranks of the job have come here; uses no backend."""
    meet_others = _meet_others.get()
    assert meet_others is not None, "meet() is for bodies that run() runs"
    meet_others()


def failure(error: BaseException) -> Outcome:
    """The outcome of a rank on which ``error`` is being handled."""
    return Outcome(traceback=traceback.format_exc(), error=f"{type(error).__name__}: {error}")


def expect_all(complete: bool) -> None:
    """Raise where a meeting ended because a rank will not come."""
    if not complete:
        raise AssertionError("meet(): another rank has ended without coming")


def perform(job: Job, backend: Backend, meet: Callable[[], None]) -> Outcome:
    """Run the body on this rank and close its backend; never raises."""
    token = _meet_others.set(meet)
    try:
        with backend:
            result = job.body(backend, *job.args)
        return Outcome(result)
    except BaseException as error:
        return failure(error)
    finally:
        _meet_others.reset(token)
