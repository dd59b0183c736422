"""Trees: values nested in containers, looked at one container at a time.

Containers are mappings, lists, tuples (named ones too), dataclasses, and, once JAX is imported,
what its registry knows (``jax.tree_util``). All else is a leaf, None too. JAX is never imported
here: who has registered something has imported it.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

Kind = Literal["dict", "list", "tuple", "object"]
"""What a container is, once the names of classes are left out."""


class Branch(NamedTuple):
    """A container.

    Attributes:
        kind: what it is; "object" for what has its children by names: dataclasses, named tuples,
            what JAX knows.
        keys: of the children: keys of a mapping, positions in a sequence, names of fields.
        children: what is in it.
        make: makes such a container with other children, as many of them. It leaves this one as it
            is.
        static: what else is in it, to be compared; for instance sizes that a module was made with.
    """

    kind: Kind
    keys: tuple[Any, ...]
    children: tuple[Any, ...]
    make: Callable[[Sequence[Any]], Any]
    static: Any = None


def branch(value: object) -> Branch | None:
    """Return what is in a container; None for a leaf."""
    if isinstance(value, Mapping):
        if not isinstance(value, dict):  # of a kind that stays, such as Flax's FrozenDict
            known = _registered(value)
            if known is not None:
                return known._replace(kind="dict")
        keys = tuple(value)
        children = tuple(value[key] for key in keys)
        return Branch("dict", keys, children, lambda new: _mapping(value, keys, new))
    if isinstance(value, list):
        return Branch("list", tuple(range(len(value))), tuple(value), lambda new: _list(value, new))
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        kind: Kind = "tuple" if names is None else "object"
        keys = tuple(range(len(value))) if names is None else names
        return Branch(kind, keys, tuple(value), lambda new: _tuple(value, new))
    if isinstance(value, type):
        return None
    return _registered(value) or _dataclass(value)


def map_tree(
    function: Callable[[tuple[Any, ...], Any], Any],
    tree: Any,
    path: tuple[Any, ...] = (),
    *,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Return a tree with ``function(path, leaf)`` in place of each leaf, called in their order.

    A container whose children stay the same objects is returned itself. Others are made anew.

    Args:
        function: called with the keys that lead to a leaf, and with the leaf.
        tree: the value.
        path: the keys that lead to it.
        is_leaf: tells which containers are leaves.
    """
    found = None if is_leaf is not None and is_leaf(tree) else branch(tree)
    if found is None:
        return function(path, tree)
    pairs = zip(found.keys, found.children, strict=True)
    new = [map_tree(function, child, (*path, key), is_leaf=is_leaf) for key, child in pairs]
    if all(one is other for one, other in zip(new, found.children, strict=True)):
        return tree
    return found.make(new)


def _mapping(value: Mapping[Any, Any], keys: Sequence[Any], new: Sequence[Any]) -> Any:
    items = dict(zip(keys, new, strict=True))
    if type(value) is dict or not isinstance(value, dict):
        return items
    made = copy.copy(value)  # which keeps the attributes of a class derived from dict
    for key, item in items.items():  # the update of a Counter adds
        made[key] = item
    return made


def _list(value: list[Any], new: Sequence[Any]) -> Any:
    if type(value) is list:
        return list(new)
    made = copy.copy(value)
    made[:] = new
    return made


def _tuple(value: tuple[Any, ...], new: Sequence[Any]) -> Any:
    kind: Any = type(value)
    try:
        # Past the class's own __new__, which may take other arguments, as that of a named tuple.
        made: Any = tuple.__new__(kind, new)
    except TypeError:  # a structure that is made in C, such as torch.return_types.max
        return kind(new)
    if hasattr(value, "__dict__"):
        vars(made).update(vars(value))
    return made


def _dataclass(value: Any) -> Branch | None:
    if not dataclasses.is_dataclass(value):
        return None
    names = tuple(each.name for each in dataclasses.fields(value))
    children = tuple(getattr(value, name) for name in names)

    def make(new: Sequence[Any]) -> Any:
        made = copy.copy(value)  # past __init__, which may take other arguments, or do more
        for name, child in zip(names, new, strict=True):
            object.__setattr__(made, name, child)
        return made

    return Branch("object", names, children, make)


def _registered(value: Any) -> Branch | None:
    """Return what is in a container of a class that JAX's users have registered."""
    jax: Any = sys.modules.get("jax")
    if jax is None or not hasattr(jax, "tree_util"):
        return None
    util = jax.tree_util

    def below(each: Any) -> bool:
        return each is not value

    # A leaf is cheap to tell; with the paths it takes more.
    if util.all_leaves([value], is_leaf=lambda each: each is None):
        return None
    pairs, definition = util.tree_flatten_with_path(value, is_leaf=below)
    keys = tuple(_key(path[0]) for path, _ in pairs)
    children = tuple(child for _, child in pairs)
    return Branch("object", keys, children, definition.unflatten, definition)


def _key(entry: Any) -> Any:
    """Return the key in what JAX says of a step into a container."""
    for name in ("name", "key", "idx"):
        if hasattr(entry, name):
            return getattr(entry, name)
    return str(entry)
