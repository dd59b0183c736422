"""What a load goes into, leaf by leaf: arrays, generators, objects, plain values.

A leaf first says which arrays it has (``arrays``), before anything is read. It is fitted to a
checkpoint (``fit``): that checks all that can be checked, and changes nothing. When the arrays
are read it takes over the rest, and gives the value that stands in its place (``Fitted.finish``).
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fsdpcore.checkpoint.format import random_states
from fsdpcore.checkpoint.format.nodes import (
    Node,
    Path,
    arrays_in,
    check_makeable,
    children,
    is_plain,
    leaves,
    name_of,
    tag_of,
    value_of,
    what_is,
    wrapped_key,
)
from fsdpcore.checkpoint.format.strict_json import short
from fsdpcore.checkpoint.memory.shards import Shard
from fsdpcore.checkpoint.plan.catalog import Catalog
from fsdpcore.checkpoint.plan.contents import array_at, key_parts
from fsdpcore.checkpoint.plan.describe import StatefulEngine
from fsdpcore.checkpoint.plan.kinds import Stateful
from fsdpcore.checkpoint.plan.stored_state import StoredState
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.foreign import library_of
from fsdpcore.core.trees import branch
from fsdpcore.fsdp.state.state import EngineState, ShardedArray, is_residual, of_compression

Missing = Set[str]
"""Names of arrays that were not read, since nothing is stored for them."""


@dataclass(frozen=True)
class Stored:
    """What a leaf is fitted to.

    Attributes:
        state: of the checkpoint.
        catalog: of its arrays.
        strict: see ``load``.
    """

    state: StoredState
    catalog: Catalog
    strict: bool = True


@dataclass(frozen=True)
class Fitted:
    """How a leaf is loaded.

    Attributes:
        finish: takes over what was read, and returns the value.
        arrays: what is to be read.
        missing: names of entries of which nothing is stored.
        used: names of entries of the checkpoint that are.
    """

    finish: Callable[[Missing], Any]
    arrays: dict[str, Shard] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    used: tuple[str, ...] = ()


class Leaf(ABC):
    """One of them.

    Attributes:
        path: of the entry.
        value: what the caller gave.
        arrays: that are there already, and are filled; by name.
    """

    def __init__(self, path: Path, value: Any) -> None:
        self.path = path
        self.value = value
        self.name = name_of(path)
        self.arrays: dict[str, Shard] = {}

    @property
    def names(self) -> list[str]:
        """By which patterns choose it."""
        return [self.name]

    @abstractmethod
    def fit(self, stored: Stored) -> Fitted:
        """Find out how it is loaded.

        Raises:
            ArgumentError: something else was saved.
        """

    def as_it_is(self) -> Fitted:
        """Leave it alone."""
        return Fitted(lambda missing: self.value)

    def _refuse(self, node: Node) -> ArgumentError:
        return ArgumentError(
            f"{self.name!r:.80} {what_is(node)}, but what it is loaded into is a "
            f"{type(self.value).__name__}"
        )

    def _missing(self) -> Fitted:
        return Fitted(lambda missing: self.value, missing=(self.name,))


class EngineLeaf(Leaf):
    """An engine, opened for writing by ``open``; or what one's ``state_dict`` gave.

    Attributes:
        engine: None for a state.
        ties: for tied parameters the names of their owners, as arrays are called.
        was_partial: whether it was half overwritten before.
    """

    def __init__(self, path: Path, value: Any, engine: StatefulEngine | None) -> None:
        super().__init__(path, value)
        self.engine = engine
        self.ties: dict[str, str] = {}
        self.was_partial = False

    def open(self, state: EngineState) -> None:
        """Take the arrays that are written."""
        self.arrays = {array_at(self.path, name): shard for name, shard in state.items()}
        ties = state.info.get("ties") or {}
        self.ties = {array_at(self.path, a): array_at(self.path, b) for a, b in ties.items()}
        self.was_partial = self.engine is not None and self.engine.partially_updated

    @property
    def names(self) -> list[str]:
        return list(self.arrays)

    def fit(self, stored: Stored) -> Fitted:
        return self.fit_some(self.arrays)

    def fit_some(self, names: Collection[str]) -> Fitted:
        """Have the arrays of these names be read."""
        arrays = {name: array for name, array in self.arrays.items() if name in names}
        return Fitted(lambda missing: self.value, arrays)

    def forget(self, missing: Missing) -> None:
        """Clear what quantising has left out so far, where nothing of that is stored."""
        for name in filter(is_residual, missing & self.arrays.keys()):
            shard = self.arrays[name]
            assert isinstance(shard, ShardedArray), "engines have no others"
            for piece in shard.pieces:
                piece.array[...] = 0

    def finish(self, missing: Missing, *, whole: bool, info: Any) -> None:
        """Take over the number of steps and what else ``info`` has, if that is not None."""
        if self.engine is None:
            return
        if info is not None:
            self.engine.load_info(info)
        lacking = missing & self.arrays.keys()
        complete = whole and all(map(of_compression, lacking))
        self.engine.partially_updated = self.was_partial and not complete


class ArrayLeaf(Leaf):
    """An array: filled in place, or a new one in place of one that cannot be."""

    def __init__(
        self, path: Path, value: Any, shard: Shard, made: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(path, value)
        self.arrays = {self.name: shard}
        self._made = made  # from what was read to the value; None where that was filled

    def fit(self, stored: Stored) -> Fitted:
        for node in stored.state.find(self.path):
            if tag_of(node) == "scalar":
                return self._fit_number(node, value_of(node, self.path, {}))
        return Fitted(self._finish, self.arrays)

    def _fit_number(self, node: Node, number: Any) -> Fitted:
        """Fill an array of no axes with a number of NumPy."""
        array = self.arrays[self.name]
        if not isinstance(array, np.ndarray) or array.ndim or array.dtype != number.dtype:
            raise self._refuse(node)

        def finish(missing: Missing) -> Any:
            array[()] = number
            return self._finish(missing)

        return Fitted(finish, used=(self.name,))

    def _finish(self, missing: Missing) -> Any:
        if self._made is None or self.name in missing:
            return self.value
        return self._made(self.arrays[self.name])


class KeyLeaf(Leaf):
    """A typed key of JAX, for which there is a new one."""

    def __init__(self, path: Path, value: Any) -> None:
        super().__init__(path, value)
        self._implementation, numbers = key_parts(value)
        self.arrays = {self.name: np.array(numbers)}

    def fit(self, stored: Stored) -> Fitted:
        for node in stored.state.find(self.path):
            if tag_of(node) != "key":
                raise self._refuse(node)
            if node[1] != self._implementation:
                raise ArgumentError(
                    f"{self.name!r:.80} is a key of {self._implementation}, but what was saved is "
                    f"one of {short(node[1])}"
                )
            return Fitted(self._finish, self.arrays, used=(self.name,))
        return self._missing()

    def _finish(self, missing: Missing) -> Any:
        if self.name in missing:
            return self.value
        array: Any = self.arrays[self.name]
        return wrapped_key(self._implementation, array)


class GeneratorLeaf(Leaf):
    """A random generator, which goes on from the state that was saved."""

    def fit(self, stored: Stored) -> Fitted:
        for node in stored.state.find(self.path):
            if tag_of(node) != "generator":
                raise self._refuse(node)
            return self.fit_state(node)
        return self._missing()

    def fit_state(self, node: Node) -> Fitted:
        """Check that it can go on from a node."""
        _, kind, state = node
        try:
            random_states.check(self.value, kind, state)
        except ArgumentError as error:
            raise ArgumentError(f"{self.name!r:.80} {error}") from error

        def finish(missing: Missing) -> Any:
            random_states.set_state(self.value, state)
            return self.value

        return Fitted(finish, used=(self.name,))


class ValueLeaf(Leaf):
    """A plain value, in place of which comes what was saved; None takes anything.

    A list of plain values is one, too: the one that was saved may be longer.
    """

    def fit(self, stored: Stored) -> Fitted:
        for node in stored.state.find(self.path):
            one = branch(self.value) is None
            if isinstance(self.value, np.generic) and tag_of(node) == "array":
                return self._fit_array(node, stored.catalog)
            if self.value is not None and not (is_plain(node) and one == (children(node) is None)):
                raise self._refuse(node)
            return built(node, self.path, stored, lambda value: value, self.value)
        return self._missing()

    def _fit_array(self, node: Node, catalog: Catalog) -> Fitted:
        """Have the number be read that was saved as an array of no axes."""
        array = _new_arrays([self.name], catalog).get(self.name)
        if array is None or array.ndim:
            raise self._refuse(node)

        def finish(missing: Missing) -> Any:
            return self.value if self.name in missing else array[()]

        return Fitted(finish, {self.name: array}, used=(self.name,))


class StatefulLeaf(Leaf):
    """An object with ``load_state_dict``, which gets the state that was saved, made anew."""

    value: Stateful

    def fit(self, stored: Stored) -> Fitted:
        for node in stored.state.find(self.path):
            if tag_of(node) != "stateful":
                raise self._refuse(node)
            return built(node, self.path, stored, self._take, self.value)
        return self._missing()

    def _take(self, state: Any) -> Any:
        self.value.load_state_dict(state)
        return self.value


def built(
    node: Node, path: Path, stored: Stored, take: Callable[[Any], Any], otherwise: Any
) -> Fitted:
    """Return how the value of a node is made anew.

    Args:
        node: of what.
        path: where it stands.
        stored: what there is.
        take: gets the value, and returns what stands in its place.
        otherwise: stands there if arrays of it were not saved.
    """
    check_makeable(node, path)
    arrays = _new_arrays(arrays_in(node, path), stored.catalog)
    lacking = tuple(name for name in arrays_in(node, path) if name not in arrays)

    def finish(missing: Missing) -> Any:
        return otherwise if lacking else take(value_of(node, path, arrays))

    used = tuple(name_of(where) for where, _ in leaves(node, path))
    return Fitted(finish, dict(arrays), lacking, used)


def _new_arrays(names: Iterable[str], catalog: Catalog) -> dict[str, Array]:
    """Return new memory for the arrays that are stored."""
    found: dict[str, Array] = {}
    for name in names:
        number = catalog.number.get(name)
        if number is not None:
            tensor = catalog.tensors[number]
            found[name] = np.zeros(tensor.shape, tensor.dtype)
    return found


def array_leaf(path: Path, value: Any, shard: Any) -> ArrayLeaf:
    """Return the leaf of an array of any library.

    Args:
        path: of the entry.
        value: the array.
        shard: the same as ``contents.shard_of`` has it.
    """
    if value is shard:
        return ArrayLeaf(path, value, shard)
    jax: Any = sys.modules.get("jax")
    if isinstance(value, getattr(jax, "Array", ())):
        return ArrayLeaf(path, value, np.array(shard), lambda array: _jax_like(jax, value, array))
    if library_of(value) == "torch" and value.device.type != "cpu":
        torch: Any = sys.modules["torch"]
        return ArrayLeaf(path, value, shard, lambda array: value.copy_(torch.from_numpy(array)))
    return ArrayLeaf(path, value, shard)


def _jax_like(jax: Any, value: Any, array: Array) -> Any:
    """Return a new array of JAX, where and of the kind that another one is."""
    if value.weak_type and not value.ndim:
        weak = jax.numpy.asarray(array.item())
        if weak.dtype == value.dtype:
            return weak
    if value.committed:
        return jax.device_put(array, value.sharding)
    return jax.numpy.asarray(array)
