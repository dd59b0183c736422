"""A tree apart from some of its leaves, to put others in their places, or find them in its like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.text import nearest
from fsdpcore.core.trees import branch, map_tree


class _Slot:
    """Where a leaf was; it has a number, and is no container."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Slot) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)

    def __repr__(self) -> str:
        return f"<leaf {self.number}>"


class Skeleton:
    """The containers of a tree, and those of its leaves that stay in their places.

    Two are equal if their containers are of the same kinds and the leaves that stay are equal, so
    that what was compiled for one serves the other.

    Args:
        tree: as of ``core.trees``.
        takes: tells which leaves are taken out; called with containers too, which are leaves then.

    Attributes:
        leaves: what was taken out, in order, until ``forget``.
        paths: the keys that lead to each of them.
    """

    def __init__(self, tree: Any, takes: Callable[[Any], bool]) -> None:
        self.leaves: list[Any] = []
        self.paths: list[tuple[Any, ...]] = []

        def take(path: tuple[Any, ...], leaf: Any) -> Any:
            if not takes(leaf):
                return leaf
            self.leaves.append(leaf)
            self.paths.append(path)
            return _Slot(len(self.paths) - 1)

        self._tree = map_tree(take, tree, is_leaf=takes)

    def forget(self) -> None:
        """Let go of the leaves that were taken out."""
        self.leaves = []

    def __len__(self) -> int:
        return len(self.paths)

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Return the tree with these leaves, as many as were taken out, in order."""
        return map_tree(
            lambda _, leaf: leaves[leaf.number] if isinstance(leaf, _Slot) else leaf, self._tree
        )

    def find(self, tree: Any, what: str) -> list[Any]:
        """Return what a tree like this one has where leaves were taken out.

        Args:
            tree: nested alike; None stands for any part of it, and keys of mappings may be missing.
            what: it is, for messages.

        Returns:
            As many as were taken out; None where there is nothing.

        Raises:
            ArgumentError: it is nested in another way.
        """
        found: list[Any] = [None] * len(self)
        _find(self._tree, tree, found, what, "")
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Skeleton) and _same(self._tree, other._tree)

    def __hash__(self) -> int:
        return hash(tuple(map(str, self.paths)))


def _find(mine: Any, other: Any, found: list[Any], what: str, where: str) -> None:
    if isinstance(mine, _Slot):
        found[mine.number] = other
        return
    own = branch(mine)
    if own is None or other is None:
        return
    theirs = branch(other)
    place = f" at {where[1:]}" if where else ""
    if theirs is None:
        raise ArgumentError(
            f"{what} is nested in another way than the parameters{place}: these are "
            f"{_kind(mine)} there, but it has {_kind(other)}"
        )
    places = dict(zip(own.keys, own.children, strict=True))
    for key, child in zip(theirs.keys, theirs.children, strict=True):
        if key not in places:
            raise ArgumentError(
                f"{what} is nested in another way than the parameters{place}: these have no "
                f"{key!r}{nearest(str(key), map(str, places))}"
            )
        _find(places[key], child, found, what, f"{where}.{key}")


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    mine, theirs = branch(one), branch(other)
    if mine is None or theirs is None:
        try:
            return mine is theirs and bool(one == other)
        except (TypeError, ValueError):  # of arrays, which are compared element by element
            return False
    if mine.keys != theirs.keys or mine.static != theirs.static:
        return False
    return all(map(_same, mine.children, theirs.children))
