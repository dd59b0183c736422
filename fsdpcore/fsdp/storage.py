"""Where the parameters of a unit lie, and what the ranks agree on before they read or write them.

``Separate``: every rank holds its shard, and gathers the others' into a buffer of the pool. After
the forward pass it may keep a larger part, so that fewer ranks gather for the backward pass.

``Kept``: every rank holds all parameters, and gathers them after they were written.

``Windowed``: all ranks are on one host and map one window, in which the flat buffer lies once. A
rank's shard is its slice of it; it writes there only, and reads all of it while the unit is not
SHARDED. No bytes move, but two things must never happen: that a rank reads what another has not
finished writing, and that it writes what another still reads. Both follow from collectives, since
no rank leaves one before all have entered it; and as the ranks compare what each collective is for,
they enter the same one.

1. *Reading* begins with a collective of no data, ``unshard``. A rank writes in state SHARDED only,
   so whatever it has written was complete when it entered, and is visible to those who leave. As
   long as there was no collective of the second kind since, nobody can have written, and reading
   begins anew without one.
2. *Writing* needs a collective since the last ``unshard`` which every rank has entered with the
   unit SHARDED, that is, with reading ended. After it nobody can have begun anew, because that
   is a collective in which the writing rank would take part. The reduction of the unit's gradients
   is such a collective if the unit was resharded before; whether it was is part of what
   the ranks compare. So training, which ends a backward pass by ``reshard`` and then the reduction,
   pays nothing for it. Where there was none (``exposed``), ``claim`` is one of its own. ``exposed``
   changes by collectives alone, so it is the same on all ranks, and they agree on whether there
   is a claim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from fsdpcore.backend import Backend
from fsdpcore.buffers import Array
from fsdpcore.collectives import all_gather, barrier
from fsdpcore.fsdp.buffers import Allocate, BufferPool
from fsdpcore.fsdp.ranks import Ranks
from fsdpcore.fsdp.strategy import Keep, Placement
from fsdpcore.fsdp.views import Params, Places, read_only


class Storage(ABC):
    """The parameters of one unit, or some of them, as one rank has them.

    Attributes:
        places: where each parameter lies.
        own: this rank's shard, flat, padding included; to be written after ``claim`` only.
        shard: the same, read-only.
        nbytes: that this rank holds all the time.
        padding: how many of these bytes are padding.
    """

    def __init__(self, places: Places, own: Array, rank: int) -> None:
        self.places = places
        self.own = own
        self.shard = read_only(own)
        self.nbytes = own.nbytes
        self.padding = (own.size - places.layout.valid_size(rank)) * own.itemsize
        own[places.layout.valid_size(rank) :] = 0

    @property
    def shown(self) -> Array | None:
        """All parameters, where they lie all the time; None where they are gathered."""
        return None

    @property
    def fetched(self) -> bool:
        """Whether ``gather`` would move data."""
        return False

    @property
    def sends(self) -> int:
        """Bytes that this rank sends in ``gather``, at the least that is possible."""
        return 0

    @property
    def fills(self) -> bool:
        """Whether ``gather`` would write to what this rank holds all the time."""
        return False

    @property
    def gathered_bytes(self) -> int:
        """What a gathering takes from the pool."""
        return 0

    @abstractmethod
    def gather(self, *, async_op: bool) -> Any:
        """Have all parameters readable; a collective. With ``async_op``, return its ``Work``.

        Returns None where they are readable already.
        """

    @property
    @abstractmethod
    def params(self) -> Params:
        """All parameters; after ``gather``, until ``free``."""

    @abstractmethod
    def free(self, *, again: bool) -> None:
        """End reading, ``again`` if the backward pass is still to come; not a collective."""

    @abstractmethod
    def claim(self) -> None:
        """Have all ranks end reading before this one writes to ``own``; called by all of them."""

    def reduced(self) -> None:  # noqa: B027 - most need not know
        """Take note that all ranks entered the reduction of the gradients with the unit SHARDED."""


def keeps_all(placement: Placement) -> bool:
    """Whether every rank holds all parameters, all the time, if they are not in a window."""
    return placement.keep is Keep.UPDATE or not placement.gathers


def store(
    places: Places,
    ranks: Ranks,
    algorithm: str,
    pool: BufferPool,
    allocate: Allocate,
    flat: Array | None,
) -> Storage:
    """Make the storage of a flat buffer, whose place in the window is ``flat`` if there is one."""
    if flat is not None:
        return Windowed(ranks.shards, places, flat)
    if keeps_all(ranks.placement):
        return Kept(ranks.shards, places, algorithm, allocate)
    return Separate(ranks, places, algorithm, pool, allocate)


class Separate(Storage):
    """A shard on each rank, gathered into a buffer of the pool."""

    def __init__(
        self, ranks: Ranks, places: Places, algorithm: str, pool: BufferPool, allocate: Allocate
    ) -> None:
        layout = places.layout
        own = allocate(layout.shard_size, layout.dtype)
        super().__init__(places, own, ranks.shards.rank)
        self._ranks = ranks
        self._algorithm = algorithm
        self._pool = pool
        self._flat: Array | None = None
        self._params: Params | None = None
        # A larger part than the own shard, kept from the forward to the backward pass.
        self._part: Array | None = None

    @property
    def fetched(self) -> bool:
        return True

    @property
    def sends(self) -> int:
        group = self._ranks.shards if self._part is None else self._ranks.near
        return _sent(self.places, group)

    @property
    def gathered_bytes(self) -> int:
        return self.places.layout.padded_size * self.places.layout.dtype.itemsize

    def gather(self, *, async_op: bool) -> Any:
        layout = self.places.layout
        source, group = self.own, self._ranks.shards
        label = f"unit {self.places.unit}"
        if self._part is not None:
            source, group, label = self._part, self._ranks.near, f"{label}, again"
        flat = self._pool.take(layout.padded_size, layout.dtype)
        try:
            started = all_gather(
                source,
                group,
                out=flat,
                algorithm=self._algorithm,
                async_op=async_op,
                label=label,
            )
        except BaseException:
            self._pool.give(flat)
            raise
        self._flat = flat
        return started

    @property
    def params(self) -> Params:
        if self._params is None:
            assert self._flat is not None
            self._params = Params(self._flat, self.places)
        return self._params

    def free(self, *, again: bool) -> None:
        flat, self._flat, self._params = self._flat, None, None
        if again and flat is not None and self._part is None:
            self._keep_part(flat)
        if self._part is not None and not again:
            self._pool.give(self._part)
            self._part = None
        if flat is not None:
            self._pool.give(flat)

    def _keep_part(self, flat: Array) -> None:
        near = self._ranks.near
        if near is not self._ranks.shards:
            size = flat.size // near.world_size
            self._part = self._pool.take(size, flat.dtype)
            self._part[:] = flat[near.rank * size : (near.rank + 1) * size]

    def claim(self) -> None:
        """Nothing to wait for: nobody else sees the shard outside of ``gather``."""
        self.free(again=False)  # what was gathered is about to be out of date


class Kept(Storage):
    """All parameters on every rank; the own shard is a slice of them."""

    def __init__(self, shards: Backend, places: Places, algorithm: str, allocate: Allocate) -> None:
        flat = allocate(places.layout.padded_size, places.layout.dtype)
        start, stop = places.layout.shard_bounds(shards.rank)
        super().__init__(places, flat[start:stop], shards.rank)
        self.nbytes = flat.nbytes
        self.padding = places.layout.padding * flat.itemsize
        self._shards = shards
        self._algorithm = algorithm
        self._flat = flat
        self._params = Params(flat, places)
        self._stale = shards.world_size > 1

    @property
    def shown(self) -> Array | None:
        return self._flat

    @property
    def fetched(self) -> bool:
        return self._stale

    @property
    def fills(self) -> bool:
        return self._stale

    @property
    def sends(self) -> int:
        return _sent(self.places, self._shards) if self._stale else 0

    def gather(self, *, async_op: bool) -> Any:
        if not self._stale:
            return None
        started = all_gather(
            self.own,
            self._shards,
            out=self._flat,
            algorithm=self._algorithm,
            async_op=async_op,
            label=f"unit {self.places.unit}",
        )
        self._stale = False
        return started

    @property
    def params(self) -> Params:
        return self._params

    def free(self, *, again: bool) -> None:
        """Nothing to do: they stay until they are written."""

    def claim(self) -> None:
        """Nothing to wait for: what the others read is their own copy."""
        self._stale = self._shards.world_size > 1


class Windowed(Storage):
    """A slice of the flat buffer, which lies in memory that all ranks map.

    Attributes:
        exposed: the unit was unsharded since the last collective that all ranks entered with it
            sharded; the same on all ranks.
    """

    def __init__(self, shards: Backend, places: Places, flat: Array) -> None:
        start, stop = places.layout.shard_bounds(shards.rank)
        super().__init__(places, flat[start:stop], shards.rank)
        self.exposed = False
        self._flat = flat
        self._shards = shards
        self._label = f"unit {places.unit}"
        self._params = Params(flat, places)

    @property
    def shown(self) -> Array | None:
        return self._flat

    def gather(self, *, async_op: bool) -> Any:
        if self.exposed:  # nobody can have written since
            return None
        started = barrier(self._shards, async_op=async_op, label=self._label)
        self.exposed = True
        return started

    @property
    def params(self) -> Params:
        return self._params

    def free(self, *, again: bool) -> None:
        """Nothing to do: the unit's state says that reading has ended."""

    def claim(self) -> None:
        if self.exposed:
            barrier(self._shards, label=f"{self._label}, to be written")
            self.exposed = False

    def reduced(self) -> None:
        self.exposed = False


def _sent(places: Places, group: Backend) -> int:
    """What each rank sends so that all have everything: its part, to all others."""
    layout, ranks = places.layout, group.world_size
    return layout.padded_size * layout.dtype.itemsize // ranks * (ranks - 1)
