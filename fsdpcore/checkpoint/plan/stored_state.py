"""What a checkpoint has of a state, beside the arrays: nodes, whichever version wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsdpcore.checkpoint.format.metadata import Metadata
from fsdpcore.checkpoint.format.nodes import (
    Node,
    Path,
    arrays_in,
    check_node,
    child,
    leaves,
    name_of,
    tag_of,
)
from fsdpcore.checkpoint.plan.contents import array_at, own_path
from fsdpcore.core.errors import CorruptCheckpointError


@dataclass(frozen=True)
class StoredState:
    """Nodes of a state.

    Attributes:
        node: of all of it.
        own: for each rank that saved, what it had of its own, by name.
    """

    node: Node
    own: tuple[Mapping[str, Node], ...]

    @classmethod
    def of(cls, metadata: Metadata) -> StoredState:
        """Read what the metadata says.

        Where it says nothing of a state, that was an engine, or a mapping from names to arrays.

        Raises:
            CorruptCheckpointError: it makes no sense.
        """
        info = metadata.info
        if "state" not in info:
            if info:
                return cls(["engine", info], ())
            return cls({name: ["array", "numpy"] for name in metadata.tensors}, ())
        check_node(info["state"], "info")
        own = info.get("per_rank", [])
        if type(own) is not list or not all(type(each) is dict for each in own):
            raise CorruptCheckpointError("what the ranks have of their own is no list of objects")
        for each in own:
            check_node(each, "what a rank has of its own")
        return cls(info["state"], tuple(own))

    def find(self, path: Path) -> tuple[Node, ...]:
        """Return what is at a path, in a tuple; an empty one if there is nothing."""
        return found_in(self.node, path)

    @property
    def engines(self) -> dict[str, dict[str, Any]]:
        """What each engine remembers, by the name of its entry; "" for an engine alone."""
        return {
            name_of(path): node[1] for path, node in leaves(self.node) if tag_of(node) == "engine"
        }

    @property
    def ties(self) -> dict[str, str]:
        """Of tied parameters the names of their owners, as arrays are called."""
        found: dict[str, str] = {}
        for path, node in leaves(self.node):
            ties = node[1].get("ties") if tag_of(node) == "engine" else None
            for name, owner in ties.items() if isinstance(ties, dict) else ():
                found[array_at(path, name)] = array_at(path, str(owner))
        return found

    def values(self) -> Iterator[tuple[str, set[str]]]:
        """Give the names of all entries that are not just arrays, with those of their arrays."""
        for path, node in leaves(self.node):
            name, tag = name_of(path), tag_of(node)
            if tag == "per rank":
                yield (
                    name,
                    {
                        array
                        for rank, each in enumerate(self.own)
                        if name in each
                        for array in arrays_in(each[name], own_path(path, rank))
                    },
                )
            elif tag not in ("array", "engine"):
                yield name, set(arrays_in(node, path))


def found_in(node: Node, path: Path) -> tuple[Node, ...]:
    """Return what is at a path below a node, in a tuple; an empty one if there is nothing."""
    for key in path:
        below = child(node, key)
        if not below:
            return ()
        (node,) = below
    return (node,)
