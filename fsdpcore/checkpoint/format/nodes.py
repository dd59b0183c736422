"""Nodes: what a checkpoint says of values that are not just arrays by name, as JSON.

A node is one of these; what stands in a list begins with a word::

    null, true, 3, 0.5, "text"      itself
    {"key": node, ...}              a dict with keys of text
    ["list", node, ...]             a list
    ["tuple", node, ...]            a tuple
    ["map", [[key, node], ...]]     a dict with other keys: integers
    ["object", {"name": node, ...}] a dataclass, a named tuple, what JAX's users have registered
    ["int", "0x1f..."]              an integer that JSON does not carry
    ["float", "nan"]                nan, inf, -inf
    ["scalar", "float32", "0000803f"]  a number of NumPy: its dtype, its bytes, the lowest first
    ["array", library]              an array: numpy, jax, torch, shard, and scalar of old
    ["key", implementation]         a typed key of JAX, its numbers as an array
    ["generator", kind, state]      a random generator, see ``random_states``
    ["engine", info]                an engine, its arrays by their names
    ["stateful", node]              an object with load_state_dict, and what its state_dict gave
    ["per rank"]                    a value of each rank's own, which stands elsewhere

The array of a node is stored under its path, the keys joined by "/".
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fsdpcore.checkpoint.format import random_states
from fsdpcore.checkpoint.format.dtypes import named_dtype, stored_as
from fsdpcore.checkpoint.format.strict_json import MAX_INT_BITS, check_text, short
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ArgumentError, CorruptCheckpointError
from fsdpcore.core.foreign import given_to

Node = Any
Path = tuple[Any, ...]

PER_RANK: Node = ["per rank"]
LIBRARIES = ("numpy", "jax", "torch", "scalar", "shard")

_FLOATS = ("nan", "inf", "-inf")
_PLAIN = (type(None), bool, int, float, str)
_PLAIN_TAGS = ("", "int", "float", "scalar")
_OLD_SCALAR = ["array", "scalar"]  # a number of NumPy, where it was stored as an array


def name_of(path: Path) -> str:
    """Return the name of the array at a path."""
    return "/".join(map(str, path))


def scalar_node(value: Any, what: str) -> Node:
    """Return the node of a value that JSON carries, or nearly so.

    Raises:
        ArgumentError: it is no such value.
    """
    kind = type(value)
    if isinstance(value, np.generic):
        stored_as(value.dtype)  # or it cannot be stored
        small = np.asarray(value).astype(value.dtype.newbyteorder("<"))
        return ["scalar", value.dtype.name, small.tobytes().hex()]
    if kind is str:
        check_text(value, what)
    elif kind is int and value.bit_length() > MAX_INT_BITS:
        return ["int", hex(value)]
    elif kind is float and not math.isfinite(value):
        return ["float", repr(value)]
    elif kind not in _PLAIN:
        raise ArgumentError(
            f"{what} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold. "
            "It can hold engines, arrays, random generators, None, bool, int, float, str, objects "
            "with state_dict and load_state_dict, and containers of these"
        )
    return value


def tag_of(node: Node) -> str:
    """Return the word that a node begins with; "dict" for a dict, "" for what stands for itself."""
    if type(node) is list:
        return str(node[0])
    return "dict" if type(node) is dict else ""


def children(node: Node) -> list[tuple[Any, Node]] | None:
    """Return what is in the node of a container, by the keys; None for any other."""
    tag = tag_of(node)
    if tag == "dict":
        return list(node.items())
    if tag in ("list", "tuple"):
        return list(enumerate(node[1:]))
    if tag == "map":
        return [(key, child) for key, child in node[1]]
    return list(node[1].items()) if tag == "object" else None


def child(node: Node, key: Any) -> tuple[Node, ...]:
    """Return the node at a key, in a tuple; an empty one if there is none."""
    return tuple(each for name, each in children(node) or () if str(name) == str(key))[:1]


def leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Give all nodes that are no containers, with their paths."""
    inside = children(node)
    if inside is None:
        yield path, node
    for key, each in inside or ():
        yield from leaves(each, (*path, key))


def is_plain(node: Node) -> bool:
    """Whether it is the node of a plain value, or of containers of them."""
    return all(tag_of(leaf) in _PLAIN_TAGS or leaf == _OLD_SCALAR for _, leaf in leaves(node))


def arrays_in(node: Node, path: Path) -> Iterator[str]:
    """Give the names of the arrays of a node, but for those of engines and of ranks' own values."""
    for where, leaf in leaves(node, path):
        tag = tag_of(leaf)
        if tag in ("array", "key"):
            yield name_of(where)
        elif tag == "stateful":
            yield from arrays_in(leaf[1], where)


