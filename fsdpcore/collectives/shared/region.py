"""``SharedRegion``: memory that all ranks of a group on one host see, and their turns in it.

Every rank has two rooms to put data into, and two flags. The ranks go through the area in steps
that they count. In a step a rank

1. fills its own room of that step (the even steps use one room, the odd steps the other), or
   writes into its flag where its arrays lie: ``lend``;
2. writes its fingerprint, and then the number of the step, into its flag: ``sync``;
3. waits until the flags of all others show that number as well, and compares the fingerprints;
4. reads the rooms of the others, or their arrays: ``borrowed``.

So one step is a barrier, the check that all call the same collective, and an exchange of data at
once. Nobody needs to wait before filling a room: a rank writes to it again two steps later, and
before that it has seen every other rank enter the step in between, which those do only when they
have finished reading. Who lends an array does need to wait: for the next step.

A flag must not become visible before what was written ahead of it. On x86-64 stores become visible
in program order. Elsewhere, as on ARM, a rank locks and unlocks a mutex twice in between, which no
store or load passes: those ahead of it do not pass the first unlocking, those behind it not the
second locking, and on ARM these two do not pass each other.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.collectives.algorithms import doubling
from fsdpcore.core.buffers import Array, Bytes
from fsdpcore.core.errors import CommunicationError, ConfigError, PeerFailedError

if TYPE_CHECKING:
    from fsdpcore.collectives.context import CollectiveContext
    from fsdpcore.comm.backend import Backend
    from fsdpcore.comm.sharing import MemorySharing, Segment

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
_TO_HEAR_OF_A_LOSS = 2.0  # seconds
_INTRODUCTION = 64
_CORES = 1024  # those with higher numbers count as others

# Words of a flag: the step, the rows, the fingerprint, and where the arrays are that are lent.
_STEP, _ROWS, DIGEST, _LENT = 0, 1, 2, 3
SOURCE, OUT = 0, 1  # the arrays that a rank can lend: two words each
_LENT_END = _LENT + 4

_ORDERED = ("x86_64", "amd64")  # processors whose stores become visible in program order


Place = tuple[int, int] | None  # see ``MemorySharing.locate``


class _Fence:
    """Lets no store or load of this thread pass a call of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self) -> None:
        for _ in range(2):
            self._lock.acquire()
            self._lock.release()


def nbytes(ranks: int) -> int:
    """The memory that a group of so many ranks needs."""
    return 2 * ranks * (_FLAG + ROOM)


class Rooms(list[list[Array]]):
    """All ranks' rooms as arrays, of even and of odd steps."""


class Kept(list[Any]):
    """What somebody keeps as long as the memory is there."""


