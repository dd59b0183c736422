"""A state taken apart for a save: arrays by name, and nodes for all else."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fsdpcore.checkpoint.format import random_states
from fsdpcore.checkpoint.format.nodes import PER_RANK, Node, Path, name_of, scalar_node, tag_of
from fsdpcore.checkpoint.format.strict_json import check_text, encode
from fsdpcore.checkpoint.memory.shards import Shard
from fsdpcore.checkpoint.plan.describe import check_ranks, is_engine
from fsdpcore.checkpoint.plan.kinds import PerRank, Stateful, kind_of
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.device import Device
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.foreign import as_numpy, is_foreign, library_of
from fsdpcore.core.trees import branch
from fsdpcore.fsdp.state.state import OPTIMIZER_PREFIX, optimizer_name

MAX_SHARED_BYTES = 16 << 20
"""Of the nodes of a state, as JSON."""

MAX_OWN_BYTES = 1 << 20
"""Of those that a rank has of its own: the metadata has them of all ranks."""

_MAX_PATH = 20  # a container may take three levels of JSON


@dataclass
class Contents:
    """What this rank has to save.

    Attributes:
        arrays: by name.
        alike: names of those that all ranks have the same, whole.
        node: of the state; None where the arrays, by their names, are all there is to it.
        own: nodes of what each rank has of its own, by name.
        engines: what each engine remembers, by the name of its entry.
    """

    arrays: dict[str, Shard] = field(default_factory=dict)
    alike: list[str] = field(default_factory=list)
    node: Node = None
    own: dict[str, Node] = field(default_factory=dict)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def info(self) -> dict[str, Any]:
        """What the metadata says of the state, but for the ranks' own.

        An engine alone is what ``EngineState.info`` is.
        """
        if self.node is None:
            return dict(self.engines.get("", {}))
        return {"state": self.node}


def contents_of(state: object, backend: Backend) -> Contents:
    """Take apart what ``save`` was given.

    Args:
        state: an engine, an object with a state, or a mapping; see ``save``.
        backend: all ranks that save; on the device of which arrays may be.

    Raises:
        ArgumentError: it is none, or something in it cannot be saved.
    """
    check_root(state)
    found = Contents()
    taking = _Taker(found, backend)
    node = taking.taken(state, ())
    if not _is_told_by_arrays(node):
        found.node = node
        check_size(node, MAX_SHARED_BYTES, "the values of a state")
        check_size(found.own, MAX_OWN_BYTES, "the values that are a rank's own")
    return found


def check_root(state: object) -> None:
    """Raise ArgumentError unless something can be all of a state."""
    if not isinstance(state, Mapping):
        if kind_of(state) not in ("engine", "stateful"):
            raise ArgumentError(
                "a state is an engine, or a mapping from names to engines, arrays, ShardedArray, "
                f"BoxShard and other values; got {type(state).__name__}"
            )
        return
    for name in state:
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"the name of an entry is a non-empty string, got {name!r:.80}")
        check_text(name, "the name of an entry")


def _is_told_by_arrays(node: Node) -> bool:
    """Whether it is that of an engine, or of a mapping from names to arrays, which need none."""
    tag = tag_of(node)
    return tag == "engine" or (
        tag == "dict" and all(tag_of(each) == "array" for each in node.values())
    )


def check_size(node: Node, limit: int, what: str) -> None:
    """Raise ArgumentError for more than belongs into the metadata."""
    nbytes = len(encode(node).encode())
    if nbytes > limit:
        raise ArgumentError(
            f"{what} take {nbytes} bytes of JSON, more than {limit}: make arrays of long lists"
        )


def array_at(path: Path, name: str) -> str:
    """Return what an engine's array is called where the engine is an entry of a state.

    The arrays of all optimizers have one prefix, by which they are told from parameters.
    """
    if not path:
        return name
    if not name.startswith(OPTIMIZER_PREFIX):
        return f"{name_of(path)}/{name}"
    kind, _, param = name.removeprefix(OPTIMIZER_PREFIX).partition("/")
    return optimizer_name(kind, f"{name_of(path)}/{param}")


def shard_of(value: Any, name: str, device: Device) -> Any:
    """Return an array of any library as one that can be saved: where it is, or on the host."""
    if isinstance(value, np.ndarray) or device.owns(value) or not is_foreign(value):
        return value
    if library_of(value) == "torch":
        value = value.detach().cpu()
    elif hasattr(value, "__cuda_array_interface__") and library_of(value) != "jax":
        return value  # of another device, which is refused by its name
    return as_numpy(value, repr(name))


def key_parts(key: Any) -> tuple[str, Array]:
    """Return of a typed key of JAX the name of its implementation, and its numbers."""
    random: Any = sys.modules["jax"].random
    return str(random.key_impl(key)), np.asarray(random.key_data(key))


def check_depth(path: Path) -> None:
    """Raise ArgumentError for what the metadata cannot nest so deep."""
    if len(path) > _MAX_PATH:
        raise ArgumentError(f"{name_of(path)!r:.80} is nested too deep, or contains itself")


def check_key(key: object, path: Path) -> None:
    """Raise ArgumentError unless something can be a key on the way to a value."""
    if type(key) not in (str, int) or key == "":
        raise ArgumentError(
            f"{name_of(path)!r:.80} has the key {key!r:.80}; keys are integers, or strings that "
            "are not empty"
        )
    if type(key) is str:
        check_text(key, f"a key of {name_of(path)!r:.80}")


class _Taker:
    """Takes values apart.

    Args:
        found: where what is in them goes.
        backend: all ranks.
    """

    def __init__(self, found: Contents, backend: Backend) -> None:
        self._found = found
        self._backend = backend
        self._inside = ""  # of what: a PerRank, or an object's state
        self._refused: tuple[str, ...] = ("engine", "state", "shard", "per rank")  # there
        self._shared = True  # not a rank's own
        self._names: set[str] = set()  # by which load finds what is in containers

    def taken(self, value: Any, path: Path) -> Node:
        """Return the node of a value."""
        check_depth(path)
        kind = kind_of(value)
        if self._inside and kind in self._refused:
            raise self._refusal(value, path)
        if kind in ("engine", "state"):
            return self.engine(value, path)
        if kind == "per rank":
            return self._own(value, path)
        if kind == "stateful":
            return self._stateful(value, path)
        if kind == "generator":
            return ["generator", random_states.kind_of(value), random_states.state_of(value)]
        if kind == "shard":
            self._add(path, value)
            return ["array", "shard"]
        if kind == "key":
            implementation, numbers = key_parts(value)
            self._add(path, numbers, alike=True)
            return ["key", implementation]
        if kind == "array":
            self._add(path, shard_of(value, name_of(path), self._backend.device), alike=True)
            library = library_of(value)
            return ["array", library if library in ("jax", "torch") else "numpy"]
        return self._container(value, path)

    def _refusal(self, value: Any, path: Path) -> ArgumentError:
        return ArgumentError(
            f"{name_of(path)!r:.80} is a {type(value).__name__} inside of {self._inside}, "
            "where there can be none"
        )

    def _container(self, value: Any, path: Path) -> Node:
        found = branch(value)
        if found is None:
            return scalar_node(value, f"{name_of(path)!r:.80}")
        nodes = []
        for key, child in zip(found.keys, found.children, strict=True):
            check_key(key, path)
            nodes.append((key, self.taken(child, self._new_path(path, key))))
        if found.kind in ("list", "tuple"):
            return [found.kind, *(node for _, node in nodes)]
        if found.kind == "object":
            if "stateful" in self._refused:
                raise self._refusal(value, path)
            return ["object", {str(key): node for key, node in nodes}]
        if all(type(key) is str for key, _ in nodes):
            return dict(nodes)
        return ["map", [[key, node] for key, node in nodes]]

    def _new_path(self, path: Path, key: Any) -> Path:
        """Return the path of an entry; refuse one that another has by other keys."""
        path = (*path, key)
        name = name_of(path)
        if name in self._names:
            raise ArgumentError(f"two entries of the state would be called {name!r:.80}")
        self._names.add(name)
        return path

    def engine(self, value: Any, path: Path) -> Node:
        """Take an engine, or what its ``state_dict`` gave."""
        state = value
        if is_engine(value):
            check_ranks(value, self._backend)
            state = value.state_dict()
        for name, shard in state.items():
            self._put(array_at(path, name), shard)
        self._found.engines[name_of(path)] = dict(state.info)
        return ["engine", dict(state.info)]

    def _own(self, value: PerRank, path: Path) -> Node:
        if value.every:
            raise ArgumentError(
                f"{name_of(path)!r:.80} is PerRank(every=True), which only load takes"
            )
        self._inside, self._shared = "a PerRank", False
        self._found.own[name_of(path)] = self.taken(value.value, own_path(path, self._backend.rank))
        self._inside, self._shared = "", True
        return PER_RANK

    def _stateful(self, value: Stateful, path: Path) -> Node:
        outer = self._inside, self._refused
        # What stands in it is built anew by load, so that no object may be in it.
        self._inside = f"what state_dict of a {type(value).__name__} gave"
        self._refused = (*self._refused, "stateful")
        node = ["stateful", self.taken(value.state_dict(), path)]
        self._inside, self._refused = outer
        return node

    def _add(self, path: Path, shard: Any, *, alike: bool = False) -> None:
        name = name_of(path)
        self._put(name, shard)
        if alike and self._shared:
            self._found.alike.append(name)

    def _put(self, name: str, shard: Any) -> None:
        if name in self._found.arrays:
            raise ArgumentError(f"two arrays of the state would be called {name!r:.80}")
        self._found.arrays[name] = shard


def own_path(path: Path, rank: int) -> Path:
    """Return the path of what a rank has of its own, where its arrays are stored."""
    return (*path, f"rank_{rank}")
