"""``Area``: memory that all ranks of a group on one host see, and how they take turns in it.

Every rank has two rooms to put data into, and two flags. The ranks go through the area in steps
that they count. In a step a rank

1. fills its own room of that step (the even steps use one room, the odd steps the other);
2. writes its fingerprint, and then the number of the step, into its flag: ``sync``;
3. waits until the flags of all others show that number as well, and compares the fingerprints;
4. reads the rooms of the others.

So one step is a barrier, the check that all call the same collective, and an exchange of data at
once. Nobody needs to wait before filling a room: a rank writes to it again two steps later, and
before that it has seen every other rank enter the step in between, which those do only when they
have finished reading. The flags rely on stores becoming visible in program order, as they do on
x86-64; ``usable`` says whether that holds.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import platform
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from fsdpcore.buffers import Array
from fsdpcore.collectives import doubling, tree
from fsdpcore.errors import PeerFailedError

if TYPE_CHECKING:
    from fsdpcore.backend import Backend
    from fsdpcore.collectives.link import Link
    from fsdpcore.transport import MemorySharing

_LOG = logging.getLogger("fsdpcore")

ROOM = 256 * 1024  # bytes: the room of one rank and what it copies from fit a core's cache
_FLAG = 64  # bytes: a cache line, so that ranks do not disturb each other
# How long to wait for a rank: looks at its flag, then looks with the core given away in between
# (about 2 ms), then sleeps.
_LOOKS = 50
_YIELDS = 2000
_LOOKS_BETWEEN_CHECKS = 100
_LONGEST_SLEEP = 1e-3
_VIEWS = 256
_OFFER = 64


def usable() -> bool:
    """Return whether the flags are safe on this processor."""
    return platform.machine().lower() in ("x86_64", "amd64")


def nbytes(ranks: int) -> int:
    """The memory that a group of so many ranks needs."""
    return 2 * ranks * (_FLAG + ROOM)


class Rooms(list[list[Array]]):
    """All ranks' rooms as arrays, of even and of odd steps."""


