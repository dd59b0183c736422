"""``SharedRegion``: memory that all ranks of a group on one host see, and their steps through it.

Every rank has two staging buffers, two flags, and counts its steps. An even step uses one buffer
and one flag of each rank, an odd step the other. In a step a rank

1. fills its staging buffer of that step, or writes into its flag where its arrays lie: ``publish``;
2. writes the digest of its call into the flag, and then the number of the step: ``enter``;
3. waits until the flags of all others show that number, and compares their digests with its own:
   ``enter``, too;
4. reads the staging buffers of the others, or their arrays: ``peer_view``.

So one step is a barrier, the check that all call the same collective, and an exchange of data.

Nobody needs to wait before filling a staging buffer. A rank fills that of step s when it is done
with step s - 1; the last to use the same buffer was step s - 2. In step s - 1 it has seen the flags
of all others show s - 1. They write that number once they have finished reading in step s - 2. So
nobody reads the buffer any more. The same holds for the flags. An array that was published is in
use until the others have entered the *next* step: who publishes takes one more step, and only
then changes or returns it.

A rank must write its data before its flag, and who reads must read the flag before the data. In
both places it passes a ``fence``, where the processor needs one; ``enter`` has the proof.
"""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.movements import INPUT
from fsdpcore.comm.sharing import MemorySharing
from fsdpcore.core.buffers import Array, Bytes
from fsdpcore.core.errors import CommunicationError
from fsdpcore.core.fence import fence_here

_FLAG = 64  # bytes: a cache line, so that ranks do not disturb each other
# How long to wait for a rank: looks at its flag, then looks with the core given away in between
# (about 2 ms), then sleeps.
_LOOKS = 50
_YIELDS = 2000
_LOOKS_BETWEEN_CHECKS = 100
_LONGEST_SLEEP = 1e-3
_TURNS = 16  # calls side by side in a staging buffer; each keeps bound steps of its own
_KEPT = 256  # views of staging buffers, of peers' arrays, and places of own ones
_TO_HEAR_OF_A_LOSS = 2.0  # seconds

# Words of a flag: the step, the rows, the digest, and two words each for where the input and the
# output are, where those are published.
_STEP, _ROWS, DIGEST, _PLACES = 0, 1, 2, 3
_PLACES_END = _PLACES + 4
NOT_PUBLISHED = (0, 1)

Place = tuple[int, int] | None  # see ``MemorySharing.locate``


