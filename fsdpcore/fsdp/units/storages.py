"""The kinds of storage that ``storage.py`` tells of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsdpcore.collectives import all_gather, barrier
from fsdpcore.collectives.on_device import in_background
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Allocate, Array
from fsdpcore.core.work import Work
from fsdpcore.fsdp.sharding.placement import StorageKind, all_gather_sends, storage_kind
from fsdpcore.fsdp.units.binding import Binding
from fsdpcore.fsdp.units.storage import ParameterStorage, place_of
from fsdpcore.fsdp.units.views import Params, Places
from fsdpcore.fsdp.units.wire import QuantisedGather


def make_storage(
    places: Places,
    binding: Binding,
    allocate: Allocate,
    flat: Array | None,
    *,
    away: bool,
    trained: bool,
) -> ParameterStorage:
    """Make the storage of a flat buffer.

    Args:
        places: where each parameter lies in it.
        binding: of the engine.
        allocate: makes what this rank holds.
        flat: its place in the window, if there is one.
        away: what ``allocate`` makes is the host's memory, while a GPU computes.
        trained: the parameters are, so that they are quantised on the way if any are.
    """
    made = _made(places, binding, allocate, flat, away=away)
    wire = binding.wire if trained else None
    if wire is not None and wire.gathering is not None:
        made.quantised = QuantisedGather(places, wire, wire.gathering)
    return made


def _made(
    places: Places, binding: Binding, allocate: Allocate, flat: Array | None, *, away: bool
) -> ParameterStorage:
    kind = storage_kind(binding.groups.placement, windowed=flat is not None, pinned=away)
    if kind.shared:
        assert flat is not None
        return SharedWindowStorage(kind, places, binding, flat)
    if not kind.keeps:
        return ShardedStorage(kind, places, binding, allocate, away=away)
    if kind.takes_buffer:
        return PinnedReplicaStorage(kind, places, binding, allocate)
    return ReplicatedStorage(kind, places, binding, allocate)


class _PooledStorage(ParameterStorage):
    """Parameters that are in a buffer of the pool while they are used."""

    def __init__(self, kind: StorageKind, binding: Binding, places: Places, own: Array) -> None:
        super().__init__(kind, binding.groups.shards, places, own)
        self._pool = binding.pool
        self._flat: Array | None = None
        self._params: Params | None = None

    @property
    def params(self) -> Params:
        if self._params is None:
            assert self._flat is not None
            self._params = Params(self._flat, self.places)
        return self._params

    @contextmanager
    def _filling(self) -> Iterator[Array]:
        """Take a buffer, which is what ``params`` shows unless the block fails."""
        flat = self._pool.take(self.places.layout.padded_size, self.places.layout.dtype)
        try:
            yield flat
        except BaseException:
            self._pool.give(flat)
            raise
        self._flat = flat

    def free(self, *, again: bool) -> None:
        flat, self._flat, self._params = self._flat, None, None
        if flat is not None:
            self._pool.give(flat)


class ShardedStorage(_PooledStorage):
    """A shard on each rank, gathered into a buffer of the pool."""

    def __init__(
        self,
        kind: StorageKind,
        places: Places,
        binding: Binding,
        allocate: Allocate,
        *,
        away: bool,
    ) -> None:
        own = allocate(places.layout.shard_size, places.layout.dtype)
        super().__init__(kind, binding, places, own)
        self._regather_group = binding.groups.regather_group
        self._algorithm = binding.algorithm
        self._away = away
        # A larger part than the own shard, kept from the forward to the backward pass.
        self._kept_part: Array | None = None

    @property
    def _group(self) -> Backend:
        return self._shards if self._kept_part is None else self._regather_group

    def gather(self, what: str, *, async_op: bool) -> Work | None:
        source, group = self.own, self._shards
        label = f"{what} of unit {self.places.unit}"
        if self._kept_part is not None:
            source, group, label = self._kept_part, self._regather_group, f"{label}, again"
        away = self._away and self._kept_part is None
        quantised = self._quantises
        with self._filling() as flat:
            if quantised is not None:
                started = quantised.start(source, flat, label, async_op=async_op)
                self.stale = self._kind.moves and not quantised.fresh
                return started
            place = place_of(flat, self.places.layout, group.rank) if away else None
            return _gathering(source, group, flat, place, self._algorithm, label, async_op=async_op)

    @property
    def _quantises(self) -> QuantisedGather | None:
        return self.quantised if self._kept_part is None else None

    def free(self, *, again: bool) -> None:
        if again and self._flat is not None and self._kept_part is None:
            self._keep_part(self._flat)
        if self._kept_part is not None and not again:
            self._pool.give(self._kept_part)
            self._kept_part = None
        super().free(again=again)

    def _keep_part(self, flat: Array) -> None:
        group = self._regather_group
        if group is not self._shards:
            size = flat.size // group.world_size
            self._kept_part = self._pool.take(size, flat.dtype)
            self._kept_part[:] = flat[group.rank * size : (group.rank + 1) * size]

    def claim(self, *, agreed: bool) -> None:
        """Nothing to wait for: nobody else sees the shard outside of ``gather``."""
        self.free(again=False)  # what was gathered is about to be out of date
        if self.quantised is not None:
            self.quantised.fresh = False
        self.stale = self._kind.moves


class ReplicatedStorage(ParameterStorage):
    """All parameters on every rank; the own shard is a slice of them."""

    def __init__(
        self, kind: StorageKind, places: Places, binding: Binding, allocate: Allocate
    ) -> None:
        shards = binding.groups.shards
        flat = allocate(places.layout.padded_size, places.layout.dtype)
        super().__init__(kind, shards, places, place_of(flat, places.layout, shards.rank))
        self._algorithm = binding.algorithm
        self._flat = flat
        self._params = Params(flat, places)
        self._master = self.own
        self._ranks = shards.world_size
        self._follows = False  # others have what this rank has in ``own``

    @property
    def shown(self) -> Array | None:
        return self._flat

    @property
    def sends(self) -> int:
        first = self.stale and self.quantised is not None and not self._follows
        return super().sends + (all_gather_sends(self.places.layout, self._ranks) if first else 0)

    def follow(self, master: Array) -> None:
        self._master = master

    def rewritten(self) -> None:
        self._follows = False

    def gather(self, what: str, *, async_op: bool) -> Work | None:
        if not self.stale:
            return None
        label = f"{what} of unit {self.places.unit}"
        if self.quantised is not None:
            started = self.quantised.follow(
                self._master, self._flat, label, async_op=async_op, first=not self._follows
            )
        else:
            started = _gathering(
                self.own, self._shards, self._flat, None, self._algorithm, label, async_op=async_op
            )
        self._follows, self.stale = True, False
        return started

    @property
    def params(self) -> Params:
        return self._params

    def free(self, *, again: bool) -> None:
        """Nothing to do: they stay until they are written."""

    def claim(self, *, agreed: bool) -> None:
        """Nothing to wait for: what the others read is their own copy."""
        self.stale = self._kind.moves


class PinnedReplicaStorage(_PooledStorage):
    """All parameters on every rank, in the host's memory; copied to the GPU that uses them."""

    def __init__(
        self, kind: StorageKind, places: Places, binding: Binding, allocate: Allocate
    ) -> None:
        home = allocate(places.layout.padded_size, places.layout.dtype)
        own = place_of(home, places.layout, binding.groups.shards.rank)
        super().__init__(kind, binding, places, own)
        self._algorithm = binding.algorithm
        self._home = home

    def gather(self, what: str, *, async_op: bool) -> Work:
        label = f"{what} of unit {self.places.unit}"

        def bring() -> None:
            if not self.stale:
                flat[...] = self._home
                return
            source = place_of(flat, self.places.layout, self._shards.rank)
            source[...] = self.own
            all_gather(source, self._shards, out=flat, algorithm=self._algorithm, label=label)
            self._home[...] = flat

        with self._filling() as flat:
            started = in_background(self._shards, label, bring)
        self.stale = False
        return started

    def claim(self, *, agreed: bool) -> None:
        """Nothing to wait for: what the others read is their own copy."""
        self.free(again=False)  # what was copied is about to be out of date
        self.stale = self._kind.moves


