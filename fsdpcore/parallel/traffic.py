"""What tensor-parallel layers exchange, as a formula."""

from __future__ import annotations

from typing import NamedTuple


class PassTraffic(NamedTuple):
    """The collectives of one pass over a group, in order of their kinds.

    Attributes:
        all_reduce: elements of the array of each all_reduce.
        all_gather: elements of the joined array of each all_gather of values.
        reduce_scatter: elements of the summed array, all parts together, of each reduce_scatter.
    """

    all_reduce: tuple[int, ...] = ()
    all_gather: tuple[int, ...] = ()
    reduce_scatter: tuple[int, ...] = ()

    def sent(self, ranks: int, itemsize: int) -> int:
        """Return the bytes that all ranks together send, at the least.

        An all_gather of n bytes makes every rank have the (p - 1) / p that it has not, so p ranks
        send (p - 1) n; so does a reduce_scatter, and an all_reduce is both. That is reached by the
        algorithms that are chosen for long arrays (ring, direct, halving); those for short ones
        send more bytes in fewer messages.

        Args:
            ranks: of the group.
            itemsize: bytes of an element.
        """
        elements = 2 * sum(self.all_reduce) + sum(self.all_gather) + sum(self.reduce_scatter)
        return (ranks - 1) * elements * itemsize


class BlockTraffic(NamedTuple):
    """The collectives of both passes of a layer.

    Attributes:
        forward: those of the forward pass.
        backward: those of the backward pass.
    """

    forward: PassTraffic
    backward: PassTraffic

    def sent(self, ranks: int, itemsize: int) -> int:
        """Return the bytes that all ranks together send in both passes, at the least.

        Args:
            ranks: of the group.
            itemsize: bytes of an element.
        """
        return self.forward.sent(ranks, itemsize) + self.backward.sent(ranks, itemsize)
