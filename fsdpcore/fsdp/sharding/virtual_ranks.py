"""``Leaves``: which virtual ranks each rank computes, and how their gradients are summed.

Pure: numbers only, no arrays and no communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from fsdpcore.core.buffers import split_sizes
from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.core.geometry.leaf_tree import LeafTree
from fsdpcore.fsdp.sharding.placement import GradientReduction, Placement

LEAF_BLOCK = 256
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

    def reductions(self, layout: FlatLayout) -> tuple[GradientReduction, ...]:
        """Return the collectives that sum a unit's gradients, as this rank sees them; in order.

        Where they are not summed as ever: a rank sends its sums of the others' parts to each of
        them, one node of the tree after the other, and where ranks keep the sum of a whole buffer,
        its part of that to all others of these. With k nodes in this rank's run, and K in that of
        its group, it sends for n elements::

            k (n - n / s) + K (n / s - n / p) + n / p (p / s - 1)     s shards on p ranks
            k (n - n / p) + n / p (p - 1)                             whole gradients
        """
        if self.direct:
            return self.placement.reductions(layout, self.rank)
        found: list[GradientReduction] = []
        for runs, place, size, padding in self._exchanges(layout):
            own, mine = split_sizes(size, len(runs))[place], len(self.tree.cover(runs[place]))
            for node in range(max(len(self.tree.cover(run)) for run in runs)):
                here = (size, padding, size - own) if node < mine else (0, 0, 0)
                found.append(GradientReduction("all_to_all_v", len(runs), *here))
        # The last ones of these have a part each of what all of them keep.
        if self.placement.replicas > 1 or self.placement.whole_gradients:
            sent = own * (len(runs) - 1)
            found.append(GradientReduction("all_gather_v", len(runs), size, padding, sent))
        return tuple(each for each in found if each.ranks > 1)

    def room(self, layout: FlatLayout) -> int:
        """Elements that this rank gets of others, all at once, for ``exchange_sums``."""
        if self.direct:
            return 0
        return sum(
            split_sizes(size, len(runs))[place] * sum(len(self.tree.cover(run)) for run in runs)
            for runs, place, size, _ in self._exchanges(layout)
            if len(runs) > 1
        )

    def _exchanges(self, layout: FlatLayout) -> Iterator[tuple[list[range], int, int, int]]:
        """Give those that go on one after the other: of which runs, and which is this rank's.

        Then the elements that are summed there, and how many of these are padding.
        """
        group = self.groups[self.group]
        yield group, self.rank % len(group), layout.padded_size, layout.padding
        if len(self.groups) > 1:
            size = layout.shard_size
            padding = size - layout.valid_size(self.rank % self.placement.shards)
            yield self.unions, self.group, size, padding
