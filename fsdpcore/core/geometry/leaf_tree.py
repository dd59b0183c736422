"""``LeafTree``: the tree in which the shares of a batch are summed, whoever computes them.

The leaves are numbered, and combined as ranks are in the canonical order: (0,1), (2,3), ...; an
odd one out moves up unchanged. A node is the range of its leaves. A rank has a run of neighbouring
leaves; it can sum up the largest nodes that its run covers, and no more::

    leaves         0 1 2 3 4 5 6 7         ((0 1) (2 3)) ((4 5) (6 7))
    three ranks    0 1 2                   sums of (0 1) and (2)
                         3 4 5             sums of (3) and (4 5)
                               6 7         sum of (6 7)

Pure: numbers only. ``fold`` says in which order arrays are added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from fsdpcore.core.buffers import bounds_of, split_sizes

T = TypeVar("T")


@dataclass(frozen=True)
class LeafTree:
    """The tree over so many leaves."""

    leaves: int

    def runs(self, ranks: int) -> list[range]:
        """Return the leaves of each rank: equally many, or one more for the first ranks."""
        bounds = bounds_of(split_sizes(self.leaves, ranks))
        return [range(*pair) for pair in pairwise(bounds)]

    def is_node(self, leaves: range) -> bool:
        """Whether these leaves, of which there is at least one, are all those below a node."""
        width = _width(leaves)
        return leaves.start % width == 0 and leaves.stop == min(leaves.start + width, self.leaves)

    def are_children(self, left: range, right: range) -> bool:
        """Whether these nodes are the two children of one."""
        both = range(left.start, right.stop)
        return left.stop == right.start == both.start + _width(both) // 2 and self.is_node(both)

    def cover(self, run: range) -> list[range]:
        """Return the largest nodes that lie in a run of leaves, which together are the run."""
        return self.fold((range(leaf, leaf + 1), None) for leaf in run)[0]

    def fold(
        self, parts: Iterable[tuple[range, T]], add: Callable[[T, T], T] | None = None
    ) -> tuple[list[range], list[T]]:
        """Add up what neighbouring nodes have, as far as the tree goes.

        Args:
            parts: nodes with their values, in order, without a gap.
            add: returns the sum of two values, the one of lower leaves first.

        Returns:
            The largest nodes that the parts cover, and their values.
        """
        nodes: list[range] = []
        values: list[T] = []
        for node, value in parts:
            nodes.append(node)
            values.append(value)
            while len(nodes) > 1 and self.are_children(nodes[-2], nodes[-1]):
                right, last = nodes.pop(), values.pop()
                nodes[-1] = range(nodes[-1].start, right.stop)
                if add is not None:
                    values[-1] = add(values[-1], last)
        return nodes, values

    def joined(self, nodes: Sequence[range]) -> range | None:
        """Return the node that a reduction of one sum each, in the canonical order, ends at.

        None if one of them is no node, or the reduction adds up what are not two children of one.
        """
        if not all(map(self.is_node, nodes)):
            return None
        nodes = list(nodes)
        while len(nodes) > 1:
            pairs = list(zip(nodes[::2], nodes[1::2], strict=False))
            if not all(self.are_children(*pair) for pair in pairs):
                return None
            odd = nodes[-1:] if len(nodes) % 2 else []
            nodes = [range(left.start, right.stop) for left, right in pairs] + odd
        return nodes[0]


def _width(leaves: range) -> int:
    """Leaves below the lowest full node that has room for so many."""
    return 1 << (len(leaves) - 1).bit_length()