class SharedWindowStorage(ParameterStorage):
    """A slice of the flat buffer, which lies in memory that all ranks map.

    Attributes:
        exposed: the unit was unsharded since the last collective that all ranks entered with it
            sharded; the same on all ranks that make the same calls.
    """

    def __init__(self, kind: StorageKind, places: Places, binding: Binding, flat: Array) -> None:
        shards = binding.groups.shards
        super().__init__(kind, shards, places, place_of(flat, places.layout, shards.rank))
        self.exposed = False
        self._meetings = binding.meetings
        self._written_after = 0  # how many of these had begun when it was written last
        self._flat = flat
        self._params = Params(flat, places)

    @property
    def shown(self) -> Array | None:
        return self._flat

    def gather(self, what: str, *, async_op: bool) -> Work | None:
        self.exposed = True
        meetings = self._meetings
        if self._written_after == meetings.begun:
            label = f"{what} of unit {self.places.unit}"
            meetings.begin(self._shards, label, async_op=async_op)
        return meetings.pending

    @property
    def params(self) -> Params:
        return self._params

    def free(self, *, again: bool) -> None:
        """Nothing to do: the unit's state says that reading has ended."""

    def claim(self, *, agreed: bool) -> None:
        if self.exposed or not agreed:
            barrier(self._shards, label=f"writing of unit {self.places.unit}")
            self.exposed = False

    def end_writing(self) -> None:
        self._written_after = self._meetings.begun

    def reduced(self) -> None:
        self.exposed = False


def _gathering(
    own: Array,
    group: Backend,
    flat: Array,
    place: Array | None,
    algorithm: str,
    label: str,
    *,
    async_op: bool,
) -> Work | None:
    """Gather the ranks' shards; see ``ParameterStorage.gather``.

    Args:
        own: of this rank.
        group: the ranks.
        flat: to be filled.
        place: of the shard in it, where ``own`` has to be copied first: it is in the memory of the
            host, and a GPU sends what is in its own.
        algorithm, label: of the collective.
        async_op: do not wait for the end.
    """

    def gather(**options: Any) -> Any:
        source = own
        if place is not None:
            place[...] = own
            source = place
        return all_gather(source, group, out=flat, algorithm=algorithm, label=label, **options)

    if not group.device.on_host:
        return in_background(group, label, gather)
    started: Work = gather(async_op=async_op)
    return started if async_op else None
