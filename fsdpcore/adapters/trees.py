"""Nested values: arrays in tuples, lists and mappings, as models pass them on.

Tuples, lists, dicts and other mappings are gone into, and so is what is derived from them, such as
named tuples; all else is a leaf. Where JAX computes, trees are JAX's own (``jax.tree_util``): it
knows what kinds of containers its users have registered.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from fsdpcore.core.array_module import address, array_module
from fsdpcore.core.buffers import Array


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a nested value with ``function`` of all leaves, which is called in their order.

    A container whose items stay the same objects is returned itself. Others are made anew, of their
    class and with the attributes of the object; a mapping that is no dict becomes one.
    """
    if isinstance(tree, Mapping):
        items = dict(tree.items())
        found = {key: map_leaves(function, item) for key, item in items.items()}
        if all(found[key] is item for key, item in items.items()):
            return tree
        return _mapping_like(tree, found)
    if isinstance(tree, (tuple, list)):
        parts = [map_leaves(function, item) for item in tree]
        if all(part is item for part, item in zip(parts, tree, strict=True)):
            return tree
        return _sequence_like(tree, parts)
    return function(tree)


def leaves(tree: Any, depth: int | None = None) -> Iterator[Any]:
    """Yield the leaves of a nested value, in the order of ``map_leaves``.

    Args:
        tree: the value.
        depth: what is in more containers than that is left out; None for no such limit.
    """
    if not isinstance(tree, (Mapping, tuple, list)):
        yield tree
    elif depth != 0:
        below = None if depth is None else depth - 1
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from leaves(item, below)


def detached_from(tree: Any, lent: Iterable[Array]) -> Any:
    """Return a nested value with copies of the arrays that lie in memory which is only lent.

    Gathered parameters lie in memory that is soon something else's; nothing that outlives a pass
    may lie there.

    Args:
        tree: arrays in it are those of NumPy and CuPy; all else is left as it is.
        lent: such arrays, of one device, whose memory is taken back.
    """
    arrays = list(lent)
    roots = {id(_root(array)) for array in arrays}

    def apart(leaf: Any) -> Any:
        return leaf if _has_own(leaf, roots) or not overlaps(leaf, arrays) else leaf.copy()

    return map_leaves(apart, tree)


def may_lie_in(tree: Any, lent: Iterable[Array]) -> list[Any]:
    """Return the leaves that may lie in such memory, by a look that costs little."""
    roots = {id(_root(array)) for array in lent}
    return [leaf for leaf in leaves(tree) if not _has_own(leaf, roots)]


def _root(array: Array) -> Any:
    return array if array.base is None else array.base


def _has_own(leaf: Any, roots: set[int]) -> bool:
    """Whether it is a NumPy array of memory that belongs to another one than ``roots``."""
    if not isinstance(leaf, np.ndarray):
        return False
    root = _root(leaf)
    return isinstance(root, np.ndarray) and root.base is None and id(root) not in roots


def lies_in(leaf: Any, array: Array) -> bool:
    """Whether something is an array that may share memory with another one.

    Also a tensor of PyTorch on the same device, as far as it begins there.
    """
    pointer = getattr(leaf, "data_ptr", None)
    if pointer is not None:
        return array.nbytes > 0 and 0 <= pointer() - address(array) < array.nbytes
    return overlaps(leaf, (array,))


def overlaps(leaf: Any, arrays: Iterable[Array]) -> bool:
    """Whether something is an array that may share memory with one of ``arrays``."""
    module = array_module(leaf)
    return module is not None and any(
        module.may_share_memory(leaf, array) for array in arrays if array_module(array) is module
    )


def _mapping_like(tree: Mapping[Any, Any], found: dict[Any, Any]) -> dict[Any, Any]:
    if type(tree) is dict or not isinstance(tree, dict):
        return found
    made = copy.copy(tree)
    for key, item in found.items():
        made[key] = item
    return made


def _sequence_like(tree: tuple[Any, ...] | list[Any], parts: list[Any]) -> Any:
    if isinstance(tree, list):
        if type(tree) is list:
            return parts
        rows = copy.copy(tree)
        rows[:] = parts
        return rows
    kind: Any = type(tree)
    try:
        # Past the class's own __new__, which may take other arguments, as that of a named tuple.
        made: Any = tuple.__new__(kind, parts)
    except TypeError:  # a structure that is made in C, such as torch.return_types.max
        return kind(parts)
    if hasattr(tree, "__dict__"):
        vars(made).update(vars(tree))
    return made
