"""How many bytes travel where some of it is quantised, and how it is packed for that.

Pure: numbers only, no arrays and no communication. ``units/wire.py`` does what is said here, plans
count it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fsdpcore.compress.compression import Compression
from fsdpcore.compress.packing import Packing, Span, largest
from fsdpcore.core.buffers import bounds_of, split_sizes
from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.fsdp.sharding.placement import GradientReduction, Placement

_ITEM = np.dtype(np.float32).itemsize


@dataclass(frozen=True)
class Travel:
    """What is quantised of what an engine moves.

    Attributes:
        compression: how.
        placement: of the engine.
        shards: among the ranks that share a copy.
        replicas: among those that hold the same shard.
        whole: among all ranks.
    """

    compression: Compression
    placement: Placement
    shards: bool
    replicas: bool
    whole: bool

    @classmethod
    def of(
        cls, compression: Compression, placement: Placement, hosts: Sequence[int] | None = None
    ) -> Travel:
        """Find what is quantised; the same on all ranks, since they have to do the same.

        Args:
            compression: how.
            placement: of the engine.
            hosts: the number of each rank's host, for ``hosts_only``; None for a host each.
        """
        size, shards = placement.world_size, placement.shards

        def moves(groups: Iterable[range]) -> bool:
            """Whether one of such groups has ranks that something is quantised between."""
            if compression.hosts_only and hosts is not None:
                return any(len({hosts[rank] for rank in group}) > 1 for group in groups)
            return any(len(group) > 1 for group in groups)

        return cls(
            compression,
            placement,
            shards=moves(range(first, first + shards) for first in range(0, size, shards)),
            replicas=moves(range(shard, size, shards) for shard in range(shards)),
            whole=moves([range(size)]),
        )

    @property
    def gathers(self) -> bool:
        """Whether parameters are quantised."""
        return self.compression.gather is not None and self.placement.gathers and self.shards

    @property
    def lags(self) -> bool:
        """Whether all ranks keep parameters, which follow the masters by quantised differences."""
        return self.gathers and self.placement.whole_parameters

    @property
    def keeps(self) -> bool:
        """Whether ranks keep what they have gathered, packed, until the next update."""
        place = self.placement
        here = self.gathers and not place.whole_parameters and not place.keeps_part
        return here and self.compression.keep

    @property
    def sums(self) -> bool:
        """Whether gradients are quantised before they are summed first."""
        among = self.whole if self.placement.whole_gradients else self.shards
        return self.compression.reduce is not None and among

    @property
    def spreads(self) -> bool:
        """Whether the sums of shards are, before they are summed over replicas."""
        reduces = self.compression.reduce is not None and self.replicas
        return reduces and self.placement.reduces_twice

    @property
    def reduces(self) -> bool:
        """Whether gradients are quantised at all."""
        return self.sums or self.spreads

    def gathering(self, layout: FlatLayout, exact: Sequence[Span]) -> Packing:
        """Return how a flat buffer is gathered."""
        form = self.compression.gathers
        assert form is not None
        bounds = [layout.shard_size * rank for rank in range(layout.world_size + 1)]
        return Packing.of(bounds, layout.size, exact, form)

    def summing(self, layout: FlatLayout, exact: Sequence[Span]) -> Packing:
        """Return how gradients are packed to be summed first."""
        form = self.compression.reduces
        assert form is not None
        sizes = [layout.shard_size] * layout.world_size
        if self.placement.whole_gradients:
            sizes = split_sizes(layout.padded_size, self.placement.world_size)
        return Packing.of(bounds_of(sizes), layout.size, exact, form)

    def spreading(self, layout: FlatLayout, exact: Sequence[Span], shard: int) -> Packing:
        """Return how the sum of a shard is packed; all numbers count from where that begins."""
        form = self.compression.reduces
        assert form is not None
        first = layout.shard_size * shard
        here = [(start - first, stop - first) for start, stop in exact]
        bounds = bounds_of(split_sizes(layout.shard_size, self.placement.replicas))
        return Packing.of(bounds, max(0, layout.size - first), here, form)

    def residual_sizes(self, layout: FlatLayout, rank: int) -> tuple[int, int, int, int]:
        """Return for how many elements a rank keeps what quantising gradients has left out.

        Of the full gradients, of this rank's part of the sum where that is quantised, too; and the
        same of the sum of a shard.
        """
        found = [0, 0, 0, 0]
        place, replica = self.placement, rank // self.placement.shards
        if self.compression.error_feedback and self.sums:
            mine = split_sizes(layout.padded_size, place.world_size)[rank]
            found[:2] = layout.padded_size, mine if place.whole_gradients else 0
        if self.compression.error_feedback and self.spreads:
            found[2:] = layout.shard_size, split_sizes(layout.shard_size, place.replicas)[replica]
        return found[0], found[1], found[2], found[3]

    def kept(self, units: Sequence[tuple[FlatLayout, Sequence[Span]]], rank: int) -> int:
        """Return the bytes that a rank keeps from step to step for what travels quantised.

        That is what quantising gradients has left out, and memory for the packed bytes of the
        largest of the units, which are given by their layouts and by what of them is exact; and
        what has been gathered of all of them, where it is kept.
        """
        replica, shard = divmod(rank, self.placement.shards)
        gathered, summed, spread = [], [], []
        kept = 0
        for layout, exact in units:
            if self.gathers:
                sent, came = self.gathering(layout, exact).gather_rooms(shard)
                gathered.append((sent, 0 if self.keeps else came))
                kept += came if self.keeps else 0
            if self.sums and self.placement.whole_gradients:
                summed.append(self.summing(layout, exact).reduce_rooms(rank))
            elif self.sums:
                summed.append(self.summing(layout, exact).scatter_rooms(shard))
            if self.spreads:
                spread.append(self.spreading(layout, exact, shard).reduce_rooms(replica))
        rooms = sum(sum(largest(each)) for each in (gathered, summed, spread))
        return (
            rooms
            + kept
            + _ITEM * sum(sum(self.residual_sizes(layout, rank)) for layout, _ in units)
        )

    def reductions(
        self, layout: FlatLayout, exact: Sequence[Span], rank: int
    ) -> list[GradientReduction]:
        """Return the collectives that sum a unit's gradients, sizes in bytes."""
        found = []
        replica, shard = divmod(rank, self.placement.shards)
        for each in self.placement.reductions(layout, rank):
            if self.placement.whole_gradients and self.sums:
                packing = self.summing(layout, exact)
                sent = packing.reduce_sends(rank)
            elif each.kind == "reduce_scatter" and self.sums:
                packing = self.summing(layout, exact)
                sent = packing.scatter_sends(shard)
            elif each.kind == "all_reduce" and self.spreads:
                packing = self.spreading(layout, exact, shard)
                sent = packing.reduce_sends(replica)
            else:
                found.append(each.in_bytes(_ITEM))
                continue
            found.append(each._replace(size=sum(packing.counts), padding=0, sent=sent))
        return found