class Enter(Protocol):
    """See ``SharedRegion.enter``."""

    def __call__(
        self,
        digest: int,
        context: CollectiveContext,
        begin: Callable[[], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Enter the next step.

        Args:
            digest: of the call.
            context: the call.
            begin: begins the call, if that was not done; called where this rank waits for long.
            meanwhile: what to do before waiting.

        Raises:
            MismatchError: another rank is in another collective.
            The errors of ``context.check``.
        """


@functools.lru_cache(maxsize=64)
def _places_of_flags(size: int) -> list[list[int]]:
    """Where the flags are, of even and of odd steps: one list for all ranks of this process."""
    return [[(parity * size + r) * _FLAG // 8 for r in range(size)] for parity in (0, 1)]


def staging_bytes(ranks: int) -> int:
    """The size of a staging buffer in a group of so many ranks.

    Every piece that goes through it costs a step, in which the ranks wait for each other. So few
    ranks have large ones, as far as a core's cache goes: up to eight share 2 MiB.
    """
    return max(2048 // ranks, 256) * 1024


def nbytes(ranks: int) -> int:
    """The memory that a group of so many ranks needs."""
    return 2 * ranks * (_FLAG + staging_bytes(ranks))


class StagingViews(list[list[Array]]):
    """All ranks' staging buffers as arrays, those of even and those of odd steps."""


class Kept(list[Any]):
    """What somebody keeps as long as the memory is there."""


def region_of(context: CollectiveContext) -> SharedRegion | None:
    """The memory that the ranks of a group share, if they do."""
    found = context.region
    assert found is None or isinstance(found, SharedRegion), "it comes from ``establish``"
    return found


class SharedRegion:
    """The region of one group, seen from one rank.

    Attributes:
        step: the last one that this rank has entered.
        flags: of all ranks, as 64-bit words: the step, the rows, the digest, and where the arrays
            are that it publishes.
        own: for even and odd steps, where this rank's flag is.
        own_places: for even and odd steps, where this rank's flag says where its arrays lie that it
            publishes: two words for each, as ``publish`` writes them.
        all_places: for even and odd steps, what returns the same of all ranks as bytes.
        fence: what keeps data and flags in order, where the processor does not.
        block: bytes that are best reduced at once: two of them stay in a core's cache.
        addressed: ranks tell each other where the arrays lie that they publish.
        moves: collectives move arrays through it; if not, the ranks meet in it, and send messages.
        movements: those of the group's calls, prepared; see ``interpreter``.
        looks: how often a rank looks for another one's flag before it gives its core away.
        turns: how many calls use different places of a staging buffer, at most.
        staging_bytes: of one staging buffer.
        moved: bytes of its arrays that a rank has read or written in a step, where that counts.
    """

    block = 512 * 1024
    addressed = True
    moves = True
    moved: int | None = None

    def __init__(self, memory: Bytes, rank: int, size: int, peers: MemorySharing) -> None:
        flags = 2 * size * _FLAG
        self.flags = memoryview(memory.data)[:flags].cast("Q")
        words = memory[:flags].view(np.uint64).reshape(2, size, _FLAG // 8)
        places = [words[parity, :, _PLACES:_PLACES_END] for parity in (0, 1)]
        self.own_places = [ranks[rank] for ranks in places]
        self.all_places = [ranks.tobytes for ranks in places]
        self.staging_bytes = staging_bytes(size)
        self._staging = memory[flags : nbytes(size)].reshape(2, size, self.staging_bytes)
        self._size, self._peers = size, peers
        self.looks, self.turns = _LOOKS, _TURNS
        self.fence = fence_here()
        self._all = at = _places_of_flags(size)
        self.own = [ranks[rank] for ranks in at]
        self._rank = rank
        self.step = 0
        self._views: dict[tuple[np.dtype[Any], int], StagingViews] = {}
        self._places: dict[int, tuple[weakref.ref[Array], Place]] = {}
        self._peer_views: dict[tuple[int, int, np.dtype[Any], int], Array] = {}
        self.movements: dict[Any, Any] = {}
        self._holders: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def close(self) -> None:
        """Let go of the memory; the region is of no use after that."""
        for holder in self._holders.values():
            holder.clear()
        self.movements.clear()
        self._views.clear()
        self._peer_views.clear()
        self.own_places.clear()
        self.all_places.clear()
        del self._staging
        self.flags.release()

    def keep(self, items: Iterable[Any]) -> Kept:
        """Return things that hold parts of the memory as a list, which ``close`` empties."""
        made = Kept(items)
        self.empty_at_close(made)
        return made

    def empty_at_close(self, holder: Any) -> None:
        """Have ``close`` empty what holds parts of the memory; ``holder`` has ``clear``."""
        self._holders[id(holder)] = holder

    # Steps.

    @functools.cached_property
    def enter(self) -> Enter:
        """Enters the next step, and waits until all ranks have: here, and nowhere else.

        What a reader R reads in step s is what a writer W has written for it, by the rule of
        ``core.fence``:

        - *Nothing older*. W writes, the digest too, passes its first fence, and sets its flag to s.
          R sees that, passes its second fence, and reads. So it sees all of it.
        - *Nothing newer*. To the same places, flags too, W writes again only for step s + 2. By
          then it has seen R's flag at s + 1, and passed its second fence of that step. R has set
          that flag behind a fence that all its reading in step s was ahead of. So none of it has
          seen what W writes now.

        A closure, since the shortest calls take hardly longer than to look up what it uses.
        """
        flags, own, fence, me = self.flags, self.own, self.fence, self._rank
        others = [ranks[me + 1 :] + ranks[:me] for ranks in self._all]
        wait = self.wait

        def enter(
            digest: int,
            context: CollectiveContext,
            begin: Callable[[], None] | None = None,
            meanwhile: Callable[[], None] | None = None,
        ) -> None:
            self.step = step = self.step + 1
            parity = step & 1
            mine = own[parity]
            flags[mine + DIGEST] = digest
            if fence is not None:
                fence()
            flags[mine] = step
            if meanwhile is not None:
                meanwhile()
            for at in others[parity]:
                if flags[at] != step:
                    wait(at, step, context, begin)
            if fence is not None:  # flags are read before data and digests
                fence()
            agreed = True
            for at in others[parity]:
                if flags[at + DIGEST] != digest:
                    agreed = False
            if not agreed:
                if begin is not None:
                    begin()
                context.disagree()

        return enter

    def sync(self, context: CollectiveContext) -> None:
        """Enter the next step of a call that was begun, and tell the others its rows."""
        spec = context.spec
        self.flags[self.own[(self.step + 1) & 1] + _ROWS] = spec.rows
        self.enter(spec.digest, context, None)

    def wait(
        self, at: int, step: int, context: CollectiveContext, begin: Callable[[], None] | None
    ) -> None:
        """Wait until the flag ``at`` shows ``step``; raises what ``enter`` does."""
        flags, sched_yield = self.flags, os.sched_yield
        for _ in range(self.looks):
            if flags[at] == step:
                return
        if begin is not None:
            begin()
        # Python code on other threads of this process waits for the interpreter while this one
        # looks; only a sleep lets it have its turn.
        yields = 0 if context.background else _YIELDS
        pause = 20e-6
        while True:
            for _ in range(min(yields, _LOOKS_BETWEEN_CHECKS)):
                if flags[at] == step:
                    return
                sched_yield()
            if self.arrived(at, step, context):
                return
            yields = max(0, yields - _LOOKS_BETWEEN_CHECKS)
            if not yields:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_SLEEP)

    def arrived(self, at: int, step: int, context: CollectiveContext) -> bool:
        """Whether the flag ``at`` shows ``step``; raises what ``enter`` does."""
        context.check()
        rank = self.rank_of(at)
        gone = context.departed(rank)
        if self.flags[at] == step:  # looked at last: a rank may leave once it has set its flag
            return True
        if gone:
            raise context.missed(rank)
        return False

    def rank_of(self, at: int) -> int:
        """Whose flag is ``at``."""
        return at * 8 // _FLAG % self._size

    # Numbers in flags.

    def rows(self) -> list[int]:
        """What every rank has entered the step with as its rows, through ``sync``."""
        return [self.flags[at + _ROWS] for at in self._all[self.step & 1]]

    def exchange(self, context: CollectiveContext, value: int) -> list[int]:
        """Take a step, and return what every rank has brought to it: 64 bits each."""
        self.flags[self.own[(self.step + 1) & 1] + _PLACES] = value
        self.sync(context)
        return [self.flags[at + _PLACES] for at in self._all[self.step & 1]]

    # Staging buffers.

    def staging(self, dtype: np.dtype[Any], count: int) -> StagingViews:
        """All ranks' buffers as arrays of ``count`` elements, of even and of odd steps.

        Kept, as a view costs more than a message.
        """
        try:
            return self._views[dtype, count]
        except KeyError:
            if len(self._views) >= _KEPT:
                self._views.clear()
            size = count * dtype.itemsize
            made = StagingViews(
                [buffer[:size].view(dtype) for buffer in buffers] for buffers in self._staging
            )
            self._views[dtype, count] = made
            self.empty_at_close(made)
            return made

    # Arrays in place.

    def publish(self, source: Array | None, out: Array | None = None) -> bool:
        """Let the others use flat arrays in place, from the next step to the one after it.

        Returns:
            Whether all of them are where the others can see them.
        """
        flags, at, seen = self.flags, self.own[(self.step + 1) & 1] + _PLACES, True
        for array in (source, out):
            if array is not None:
                place = self.place(array) if array.size else (0, 0)
                flags[at], flags[at + 1] = place or NOT_PUBLISHED
                seen = seen and place is not None
            at += 2
        return seen

    def place(self, array: Array) -> Place:
        """Where a contiguous array lies; kept, as the same ones come again and again."""
        known = self._places.get(id(array))
        if known is not None and known[0]() is array:
            return known[1]
        if len(self._places) >= _KEPT:
            self._places.clear()
        place = self._peers.locate(array)
        self._places[id(array)] = weakref.ref(array), place
        return place

    def published(self, rank: int, which: int = INPUT) -> bool:
        """Whether ``peer_view`` has the array of ``rank`` in this step."""
        at = self._all[self.step & 1][rank] + _PLACES + 2 * which
        return self.flags[at] != 0 or self.flags[at + 1] == 0

    def peer_view(
        self,
        context: CollectiveContext,
        rank: int,
        dtype: np.dtype[Any],
        count: int,
        which: int = INPUT,
    ) -> Array:
        """The array of ``count`` elements that ``rank`` has published in this step.

        Raises:
            PeerFailedError: that rank was lost before its memory was mapped.
            CommunicationError: its memory cannot be mapped.
        """
        at = self._all[self.step & 1][rank] + _PLACES + 2 * which
        key = (self.flags[at], self.flags[at + 1], dtype, count)
        array = self._peer_views.get(key)
        if array is None:
            if len(self._peer_views) >= _KEPT:
                self._peer_views.clear()
            number, offset, nbytes = key[0], key[1], count * dtype.itemsize
            memory = self._attach(context, rank, number) if count else np.empty(0, np.uint8)
            array = self._peer_views[key] = memory[offset : offset + nbytes].view(dtype)
        return array

    def withdraw(self) -> None:
        """Forget what this rank published one step ago: all ranks have entered the next one."""

    def _attach(self, context: CollectiveContext, rank: int, number: int) -> Bytes:
        try:
            return self._peers.attach(number)
        except OSError as error:
            end = time.monotonic() + _TO_HEAR_OF_A_LOSS
            while time.monotonic() < end:  # which says more than that a file is not there
                context.check()
                time.sleep(_LONGEST_SLEEP)
            raise CommunicationError(
                f"rank {context.global_rank(context.rank)} cannot map the memory that rank "
                f"{context.global_rank(rank)} publishes: {error}"
            ) from error
