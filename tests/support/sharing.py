"""Threads that use a ``SharedRegion``, as processes of one host do."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
from fsdpcore.transports.simulated.backend import SimBackend

from fsdpcore.collectives.shared.region import SharedRegion
from fsdpcore.core.buffers import Array, Bytes


class ThreadMemory:
    """Memory that threads share; ``refusing`` are the ranks that cannot map it."""

    def __init__(self, refusing: frozenset[int] = frozenset()) -> None:
        self.refusing = refusing
        self.segments: dict[int, Bytes] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def of(self, rank: int) -> _OfRank:
        return _OfRank(self, rank)

    def make(self, nbytes: int) -> _Segment:
        with self._lock:
            return _Segment(self, next(self._numbers), nbytes)

    def drop(self, number: int) -> None:
        with self._lock:
            del self.segments[number]

    def all(self) -> list[tuple[int, Bytes]]:
        with self._lock:
            return list(self.segments.items())


class _Segment:
    def __init__(self, memory: ThreadMemory, number: int, nbytes: int) -> None:
        self.number = number
        self._memory = memory
        self._bytes = memory.segments[number] = np.zeros(nbytes, np.uint8)

    def bytes(self, offset: int, nbytes: int) -> Bytes:
        return self._bytes[offset : offset + nbytes]

    def close(self) -> None:
        self._memory.drop(self.number)


class _OfRank:
    required = False
    available = True

    def __init__(self, memory: ThreadMemory, rank: int) -> None:
        self._memory = memory
        self._rank = rank

    def common_region(self, channel: int, rank: int, size: int) -> None:
        return None

    def region(self, memory: Bytes, rank: int, size: int) -> SharedRegion:
        return SharedRegion(memory, rank, size, self)

    def introduce(self) -> bytes:
        return bytes([self._rank + 1])

    def meet(self, introduction: bytes) -> None:
        if self._rank in self._memory.refusing:
            raise OSError("out of reach")

    def segment(self, nbytes: int) -> _Segment:
        return self._memory.make(nbytes)

    def open(self, number: int) -> Bytes:
        return self._memory.segments[number]

    def empty(self, nbytes: int) -> Bytes:
        """Kept for ever, so that its address stays its own."""
        return self._memory.make(nbytes + 64).bytes(64, nbytes)

    def locate(self, array: Array) -> tuple[int, int] | None:
        address = array.__array_interface__["data"][0]
        for number, segment in self._memory.all():
            offset = address - segment.__array_interface__["data"][0]
            if 64 <= offset < segment.size:
                return number, offset
        return None

    def attach(self, number: int) -> Bytes:
        return self._memory.segments[number]

    def close(self) -> None:
        """Others may still use what this rank has made."""


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
