"""Groups of NCCL's calls, which every thread has of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from support.fake_cuda.errors import NcclError

if TYPE_CHECKING:
    from support.fake_cuda.nccl import NcclCommunicator
    from support.fake_cuda.nccl_match import Call


class Group(threading.local):
    """The group of the calling thread."""

    def __init__(self) -> None:
        self.depth = 0
        self._calls: dict[int, tuple[NcclCommunicator, list[tuple[Any, Call]]]] = {}

    def start(self) -> None:
        """Open a group, or one within."""
        self.depth += 1

    def end(self) -> None:
        """Close it; the outermost launches, one communicator after another."""
        if not self.depth:
            raise NcclError(5)
        self.depth -= 1
        if not self.depth:
            calls, self._calls = self._calls, {}
            for communicator, found in calls.values():
                communicator._launch([queue for queue, _ in found], [call for _, call in found])

    def add(self, communicator: NcclCommunicator, queue: Any, call: Call) -> None:
        """Take a call: for the end of the group, or at once where there is none."""
        if not self.depth:
            communicator._launch([queue], [call])
            return
        _, found = self._calls.setdefault(id(communicator), (communicator, []))
        found.append((queue, call))


GROUP = Group()
