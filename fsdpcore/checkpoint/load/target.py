"""What ``load`` was given: a tree of leaves, and the value that it returns in place of it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

from fsdpcore.checkpoint.format.nodes import (
    Node,
    Path,
    leaves,
    name_of,
    scalar_node,
    tag_of,
    what_is,
)
from fsdpcore.checkpoint.format.random_states import jumped
from fsdpcore.checkpoint.load.leaves import (
    ArrayLeaf,
    EngineLeaf,
    Fitted,
    GeneratorLeaf,
    KeyLeaf,
    Leaf,
    Missing,
    StatefulLeaf,
    Stored,
    ValueLeaf,
    array_leaf,
    built,
)
from fsdpcore.checkpoint.memory.shards import Shard
from fsdpcore.checkpoint.plan.contents import check_depth, check_key, check_root, own_path, shard_of
from fsdpcore.checkpoint.plan.describe import check_ranks, is_engine
from fsdpcore.checkpoint.plan.kinds import PerRank, kind_of
from fsdpcore.checkpoint.plan.stored_state import StoredState
from fsdpcore.comm.backend import Backend
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.text import listed
from fsdpcore.core.trees import Branch, branch

_AS_ONE = (list, tuple)
"""These are loaded as one value if all in them is plain: what was saved may be longer."""


class Planted(NamedTuple):
    """A container of the target.

    Attributes:
        value: the caller's.
        branch: what is in it.
        parts: the same, planted.
    """

    value: Any
    branch: Branch
    parts: tuple[Planted | Leaf, ...]


class Target:
    """All of it.

    Args:
        target: what ``load`` was given.
        backend: all ranks; on the device of which arrays may be.

    Raises:
        ArgumentError: something in it cannot be loaded.
    """

    def __init__(self, target: object, backend: Backend) -> None:
        check_root(target)
        self._root = _planted(target, (), backend)
        self.leaves = list(_leaves(self._root))

    @property
    def engines(self) -> list[EngineLeaf]:
        """Those of the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, EngineLeaf)]

    def open(self, stack: ExitStack, *, optimizer: bool) -> None:
        """Open all engines for writing until the exit of ``stack``; in which ranks may wait."""
        for leaf in self.engines:
            if leaf.engine is not None:
                leaf.open(stack.enter_context(leaf.engine.writing_state(optimizer=optimizer)))

    def arrays(self) -> dict[str, Shard]:
        """Return all arrays that are there already, by name.

        Raises:
            ArgumentError: two have the same name.
        """
        found: dict[str, Shard] = {}
        for leaf in self.leaves:
            for name, array in leaf.arrays.items():
                if name in found:
                    raise ArgumentError(f"two arrays of the target are called {name!r:.80}")
                found[name] = array
        return found

    @property
    def names(self) -> list[str]:
        """All names by which patterns choose."""
        return list(dict.fromkeys(name for leaf in self.leaves for name in leaf.names))

    @property
    def ties(self) -> dict[str, str]:
        """For tied parameters the names of their owners."""
        return {name: owner for leaf in self.engines for name, owner in leaf.ties.items()}

    def fit(self, stored: Stored, chosen: Collection[str]) -> list[Fitted]:
        """Fit each leaf that has a chosen name to a checkpoint, and leave the others alone."""
        found = []
        for leaf in self.leaves:
            if isinstance(leaf, EngineLeaf):
                found.append(leaf.fit_some(chosen))
            elif any(name in chosen for name in leaf.names):
                found.append(leaf.fit(stored))
            else:
                found.append(leaf.as_it_is())
        return found

    def result(self, fitted: Sequence[Fitted], missing: Missing) -> Any:
        """Take over what was read, and return what stands in place of the target."""
        return _grown(self._root, iter([each.finish(missing) for each in fitted]))


