"""Sums over virtual ranks: the gradients of leaves on one rank, and those of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fsdpcore.collectives import all_to_all_v
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array, split_sizes
from fsdpcore.core.geometry.leaf_tree import LeafTree

Add = Callable[[Array, Array], Array]
"""Adds the second array to the first, in place, and returns that."""


class LeafSums:
    """The gradients of one unit's leaves on this rank, added up as far as the tree goes.

    After n leaves at most ``log2(n) + 1`` arrays are held.

    Args:
        tree: over all leaves.
        first: this rank's first leaf.
        add: adds arrays, and frees the second one.
    """

    def __init__(self, tree: LeafTree, first: int, add: Add) -> None:
        self._tree = tree
        self._first = self._next = first
        self._add = add
        self._nodes: list[range] = []
        self._arrays: list[Array] = []

    @property
    def count(self) -> int:
        """How many leaves were added."""
        return self._next - self._first

    def push(self, flat: Array) -> None:
        """Add the gradients of the next leaf; the array is taken over."""
        leaf = range(self._next, self._next + 1)
        parts = [*zip(self._nodes, self._arrays, strict=True), (leaf, flat)]
        self._nodes, self._arrays = self._tree.fold(parts, self._add)
        self._next += 1

    def take(self) -> list[Array]:
        """Return the sums, which are the caller's from now on, and forget the leaves."""
        arrays, self._arrays, self._nodes = self._arrays, [], []
        self._next = self._first
        return arrays


def exchange_sums(
    tree: LeafTree,
    runs: Sequence[range],
    parts: Sequence[Array],
    backend: Backend,
    add: Add,
    take: Callable[[int], Array],
    label: str,
) -> list[Array]:
    """Give each rank of a group its chunk of the sums of all; a collective, which blocks.

    A rank sends each other rank that one's chunk of every sum that it has, and no more: sums of
    different ranks are added up at the receiver, as far as the tree goes.

    Args:
        tree: over all leaves.
        runs: the leaves of each rank of ``backend``; neighbours.
        parts: this rank's sums of the largest nodes in its run: flat, of equal size and dtype.
        backend: the group.
        add: see ``Add``.
        take: returns a flat array of so many elements, of the same memory never again.
        label: of the collectives.

    Returns:
        This rank's chunk, as ``split_sizes`` cuts an array, of the sums of the largest nodes in the
        runs together; views of what ``take`` returned, or ``parts`` where there is one rank.
    """
    if backend.world_size == 1:
        return list(parts)
    nodes = [tree.cover(run) for run in runs]
    chunks = split_sizes(parts[0].size, backend.world_size)
    own = chunks[backend.rank]
    arrived: list[tuple[range, Array]] = []
    for number in range(max(map(len, nodes))):
        senders = [rank for rank, each in enumerate(nodes) if len(each) > number]
        sending = number < len(parts)
        out = take(own * len(senders))
        all_to_all_v(
            parts[number] if sending else parts[0][:0],
            backend,
            chunks if sending else [0] * len(chunks),
            recv_counts=[own if rank in senders else 0 for rank in range(len(chunks))],
            out=out,
            label=label,
        )
        for place, rank in enumerate(senders):
            arrived.append((nodes[rank][number], out[place * own : (place + 1) * own]))
    arrived.sort(key=lambda part: part[0].start)
    return tree.fold(arrived, add)[1]
