"""How ranks leave a job on GPUs: not before the others have what was sent to them.

A collective may have ended on one GPU while another has not begun it, and takes what it needs of it
from memory of the first. So a rank that closes tells every other one which calls they have in
common; that one answers when these have ended there, too. Ranks that close at the same time know
it then, and destroy their communicators together, as NCCL wants it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from fsdpcore.comm.transport import Transport
from fsdpcore.core.errors import ProtocolError

from .supervisor import Supervisor

# How long a rank whose work has ended everywhere waits for the others to close as well.
_TOGETHER_SECONDS = 1.0
_SLICE = 0.05

ENDING, ENDED = "ending", "ended"


class ClosingHandshake:
    """What one rank knows of who closes.

    Args:
        backend: the rank.
        tell: sends what is to be told to a rank, without waiting.
    """

    def __init__(self, backend: Transport, tell: Callable[[int, dict[str, Any]], None]) -> None:
        self._backend = backend
        self._tell = tell
        self._changed = threading.Condition()
        self._ending: set[int] = set()
        self._ended: set[int] = set()
        # What the ranks wait for that have not been answered: channels, and numbers of calls.
        self._asked: dict[int, list[tuple[int, int]]] = {}

    # Of others.

    def heard(self, rank: int, content: Mapping[str, Any]) -> None:
        """Take note of what another rank says; may be called by any thread.

        Raises:
            ProtocolError: no rank would say that.
        """
        asked = content.get("calls")
        with self._changed:
            if content.get("what") == ENDED:
                self._ended.add(rank)
            elif isinstance(asked, list) and all(
                isinstance(item, list) and [type(part) for part in item] == [int, int]
                for item in asked
            ):
                self._ending.add(rank)
                self._asked[rank] = [(channel, sequence) for channel, sequence in asked]
            else:
                raise ProtocolError(f"rank {rank} says that it leaves in words of no sense")
            self._changed.notify_all()

    def answer(self, supervisor: Supervisor) -> bool:
        """Answer those whose calls have ended here; return whether others still wait."""
        with self._changed:
            asked = dict(self._asked)
        for rank, calls in asked.items():
            if all(supervisor.ended(channel, sequence) for channel, sequence in calls):
                with self._changed:
                    del self._asked[rank]
                self._tell(rank, {"what": ENDED})
        with self._changed:
            return bool(self._asked)

    # Of this rank.

    def meet(self, supervisor: Supervisor, seconds: float) -> bool:
        """Wait until what this rank has called has ended on all ranks.

        Args:
            supervisor: of this rank, whose own calls have ended.
            seconds: how long to wait for that.

        Returns:
            Whether it has, and all ranks close now.
        """
        backend, calls = self._backend, supervisor.calls()
        others = [rank for rank in backend.ranks if rank != backend.rank]
        for rank in others:
            shared = [[channel, n] for channel, ranks, n in calls if rank in ranks]
            self._tell(rank, {"what": ENDING, "calls": shared})
        self._wait(seconds, lambda: all(r in self._ended or backend.departed(r) for r in others))
        if not self._ended.issuperset(others):
            return False
        self._wait(_TOGETHER_SECONDS, lambda: self._ending.issuperset(others))
        return self._ending.issuperset(others)

    def _wait(self, seconds: float, until: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        with self._changed:
            while not until() and self._backend.failure is None:
                remaining = end - time.monotonic()
                if remaining <= 0:
                    return
                self._changed.wait(min(_SLICE, remaining))  # nobody tells of failures here
