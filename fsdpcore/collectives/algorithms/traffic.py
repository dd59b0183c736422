"""What the busiest rank does in recursive doubling and halving, for any number of ranks.

Where p is no power of two, the canonical tree is uneven and so is the traffic: the docstrings of
``doubling`` and ``halving`` define it rank by rank. What is wanted of it is the most that any rank
has to do, which takes a look at no more than lg p ranks.

The canonical tree is a row of perfect trees, one for each bit that is set in p: 13 = 8 + 4 + 1.
Each of them merges with all that stand behind it. Neither in such a merge nor within a perfect
tree does a rank send or keep more than one that stands before it on its side. So the first rank of
one of the perfect trees is the busiest of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

_CACHED = 1024


class Tree(NamedTuple):
    """One of the perfect trees.

    Attributes:
        first: its first rank.
        size, height: its ranks, and the binary logarithm of that.
        behind: how many ranks stand behind it, in the tree that it merges with.
    """

    first: int
    size: int
    height: int
    behind: int


def perfect_trees(p: int) -> Iterator[Tree]:
    """Cut the canonical tree of p ranks into perfect ones, largest first."""
    first = 0
    while first < p:
        height = (p - first).bit_length() - 1
        size = 1 << height
        yield Tree(first, size, height, p - first - size)
        first += size


def _targets(tree: Tree, rank: int) -> int:
    """To how many ranks of ``tree`` a rank behind it sends, when they merge."""
    place = rank - tree.first - tree.size
    return -((place - tree.size) // tree.behind)


@lru_cache(_CACHED)
def sent(p: int) -> int:
    """The most messages that a rank sends, in doubling and in halving."""
    most, before = 0, list[Tree]()
    for tree in perfect_trees(p):
        to_the_left = sum([_targets(other, tree.first) for other in before])
        most = max(most, to_the_left + tree.height + (tree.behind > 0))
        before.append(tree)
    return most


@lru_cache(_CACHED)
def sent_and_received(p: int) -> int:
    """The most messages that a rank sends and receives together."""
    most, before = 0, list[Tree]()
    for tree in perfect_trees(p):
        to_the_left = sum([_targets(other, tree.first) for other in before])
        both_ways = 2 * (tree.height + (tree.behind > 0))
        most = max(most, to_the_left + len(before) + both_ways)
        before.append(tree)
    return most


@lru_cache(_CACHED)
def chunks_spread(p: int) -> int:
    """The most chunks that a rank sends in an all_gather by doubling."""
    most, before = 0, list[Tree]()
    for tree in perfect_trees(p):
        to_the_left = sum([other.behind * _targets(other, tree.first) for other in before])
        to_the_right = tree.size if tree.behind else 0
        most = max(most, to_the_left + tree.size - 1 + to_the_right)
        before.append(tree)
    return most


@lru_cache(_CACHED)
def chunks_kept(p: int) -> int:
    """The most chunks that a rank receives, and reduces, in a reduce_scatter by halving.

    How many chunks a place keeps at a merge is a sum of steps, as it falls from place to place:
    ``kept[end]`` chunks at all places below ``end``. In the merge at the top each place keeps one.
    """
    most, merges, kept = 0, list[tuple[int, dict[int, int]]](), {p: 1}
    for first, size, height, behind in perfect_trees(p):
        arriving = sum(kept.values()) if behind else 0
        for start, steps in merges:
            arriving += sum([chunks for end, chunks in steps.items() if end > first - start])
        held = _modulo(kept, size)  # by the ranks of this tree, after that merge
        # At the merges within it, its first rank keeps what lies at multiples of 2, of 4, and so on
        # up to its size: so many of them are below ``end`` together.
        below = [
            chunks * (height + end - 1 - (end - 1).bit_count()) for end, chunks in held.items()
        ]
        most = max(most, arriving + sum(below))
        if behind:
            merges.append((first, kept))
            kept = _modulo(held, behind)
    return most


def _modulo(steps: dict[int, int], size: int) -> dict[int, int]:
    """Add up the values at all places that are equal modulo ``size``."""
    found = {size: 0}
    for end, value in steps.items():
        rounds, rest = divmod(end, size)
        found[size] += rounds * value
        if rest:
            found[rest] = found.get(rest, 0) + value
    return found


@lru_cache(_CACHED)
def bits_set(p: int) -> int:
    """How many bits are set in all numbers below p together."""
    return sum(
        tree.size * before + tree.size * tree.height // 2
        for before, tree in enumerate(perfect_trees(p))
    )
