"""``Leaves``: which virtual ranks each rank computes, and how their gradients are summed.

Pure: numbers only, no arrays and no communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fsdpcore.core.buffers import split_sizes
from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.core.geometry.leaf_tree import LeafTree
from fsdpcore.fsdp.sharding.placement import Placement

LEAF_BLOCK = 1024
"""Elements: shards begin at multiples of it, where norms must not depend on who has which shard."""


@dataclass(frozen=True)
class Leaves:
    """The virtual ranks of an engine, dealt to its ranks.

    Attributes:
        tree: over all of them.
        placement: of the ranks.
        rank: this one, in the group of all ranks.
        virtual: the user has asked for them; else each rank is its own leaf, and its sums are
            those of its group, then of the groups.
    """

    tree: LeafTree
    placement: Placement
    rank: int
    virtual: bool

    @cached_property
    def runs(self) -> list[range]:
        """The leaves of each rank."""
        return self.tree.runs(self.placement.world_size)

    @property
    def mine(self) -> range:
        """The leaves of this rank."""
        return self.runs[self.rank]

    @cached_property
    def rounds(self) -> int:
        """How many leaves the ranks have at most."""
        return max(map(len, self.runs))

    @cached_property
    def groups(self) -> list[list[range]]:
        """The leaves of the ranks that sum first, by group; they are neighbours."""
        placement = self.placement
        count = placement.world_size if placement.whole_gradients else placement.shards
        return [self.runs[at : at + count] for at in range(0, len(self.runs), count)]

    @cached_property
    def unions(self) -> list[range]:
        """The leaves of each such group together."""
        return [range(group[0].start, group[-1].stop) for group in self.groups]

    @property
    def group(self) -> int:
        """Which of the groups this rank is in."""
        return self.rank // len(self.groups[0])

    @cached_property
    def direct(self) -> bool:
        """Whether the ranks' sums, reduced over the ranks as ever, give what the tree gives.

        So it is where both numbers are powers of two. No byte more is sent then.
        """
        if not self.virtual:
            return True
        tree = self.tree
        joined = [tree.joined(group) for group in self.groups]
        return all(joined) and tree.joined(self.unions) is not None

    def sends(self, layout: FlatLayout) -> int:
        """Elements of a unit's gradients that this rank sends so that they are summed.

        Where they are not summed as ever: its sums of the others' parts to each of them, and where
        ranks keep the sum of a whole buffer, its part of that to all others of these. With k nodes
        of the tree in this rank's run, and K in that of its group, that is::

            k (n - n / s) + K (n / s - n / p) + n / p (p / s - 1)     s shards on p ranks
            k (n - n / p) + n / p (p - 1)                             whole gradients
        """
        if self.direct:
            return sum(each.sent for each in self.placement.reductions(layout, self.rank))
        size, ranks = layout.padded_size, self.placement.world_size
        nodes = len(self.tree.cover(self.mine))
        if self.placement.whole_gradients:
            part = split_sizes(size, ranks)[self.rank]
            return nodes * (size - part) + part * (ranks - 1)
        shard, replicas = layout.shard_size, self.placement.replicas
        part = split_sizes(shard, replicas)[self.group]
        sent = nodes * (size - shard)
        if replicas > 1:
            union = len(self.tree.cover(self.unions[self.group]))
            sent += union * (shard - part) + part * (replicas - 1)
        return sent
