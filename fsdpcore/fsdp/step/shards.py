"""Shards of gradients, one unit after the other, while those that come next are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from fsdpcore.core.buffers import Array
from fsdpcore.fsdp.offload.arrays import GRADIENTS, ArrayKind
from fsdpcore.fsdp.sharding.process_groups import ProcessGroups
from fsdpcore.fsdp.units.sharded_unit import ShardedUnit

Ranges: TypeAlias = Callable[[ProcessGroups, ShardedUnit], list[slice]]
"""Which parts of a unit's shard are read."""


def in_turn(units: Iterable[ShardedUnit], *uses: Sequence[ArrayKind]) -> Iterator[ShardedUnit]:
    """Go through units while arrays of those that come next are loaded, for one ``begin`` each."""
    queue = tuple(units)
    for number, unit in enumerate(queue):
        for each in queue[number : number + 1 + unit.store.depth]:
            for kinds in uses:
                each.store.ahead(kinds)
        yield unit


class GradientShards:
    """Shards of reduced gradients, each of them in memory while it is its turn.

    Args:
        units: whose.
        groups: of ranks that hold them.
        ranges: which parts of a unit's shard.
        written: they are changed.
    """

    def __init__(
        self,
        units: Iterable[ShardedUnit],
        groups: ProcessGroups,
        ranges: Ranges,
        *,
        written: bool = False,
    ) -> None:
        self._units = units
        self._groups = groups
        self._ranges = ranges
        self._written = written

    def __iter__(self) -> Iterator[Array]:
        units = [unit for unit in self._units if unit.gradients.shard is not None]
        for unit in in_turn(units, GRADIENTS):
            assert unit.gradients.shard is not None
            shard = unit.gradients.shard[: unit.valid_size]
            cuts = unit.cuts.get(self._ranges)
            if cuts is None:
                cuts = unit.cuts[self._ranges] = self._cuts(unit)
            unit.store.begin(GRADIENTS, write=self._written)
            try:
                for each in cuts:
                    yield shard[each]
            finally:
                unit.store.end(GRADIENTS, written=self._written)

    def _cuts(self, unit: ShardedUnit) -> list[slice]:
        """Norms go by blocks, of which a part may come first."""
        cuts, block = [], unit.layout.block
        for each in self._ranges(self._groups, unit):
            first = min(-(-each.start // block) * block, each.stop)
            if each.start < first:
                cuts.append(slice(each.start, first))
            cuts.append(slice(first, each.stop))
        return cuts


def everything(groups: ProcessGroups, unit: ShardedUnit) -> list[slice]:
    """All of a shard."""
    return [slice(0, unit.valid_size)]


def held_by_one(groups: ProcessGroups, unit: ShardedUnit) -> list[slice]:
    """What this rank reads of a shard that all replicas have."""
    part = groups.part(unit.valid_size, unit.layout.block)
    stop = min(part.stop, unit.valid_size)
    return [slice(min(part.start, stop), stop)]


def counted(groups: ProcessGroups, unit: ShardedUnit) -> list[slice]:
    """Of that, what no other rank of ``tensor`` counts."""
    here = held_by_one(groups, unit)[0]
    return [here] if groups.leads else _within(here, _spans(unit, boxed=True))


def not_counted(groups: ProcessGroups, unit: ShardedUnit) -> list[slice]:
    """The rest of it."""
    return _within(held_by_one(groups, unit)[0], _spans(unit, boxed=False))


def _spans(unit: ShardedUnit, *, boxed: bool) -> Iterator[slice]:
    """Give the parts of this rank's shard that are boxes, or those that are not."""
    for piece in unit.layout.pieces(unit.shard_rank):
        if (piece.name in unit.boxes) is boxed:
            yield slice(piece.shard_start, piece.shard_stop)


def _within(outer: slice, parts: Iterable[slice]) -> list[slice]:
    cut = [slice(max(outer.start, each.start), min(outer.stop, each.stop)) for each in parts]
    return [each for each in cut if each.start < each.stop]