def value_of(node: Node, path: Path, arrays: Mapping[str, Array]) -> Any:
    """Return the value of a node, made anew; a "stateful" one as its state, an object as a dict.

    Args:
        node: of what.
        path: where it stands.
        arrays: those of ``arrays_in``, which the value gets.

    Raises:
        ArgumentError: it can be loaded into what is there only, such as an engine.
    """
    inside, tag = children(node), tag_of(node)
    if inside is not None:
        made = [(key, value_of(each, (*path, key), arrays)) for key, each in inside]
        if tag in ("list", "tuple"):
            values = [value for _, value in made]
            return values if tag == "list" else tuple(values)
        return dict(made)
    if not tag:
        return node
    if tag in ("int", "float"):
        return int(node[1], 16) if tag == "int" else float(node[1])
    if tag == "scalar":
        return _number(node[1], node[2])
    if tag == "array":
        return given_to(node[1], arrays[name_of(path)])
    if tag == "key":
        return wrapped_key(node[1], arrays[name_of(path)])
    if tag == "generator":
        return random_states.made(node[1], node[2])
    if tag == "stateful":
        return value_of(node[1], path, arrays)
    place = ": write PerRank() in its place" if tag == "per rank" else ""
    raise ArgumentError(
        f"{name_of(path)!r:.80} {what_is(node)}; give what it is loaded into{place}"
    )


def check_makeable(node: Node, path: Path) -> None:
    """Raise ArgumentError unless ``value_of`` can make the value of a node, once it has arrays."""
    for where, leaf in leaves(node, path):
        tag = tag_of(leaf)
        if tag == "key":
            _jax()
        elif tag == "stateful":
            check_makeable(leaf[1], where)
        elif tag not in ("array", *_PLAIN_TAGS):
            value_of(leaf, where, {})


def _number(dtype: str, digits: str) -> Any:
    """Return a number of NumPy of its bytes, the lowest first."""
    found = named_dtype(dtype)
    little = np.frombuffer(bytes.fromhex(digits), found.newbyteorder("<"))
    return little.astype(found)[0]


def wrapped_key(implementation: str, numbers: Array) -> Any:
    """Return the key of JAX that has these numbers."""
    jax = _jax()
    return jax.random.wrap_key_data(jax.numpy.asarray(numbers), impl=implementation)


def _jax() -> Any:
    jax = sys.modules.get("jax")
    if jax is None:
        raise ArgumentError("a key of JAX was saved; import jax before loading")
    return jax


def shown(node: Node) -> str:
    """Return a node in short, for messages."""
    return f"{node[1]} {_number(*node[1:])}" if tag_of(node) == "scalar" else short(node)


def what_is(node: Node) -> str:
    """Say of a node what was saved there, for messages."""
    tag = tag_of(node)
    words = {
        "engine": "an engine",
        "stateful": "the state of an object with load_state_dict",
        "per rank": "a value of each rank's own, PerRank",
        "array": "an array",
        "key": "a key of JAX",
        "map": "a dict",
    }
    if tag == "generator":
        return f"is a random generator, {node[1]}, in the checkpoint"
    if children(node) is not None and not is_plain(node):
        return "has more in it than plain values in the checkpoint"
    word = shown(node) if tag in _PLAIN_TAGS else f"a {tag}"
    return f"is {words.get(tag, word)} in the checkpoint"


def check_node(node: Node, what: str) -> None:
    """Raise CorruptCheckpointError unless something that JSON has held is a node.

    It is nested no deeper than JSON is in a checkpoint.
    """
    tag = tag_of(node) if type(node) is not list or node else "nothing"
    if not tag:
        return
    rule = _RULES.get(tag)
    if rule is None or not rule(node):
        raise CorruptCheckpointError(f"{what} is no value of a checkpoint: {short(node)}")
    inside = children(node)
    for each in [node[1]] if tag == "stateful" else [each for _, each in inside or ()]:
        check_node(each, what)


def _is_map(node: Node) -> bool:
    return len(node) == 2 and type(node[1]) is list and all(map(_is_item, node[1]))


def _is_item(item: Any) -> bool:
    return type(item) is list and len(item) == 2 and type(item[0]) in (str, int)


def _is_text(node: Node) -> bool:
    return len(node) == 2 and type(node[1]) is str


_RULES: dict[str, Callable[[Node], bool]] = {
    "dict": lambda node: True,
    "list": lambda node: True,
    "tuple": lambda node: True,
    "map": _is_map,
    "object": lambda node: len(node) == 2 and type(node[1]) is dict,
    "int": lambda node: _is_text(node) and _is_hex(node[1]),
    "float": lambda node: _is_text(node) and node[1] in _FLOATS,
    "scalar": lambda node: len(node) == 3 and _is_number(node[1], node[2]),
    "array": lambda node: _is_text(node) and node[1] in LIBRARIES,
    "key": _is_text,
    "generator": lambda node: len(node) == 3 and type(node[1]) is str,
    "engine": lambda node: len(node) == 2 and type(node[1]) is dict,
    "stateful": lambda node: len(node) == 2,
    "per rank": lambda node: len(node) == 1,
}


def _is_number(dtype: object, digits: object) -> bool:
    if type(dtype) is not str or type(digits) is not str:
        return False
    try:
        return len(bytes.fromhex(digits)) == named_dtype(dtype).itemsize
    except (ValueError, CorruptCheckpointError):
        return False


def _is_hex(text: str) -> bool:
    try:
        int(text, 16)
    except ValueError:
        return False
    return True
