"""``Placement``: who keeps what, and what is moved for it; derived here and nowhere else.

Units, steps, offload, plans and estimates ask a placement. They never look at a strategy's name.

Pure: numbers only, no arrays and no communication.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fsdpcore.core.buffers import split_sizes
from fsdpcore.core.geometry.layout import FlatLayout


class Keep(enum.Enum):
    """How long the gathered parameters of a unit stay."""

    USE = "while it is used, in each pass anew"
    BACKWARD = "from the forward to the end of the backward pass"
    UPDATE = "until the update"


class GradientReduction(NamedTuple):
    """One collective that sums gradients of a unit, as one rank sees it; sizes in elements.

    Attributes:
        kind: the collective.
        ranks: that take part.
        size: of the buffer that is reduced.
        padding: how much of that is padding.
        sent: by this rank, with an algorithm that sends as little as possible.
    """

    kind: Literal["all_reduce", "reduce_scatter", "all_to_all_v", "all_gather_v"]
    ranks: int
    size: int
    padding: int
    sent: int

    def in_bytes(self, itemsize: int) -> GradientReduction:
        """Return it with sizes in bytes, for elements of so many."""
        size, padding, sent = (each * itemsize for each in self[2:])
        return self._replace(size=size, padding=padding, sent=sent)


@dataclass(frozen=True)
class Placement:
    """A strategy for a certain number of ranks.

    Every unit is a flat buffer of ``shards`` shards, and each rank updates one of them: the
    optimizer's state is that of this shard. The rest follows from the attributes.

    Attributes:
        shards: ranks that have different shards; neighbours.
        replicas: how many such groups there are.
        regather: ranks among which the backward pass gathers; ``shards``, or fewer where each rank
            keeps a larger part after the forward pass.
        keep: how long gathered parameters stay.
        whole_gradients: each rank keeps the reduced gradients of the whole buffer, not of its
            shard. Always so with one shard, which is the whole buffer.
    """

    shards: int
    replicas: int
    regather: int
    keep: Keep
    whole_gradients: bool = False

    def __post_init__(self) -> None:
        if self.shards == 1:
            object.__setattr__(self, "whole_gradients", True)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.shards * self.replicas

    # Parameters.

    @property
    def gathers(self) -> bool:
        """Whether ranks have different shards, so that there is anything to gather."""
        return self.shards > 1

    @property
    def whole_parameters(self) -> bool:
        """Whether each rank holds all parameters all the time; then an update makes them stale.

        In a window of a host, its ranks hold them together.
        """
        return self.keep is Keep.UPDATE or not self.gathers

    @property
    def keeps_for_backward(self) -> bool:
        """Whether what a forward pass gathered stays for the backward pass, and is freed then."""
        return self.keep is Keep.BACKWARD

    @property
    def keeps_part(self) -> bool:
        """Whether a larger part than the shard stays between the two passes."""
        return self.regather < self.shards

    # Gradients.

    @property
    def reduction(self) -> Literal["all_reduce", "reduce_scatter"]:
        """The collective that sums the gradients of a unit."""
        return "all_reduce" if self.whole_gradients else "reduce_scatter"

    @property
    def reduces_twice(self) -> bool:
        """Whether sums of shards are summed over the replicas, too."""
        return not self.whole_gradients and self.replicas > 1

    def reductions(self, layout: FlatLayout, rank: int) -> tuple[GradientReduction, ...]:
        """Return the collectives that sum a unit's gradients, in order; none for one rank alone."""
        kind, full, padding = self.reduction, layout.padded_size, layout.padding
        if kind == "all_reduce":
            sent = _all_reduce_sends(full, self.world_size, rank)
            found = [GradientReduction(kind, self.world_size, full, padding, sent)]
        else:
            size, (replica, shard) = layout.shard_size, divmod(rank, self.shards)
            found = [GradientReduction(kind, self.shards, full, padding, size * (self.shards - 1))]
            padding = size - layout.valid_size(shard)
            sent = _all_reduce_sends(size, self.replicas, replica)
            found.append(GradientReduction("all_reduce", self.replicas, size, padding, sent))
        return tuple(each for each in found if each.ranks > 1)


@dataclass(frozen=True)
class StorageKind:
    """Where the parameters of a unit are; a strategy, a window and offload make it.

    Attributes:
        keeps: all of them are within this rank's reach all the time, not its shard alone.
        takes_buffer: while they are used they are in a buffer of the pool.
        shared: the ranks of a host hold them together, in a window.
        moves: a rank gets from the others what they have written; in a window no bytes move.
    """

    keeps: bool
    takes_buffer: bool
    shared: bool
    moves: bool


def storage_kind(placement: Placement, *, windowed: bool, pinned: bool) -> StorageKind:
    """Return where parameters are.

    Args:
        placement: of the strategy.
        windowed: the ranks of a host have them in a window.
        pinned: the memory of the host has them, while a GPU computes.
    """
    keeps = windowed or placement.whole_parameters
    return StorageKind(
        keeps,
        takes_buffer=pinned or not keeps,
        shared=windowed,
        moves=placement.gathers and not windowed,
    )


def all_gather_sends(layout: FlatLayout, ranks: int) -> int:
    """Bytes that each rank sends so that so many have all of a flat buffer: its part, to others."""
    return layout.padded_size * layout.dtype.itemsize // ranks * (ranks - 1)


def _all_reduce_sends(size: int, ranks: int, rank: int) -> int:
    """Elements that a rank sends at least: its values for all others, then its sums to them."""
    own = split_sizes(size, ranks)[rank]
    return size - own + own * (ranks - 1)
