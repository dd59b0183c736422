"""Threads that use the shared area of ``collectives/area.py``, as processes of one host do."""

from __future__ import annotations

import itertools
import threading
from typing import Any

from fsdpcore.transports.simulated import SimBackend


class ThreadMemory:
    """Memory that threads share; ``refusing`` are the ranks that cannot map it."""

    def __init__(self, refusing: frozenset[int] = frozenset()) -> None:
        self.refusing = refusing
        self.offered: dict[bytes, bytearray] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def of(self, rank: int) -> _OfRank:
        return _OfRank(self, rank)

    def offer(self, nbytes: int) -> bytes:
        with self._lock:
            offer = next(self._numbers).to_bytes(64, "little")
            self.offered[offer] = bytearray(nbytes)
            return offer


class _OfRank:
    def __init__(self, memory: ThreadMemory, rank: int) -> None:
        self._memory = memory
        self._rank = rank

    def offer(self, nbytes: int) -> bytes:
        return self._memory.offer(nbytes)

    def map(self, offer: bytes) -> memoryview:
        if self._rank in self._memory.refusing:
            raise OSError("out of reach")
        return memoryview(self._memory.offered[offer])

    def forget(self, offer: bytes) -> None:
        del self._memory.offered[offer]


class SharingSim(SimBackend):
    """A rank of a simulated job whose ranks share memory."""

    refusing: frozenset[int] = frozenset()

    def __init__(self, rank: int, world: Any, *args: Any) -> None:
        super().__init__(rank, world, *args)
        memory = world[0]._thread_memory if world else ThreadMemory(self.refusing)
        self._thread_memory = memory
        self.memory = memory.of(rank)


class ReluctantSim(SharingSim):
    """The last of three ranks cannot map the memory of the others."""

    refusing = frozenset({2})
