"""Nested values: arrays in containers, as models pass them on.

What a container is says ``core/trees.py``. Where JAX computes, trees are JAX's own
(``jax.tree_util``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from fsdpcore.core.array_module import address, array_module
from fsdpcore.core.buffers import Array
from fsdpcore.core.trees import branch, map_tree


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a nested value with ``function`` of all leaves, which is called in their order.

    A container whose items stay the same objects is returned itself. Others are made anew, of their
    class and with the attributes of the object; a mapping that is no dict becomes one.
    """
    return map_tree(lambda _, leaf: function(leaf), tree)


def leaves(tree: Any, depth: int | None = None) -> Iterator[Any]:
    """Yield the leaves of a nested value, in the order of ``map_leaves``.

    Args:
        tree: the value.
        depth: what is in more containers than that is left out; None for no such limit.
    """
    found = branch(tree)
    if found is None:
        yield tree
    elif depth != 0:
        below = None if depth is None else depth - 1
        for item in found.children:
            yield from leaves(item, below)


def is_array(leaf: Any) -> bool:
    """Whether it is an array of NumPy or CuPy."""
    return array_module(leaf) is not None


def without_none(tree: Any) -> Any:
    """Leave out of dicts, and of dicts in them, what is None; all else comes back as it is."""
    if not isinstance(tree, dict):
        return tree
    return {key: without_none(value) for key, value in tree.items() if value is not None}


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