class SharedRegion:
    """The area of one group, seen from one rank.

    Attributes:
        step: the last one that this rank has entered.
        flags: of all ranks, as 64-bit words: the step, the rows, the fingerprint, and where the
            arrays are that it lends.
        entering: for even and odd steps, five words of this rank's flag: its fingerprint, and
            where the arrays are that it lends.
        entered: for even and odd steps, what returns the same of all ranks as bytes.
        own, others: for even and odd steps, where the flags of this and of the other ranks are.
        fence: what keeps a flag behind the data, where the processor does not.
        block: bytes that are best reduced at once: two of them stay in a core's cache.
        express: calls may take the lanes of ``lane.py``.
        addressed: ranks tell each other where the arrays lie that they lend.
        looks: how often a rank looks for another one's flag before it gives its core away.
        wake: to be called once the flag is set, where ranks are asleep until then.
    """

    block = 512 * 1024
    addressed = True
    wake: Callable[[], None] | None = None

    def __init__(self, memory: Bytes, rank: int, size: int, sharing: MemorySharing) -> None:
        flags = 2 * size * _FLAG
        self.flags = memoryview(memory.data)[:flags].cast("Q")
        words = memory[:flags].view(np.uint64).reshape(2, size, _FLAG // 8)
        terms = [words[step, :, DIGEST:_LENT_END] for step in (0, 1)]
        self.entering = [ranks[rank] for ranks in terms]
        self.entered = [ranks.tobytes for ranks in terms]
        self._rooms = memory[flags : flags + 2 * size * ROOM].reshape(2, size, ROOM)
        self._size, self._sharing = size, sharing
        self.looks = _LOOKS
        self.fence = None if platform.machine().lower() in _ORDERED else _Fence()
        self.express = self.fence is None
        at = [[(step * size + r) * _FLAG // 8 for r in range(size)] for step in (0, 1)]
        self.own = [ranks[rank] for ranks in at]
        self._all = at
        self.others = [ranks[rank + 1 :] + ranks[:rank] for ranks in at]
        self.step = 0
        self._views: dict[tuple[np.dtype[Any], int], Rooms] = {}
        self._places: dict[int, tuple[weakref.ref[Array], Place]] = {}
        self._borrowed: dict[tuple[int, int, np.dtype[Any], int], Array] = {}
        # All that somebody holds, to be emptied when the memory goes.
        self._made: weakref.WeakValueDictionary[int, Rooms] = weakref.WeakValueDictionary()
        self._kept: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def close(self) -> None:
        """Let go of the memory; the area is of no use after that."""
        for rooms in self._made.values():
            for arrays in rooms:
                arrays.clear()
        for items in self._kept.values():
            items.clear()
        self._views.clear()
        self._borrowed.clear()
        self.entering.clear()
        self.entered.clear()
        del self._rooms
        self.flags.release()

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

    def keep(self, items: Iterable[Any]) -> Kept:
        """Return things that hold parts of the memory as a list, which ``close`` empties."""
        made = Kept(items)
        self.empty_at_close(made)
        return made

    def empty_at_close(self, holder: Any) -> None:
        """Have ``close`` empty what holds parts of the memory; ``holder`` has ``clear``."""
        self._kept[id(holder)] = holder

    def sync(self, link: CollectiveContext, meanwhile: Callable[[], None] | None = None) -> None:
        """Enter the next step, and wait until all ranks have.

        Args:
            link: the call.
            meanwhile: what to do before waiting.

        Raises:
            MismatchError: another rank is in another collective.
            The errors of ``link.check``.
        """
        step = self.step = self.step + 1
        parity, flags, call = step & 1, self.flags, link.call
        own, digest = self.own[parity], call.digest
        flags[own + DIGEST] = digest
        flags[own + _ROWS] = call.rows
        if self.fence is not None:
            self.fence()
        flags[own] = step
        if self.wake is not None:
            self.wake()
        if meanwhile is not None:
            meanwhile()
        fits = True
        for at in self.others[parity]:
            if flags[at] != step:
                self.wait(at, step, link)
            if flags[at + DIGEST] != digest:
                fits = False
        if self.fence is not None:
            self.fence()
        if not fits:
            link.disagree()

    def rows(self) -> list[int]:
        """What every rank has entered the step with as its rows, through ``sync``.

        Express lanes leave the rows out: no call that takes one asks for them.
        """
        return [self.flags[at + _ROWS] for at in self._all[self.step & 1]]

    def agreed(self, digest: int) -> bool:
        """Whether all ranks have entered the step with this fingerprint."""
        return all(self.flags[at + DIGEST] == digest for at in self._all[self.step & 1])

    def exchange(self, link: CollectiveContext, value: int) -> list[int]:
        """Take a step, and return what every rank has brought to it: 64 bits each."""
        self.flags[self.own[(self.step + 1) & 1] + _LENT] = value
        self.sync(link)
        return [self.flags[at + _LENT] for at in self._all[self.step & 1]]

    def lend(self, source: Array | None, out: Array | None = None) -> bool:
        """Let the others use flat arrays in place, from the next step to the one after it.

        Returns:
            Whether all of them are where the others can see them.
        """
        flags, at, lent = self.flags, self.own[(self.step + 1) & 1] + _LENT, True
        for array in (source, out):
            if array is not None:
                place = self.place(array) if array.size else (0, 0)
                flags[at], flags[at + 1] = place or (0, 1)
                lent = lent and place is not None
            at += 2
        return lent

    def place(self, array: Array) -> Place:
        """Where a contiguous array lies; kept, as the same ones come again and again."""
        known = self._places.get(id(array))
        if known is not None and known[0]() is array:
            return known[1]
        if len(self._places) >= _VIEWS:
            self._places.clear()
        place = self._sharing.locate(array)
        self._places[id(array)] = weakref.ref(array), place
        return place

    def lent(self, rank: int, which: int = SOURCE) -> bool:
        """Whether ``borrowed`` has the array of ``rank``, through ``sync``."""
        at = self._all[self.step & 1][rank] + _LENT + 2 * which
        return self.flags[at] != 0 or self.flags[at + 1] == 0

    def borrowed(
        self,
        link: CollectiveContext,
        rank: int,
        dtype: np.dtype[Any],
        count: int,
        which: int = SOURCE,
    ) -> Array:
        """The array of ``count`` elements that ``rank`` has lent in this step.

        Raises:
            PeerFailedError: that rank was lost before its memory was mapped.
            CommunicationError: its memory cannot be mapped.
        """
        at = self._all[self.step & 1][rank] + _LENT + 2 * which
        key = (self.flags[at], self.flags[at + 1], dtype, count)
        array = self._borrowed.get(key)
        if array is None:
            if len(self._borrowed) >= _VIEWS:
                self._borrowed.clear()
            number, offset, nbytes = key[0], key[1], count * dtype.itemsize
            memory = self._attach(link, rank, number) if count else np.empty(0, np.uint8)
            array = self._borrowed[key] = memory[offset : offset + nbytes].view(dtype)
        return array

    def _attach(self, link: CollectiveContext, rank: int, number: int) -> Bytes:
        try:
            return self._sharing.attach(number)
        except OSError as error:
            end = time.monotonic() + _TO_HEAR_OF_A_LOSS
            while time.monotonic() < end:  # which says more than that a file is not there
                link.check()
                time.sleep(_LONGEST_SLEEP)
            raise CommunicationError(
                f"rank {link.global_rank(link.rank)} cannot map the memory that rank "
                f"{link.global_rank(rank)} lends: {error}"
            ) from error

    def wait(self, at: int, step: int, link: CollectiveContext) -> None:
        """Wait until the flag ``at`` shows ``step``; raises what ``sync`` does."""
        flags, sched_yield = self.flags, os.sched_yield
        for _ in range(self.looks):
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
                sched_yield()
            if self.arrived(at, step, link):
                return
            yields = max(0, yields - _LOOKS_BETWEEN_CHECKS)
            if not yields:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_SLEEP)

    def arrived(self, at: int, step: int, link: CollectiveContext) -> bool:
        """Whether the flag ``at`` shows ``step``; raises what ``sync`` does."""
        link.check()
        rank = self.rank_of(at)
        gone = link.departed(rank)
        if self.flags[at] == step:  # looked at last: a rank may leave once it has set its flag
            return True
        if gone:
            left = link.global_rank(rank)
            raise PeerFailedError(f"rank {left} has left the job", left)
        return False

    def rank_of(self, at: int) -> int:
        """Whose flag is ``at``."""
        return at * 8 // _FLAG % self._size

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


def region_of(context: CollectiveContext) -> SharedRegion | None:
    """The memory that the ranks of a group share, if they do."""
    return context.area  # type: ignore[return-value]  # it comes from ``establish``


def establish(link: CollectiveContext, backend: Backend) -> SharedRegion | None:
    """Make the area of a group, or find out that there can be none; the same on all ranks.

    Called by all ranks of the group. They introduce themselves to each other, the first one makes
    memory, and they tell each other whether they could reach all of that.

    Raises:
        ConfigError: there can be none, and the transport was told that there has to be.
    """
    sharing = backend.root.memory
    if sharing is None or link.size == 1 or len(set(backend.hosts)) > 1:
        return None
    window, introduction, why = None, b"", ""
    try:
        introduction = sharing.introduce()
        if link.rank == 0:
            window = sharing.segment(nbytes(link.size))
    except (OSError, MemoryError) as error:
        why = str(error) or repr(error)
    try:
        memory, votes, why, cores = _map(link, sharing, window, introduction, why)
    finally:
        if window is not None:
            window.close()
    if memory is not None:
        area = sharing.region(memory, link.rank, link.size)
        assert isinstance(area, SharedRegion), "what all transports give"
        here = backend.hosts[backend.rank]
        if backend.root.hosts.count(here) > cores:  # whom this rank waits for may need its core
            area.looks = 0
        return area
    if votes.argmin() == link.rank:  # one rank speaks for all
        _report(backend, sharing, why)
    if sharing.required:
        without = [link.global_rank(rank) for rank in range(link.size) if not votes[rank]]
        raise ConfigError(
            f"shm=on, but rank(s) {without} of this host cannot share memory with the others"
            f"{': ' + why if why else ''}; use shm=auto, which falls back to messages"
        )
    return None


def _map(
    link: CollectiveContext,
    sharing: MemorySharing,
    window: Segment | None,
    introduction: bytes,
    why: str,
) -> tuple[Bytes | None, NDArray[np.bool_], str, int]:
    """Map the first rank's memory; None, on all ranks, if one of them cannot reach all others'.

    Returns:
        Also which ranks could, why this one could not, and on how many cores all of them may run.
    """
    own = np.zeros(_INTRODUCTION + 8 + _CORES // 8, np.uint8)
    own[: len(introduction)] = np.frombuffer(introduction, np.uint8)
    made = np.array([window.number if window else 0], np.uint64)
    own[_INTRODUCTION : _INTRODUCTION + 8] = made.view(np.uint8)
    own[_INTRODUCTION + 8 :] = _cores()
    told = np.zeros(own.size * link.size, np.uint8)
    doubling.all_gather(link, own, told, range(0, told.size + 1, own.size))
    memory = None
    try:
        number = int(told[_INTRODUCTION : _INTRODUCTION + 8].view(np.uint64)[0])
        if number and not why:
            for rank in range(link.size):
                words = told[rank * own.size :][:_INTRODUCTION]
                if words.any():  # who has none says so itself
                    sharing.meet(words.tobytes())
            memory = window.bytes(0, nbytes(link.size)) if window else sharing.open(number)
    except (OSError, MemoryError) as error:
        why = str(error) or repr(error)
    votes = np.zeros(link.size, np.bool_)
    doubling.all_gather(link, np.array([not why]), votes, range(link.size + 1))
    masks = told.reshape(link.size, own.size)[:, _INTRODUCTION + 8 :]
    cores = int(np.unpackbits(np.bitwise_or.reduce(masks)).sum())
    return (memory if votes.all() else None), votes, why, cores


def _cores() -> Bytes:
    """On which cores this process may run, a bit for each."""
    bits = np.zeros(_CORES, np.uint8)
    allowed = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    for core in allowed:
        bits[core % _CORES] = 1
    return np.packbits(bits)


def _report(backend: Backend, sharing: MemorySharing, why: str) -> None:
    """Log that there is no area, as a warning where that may be news: once for all groups."""
    root = backend.root
    level = logging.WARNING if sharing.available and not root.warned else logging.INFO
    root.warned = root.warned or level == logging.WARNING
    _LOG.log(
        level,
        "rank %d cannot share memory with the others on its host, messages are sent among ranks "
        "%s: %s",
        root.rank,
        list(backend.ranks),
        why,
    )