class PerRankLeaf(Leaf):
    """What each rank has of its own; see ``PerRank``."""

    value: PerRank

    def __init__(self, path: Path, value: PerRank, backend: Backend) -> None:
        super().__init__(path, value)
        self._rank = backend.rank
        self._own_path = own_path(path, backend.rank)
        self._inside = None if value.every else _planted(value.value, self._own_path, backend)
        for leaf in self._leaves():
            if isinstance(leaf, (EngineLeaf, PerRankLeaf)) or kind_of(leaf.value) == "shard":
                raise ArgumentError(
                    f"{self.name!r:.80} has a {type(leaf.value).__name__} inside of a PerRank, "
                    "where there can be none"
                )
            self.arrays |= leaf.arrays

    @property
    def names(self) -> list[str]:
        return [self.name, *self.arrays]

    def fit(self, stored: Stored) -> Fitted:
        for node in stored.state.find(self.path):
            if tag_of(node) != "per rank":
                raise ArgumentError(
                    f"{self.name!r:.80} {what_is(node)}, equal on all ranks; give it without "
                    "PerRank"
                )
            if self.value.every:
                return self._every(stored)
            found = self._node(stored.state.own)
            if found is None:
                return Fitted(lambda missing: self.value.default, used=(self.name,))
            return self._fit_own(found, stored)
        return self._missing()

    def _node(self, own: Sequence[Mapping[str, Node]]) -> list[Node] | None:
        """Return the node of what this rank goes on from, in a list; None for the default."""
        rank, saved = self._rank, len(own)
        if rank < saved and self.name in own[rank]:
            return [own[rank][self.name]]
        if self.value.has_default:
            return None
        advice = f"give it as PerRank(value, default=...), or load it on {saved} ranks"
        what = f"{self.name!r:.80} was saved by {saved} ranks, each its own, and rank {rank}"
        node: Node = own[rank % saved].get(self.name) if saved else None
        if tag_of(node) != "generator" or node[1] != "Generator":
            raise ArgumentError(f"{what} has none; {advice}")
        try:
            return [["generator", node[1], jumped(node[1], node[2], rank // saved)]]
        except ArgumentError as error:
            raise ArgumentError(f"{what} has none: it {error}; {advice}") from error

    def _fit_own(self, found: list[Node], stored: Stored) -> Fitted:
        (node,) = found
        for key in reversed(self._own_path):
            node = {str(key): node}
        here = replace(stored, state=StoredState(node, ()))
        fitted = [leaf.fit(here) for leaf in self._leaves()]
        self._check_all(here, fitted)
        inside = self._inside
        assert inside is not None

        def finish(missing: Missing) -> Any:
            return _grown(inside, iter([each.finish(missing) for each in fitted]))

        arrays = {name: array for each in fitted for name, array in each.arrays.items()}
        missing = tuple(itertools.chain.from_iterable(each.missing for each in fitted))
        return Fitted(finish, arrays, missing, (self.name,))

    def _check_all(self, stored: Stored, fitted: Sequence[Fitted]) -> None:
        """Raise if this rank has saved more than it loads."""
        there = {name_of(path) for path, _ in leaves(stored.state.node)}
        more = there.difference(*([*each.arrays, *each.used] for each in fitted))
        if more and stored.strict:
            raise ArgumentError(
                f"{self.name!r:.80} has more in the checkpoint, {listed(sorted(more))} "
                "(strict=False loads what fits)"
            )

    def _every(self, stored: Stored) -> Fitted:
        fitted = [
            built(each[self.name], own_path(self.path, rank), stored, lambda value: value, None)
            for rank, each in enumerate(stored.state.own)
            if self.name in each
        ]
        arrays = {name: array for each in fitted for name, array in each.arrays.items()}
        return Fitted(
            lambda missing: [each.finish(missing) for each in fitted], arrays, (), (self.name,)
        )

    def _leaves(self) -> list[Leaf]:
        return [] if self._inside is None else list(_leaves(self._inside))


def _planted(value: Any, path: Path, backend: Backend) -> Planted | Leaf:
    check_depth(path)
    kind = kind_of(value)
    if kind == "per rank":
        return PerRankLeaf(path, value, backend)
    if kind in ("engine", "state"):
        return _engine_leaf(value, path, backend)
    if kind == "shard":
        return ArrayLeaf(path, value, value)
    if kind == "array":
        return array_leaf(path, value, shard_of(value, name_of(path), backend.device))
    if kind == "key":
        return KeyLeaf(path, value)
    if kind == "generator":
        return GeneratorLeaf(path, value)
    if kind == "stateful":
        return StatefulLeaf(path, value)
    found = branch(value)
    if found is None:
        scalar_node(value, f"{name_of(path)!r:.80}")  # or it cannot be loaded
        return ValueLeaf(path, value)
    for key in found.keys:
        check_key(key, path)
    pairs = zip(found.keys, found.children, strict=True)
    parts = tuple(_planted(child, (*path, key), backend) for key, child in pairs)
    if path and type(value) in _AS_ONE and all(_is_value(part) for part in parts):
        return ValueLeaf(path, value)
    return Planted(value, found, parts)


def _is_value(part: Planted | Leaf) -> bool:
    """Whether it is a plain value, or a dict of them."""
    if isinstance(part, Planted):
        return type(part.value) is dict and all(map(_is_value, part.parts))
    return isinstance(part, ValueLeaf) and part.value is not None


def _engine_leaf(value: Any, path: Path, backend: Backend) -> EngineLeaf:
    if is_engine(value):
        check_ranks(value, backend)
        return EngineLeaf(path, value, value)
    leaf = EngineLeaf(path, value, None)
    leaf.open(value)
    return leaf


def _leaves(planted: Planted | Leaf) -> Iterator[Leaf]:
    if isinstance(planted, Leaf):
        yield planted
        return
    for part in planted.parts:
        yield from _leaves(part)


def _grown(planted: Planted | Leaf, values: Iterator[Any]) -> Any:
    """Return the value of a tree with others in place of its leaves; as ``map_tree`` would."""
    if isinstance(planted, Leaf):
        return next(values)
    new = [_grown(part, values) for part in planted.parts]
    old = planted.branch.children
    if all(one is other for one, other in zip(new, old, strict=True)):
        return planted.value
    return planted.branch.make(new)