class Area:
    """The area of one group, seen from one rank.

    Attributes:
        step: the last one that this rank has entered.
        flags: of all ranks, as 64-bit words: the step, the fingerprint, the rows.
        own, others: for even and odd steps, where the flags of this and of the other ranks are.
    """

    def __init__(self, memory: memoryview, rank: int, size: int) -> None:
        flags = 2 * size * _FLAG
        self._memory, self._mapping = memory, memory.obj
        self.flags = memory[:flags].cast("Q")
        self._rooms = np.frombuffer(memory, np.uint8, 2 * size * ROOM, flags).reshape(2, size, ROOM)
        self._size = size
        at = [[(step * size + r) * _FLAG // 8 for r in range(size)] for step in (0, 1)]
        self.own = [ranks[rank] for ranks in at]
        self._all = at
        self.others = [ranks[rank + 1 :] + ranks[:rank] for ranks in at]
        self.step = 0
        self._views: dict[tuple[np.dtype[Any], int], Rooms] = {}
        # All that somebody holds, to be emptied when the memory goes.
        self._made: weakref.WeakValueDictionary[int, Rooms] = weakref.WeakValueDictionary()

    def close(self) -> None:
        """Unmap the memory; the area is of no use after that."""
        for rooms in self._made.values():
            for arrays in rooms:
                arrays.clear()
        self._views.clear()
        del self._rooms
        # The frames of an error that somebody keeps may hold on to rooms; then it goes with them.
        with contextlib.suppress(BufferError):
            self.flags.release()
            self._memory.release()
            if isinstance(self._mapping, mmap.mmap):
                self._mapping.close()
        del self.flags, self._memory, self._mapping

    def next_rooms(self, dtype: np.dtype[Any], count: int) -> list[Array]:
        """All ranks' rooms of the next step, as arrays of ``count`` elements; fill the own one."""
        return self.arrays(dtype, count)[(self.step + 1) & 1]

    def rooms(self, dtype: np.dtype[Any], count: int) -> list[Array]:
        """All ranks' rooms of the step that ``sync`` has entered; to read."""
        return self.arrays(dtype, count)[self.step & 1]

    def parts(self, dtype: np.dtype[Any], count: int, low: int, high: int) -> Rooms:
        """The same elements of all ranks' rooms, of even and of odd steps; not kept here."""
        rooms = self.arrays(dtype, count)
        made = Rooms([array[low:high] for array in arrays] for arrays in rooms)
        self._made[id(made)] = made
        return made

    def sync(self, link: Link) -> None:
        """Enter the next step, and wait until all ranks have.

        Raises:
            MismatchError: another rank is in another collective.
            The errors of ``link.check``.
        """
        step = self.step = self.step + 1
        parity, flags, call = step & 1, self.flags, link.call
        own, digest = self.own[parity], call.digest
        flags[own + 1] = digest
        flags[own + 2] = call.rows
        flags[own] = step
        fits = True
        for at in self.others[parity]:
            if flags[at] != step:
                self.wait(at, step, link)
            if flags[at + 1] != digest:
                fits = False
        if not fits:
            link.disagree()

    def rows(self) -> list[int]:
        """What every rank has entered the step with as its rows, through ``sync``.

        Express lanes leave the rows out: no call that takes one asks for them.
        """
        return [self.flags[at + 2] for at in self._all[self.step & 1]]

    def wait(self, at: int, step: int, link: Link) -> None:
        """Wait until the flag ``at`` shows ``step``; raises what ``sync`` does."""
        flags = self.flags
        for _ in range(_LOOKS):
            if flags[at] == step:
                return
        # Python code on other threads of this process waits for the interpreter while this one
        # looks; only a sleep lets it have its turn.
        yields = 0 if link.background else _YIELDS
        pause = 20e-6
        while True:
            for _ in range(min(yields, _LOOKS_BETWEEN_CHECKS)):
                if flags[at] == step:
                    return
                os.sched_yield()
            link.check()
            rank = at * 8 // _FLAG % self._size
            gone = link.departed(rank)
            if flags[at] == step:  # looked at last: a rank may leave once it has set its flag
                return
            if gone:
                left = link.global_rank(rank)
                raise PeerFailedError(f"rank {left} has left the job", left)
            yields = max(0, yields - _LOOKS_BETWEEN_CHECKS)
            if not yields:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_SLEEP)

    def arrays(self, dtype: np.dtype[Any], count: int) -> Rooms:
        """All ranks' rooms of even and of odd steps; kept, as a view costs more than a message."""
        try:
            return self._views[dtype, count]
        except KeyError:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            size = count * dtype.itemsize
            made = Rooms([room[:size].view(dtype) for room in rooms] for rooms in self._rooms)
            self._views[dtype, count] = self._made[id(made)] = made
            return made


def establish(link: Link, backend: Backend) -> Area | None:
    """Make the area of a group, or find out that there can be none; the same on all ranks.

    Called by all ranks of the group. The first rank offers memory, all map it and tell each other
    whether they could.
    """
    sharing = backend.root.memory
    if sharing is None or link.size == 1 or len(set(backend.hosts)) > 1:
        return None
    offer, why = b"", "rank 0 of the group has none to offer"
    try:
        if link.rank == 0:
            try:
                if not usable():
                    raise OSError(f"not supported on {platform.machine()}")
                offer = sharing.offer(nbytes(link.size))
            except OSError as error:
                why = str(error)
        return _map(link, sharing, offer, why)
    finally:
        if offer:
            sharing.forget(offer)


def _map(link: Link, sharing: MemorySharing, offer: bytes, why: str) -> Area | None:
    """Map what the first rank offers, if all ranks can."""
    told = np.frombuffer(offer.ljust(_OFFER, b"\0"), np.uint8).copy()
    tree.broadcast(link, told, 0)
    memory = None
    if told.any():
        try:
            memory = sharing.map(told.tobytes())
        except OSError as error:
            why = str(error)
    votes = np.zeros(link.size, np.bool_)
    doubling.all_gather(link, np.array([memory is not None]), votes, range(link.size + 1))
    if memory is not None and votes.all():
        return Area(memory, link.rank, link.size)
    if memory is None:
        _LOG.info("rank %d shares no memory: %s", link.global_rank(link.rank), why)
    return None
