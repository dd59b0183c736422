"""``core.trees``: containers of Python, of dataclasses and of JAX's registry, by their paths."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import pytest

from fsdpcore.core.trees import branch, map_tree

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A container that cannot be changed in place."""

    count: int
    parts: list[int]


def flat(tree: Any) -> dict[tuple[Any, ...], Any]:
    """Return the leaves by their paths."""
    found: dict[tuple[Any, ...], Any] = {}
    map_tree(lambda path, leaf: found.setdefault(path, leaf), tree)
    return found


def test_every_container_is_gone_into_by_its_keys_and_made_anew() -> None:
    tree = {"a": [1, (2, Pair(3, 4))], 5: OrderedDict(b=Frozen(6, [7])), "none": None}
    assert flat(tree) == {
        ("a", 0): 1,
        ("a", 1, 0): 2,
        ("a", 1, 1, "left"): 3,
        ("a", 1, 1, "right"): 4,
        (5, "b", "count"): 6,
        (5, "b", "parts", 0): 7,
        ("none",): None,
    }
    assert map_tree(lambda path, leaf: leaf, tree) is tree
    more = map_tree(lambda path, leaf: leaf and leaf + 1, tree)
    assert more == {"a": [2, (3, Pair(4, 5))], 5: OrderedDict(b=Frozen(7, [8])), "none": None}
    assert isinstance(more["a"][1][1], Pair)
    assert isinstance(more[5], OrderedDict)
    assert tree["a"] == [1, (2, Pair(3, 4))]
    assert tree[5]["b"] == Frozen(6, [7])


def test_what_jax_knows_keeps_what_is_no_child() -> None:
    jax = pytest.importorskip("jax")
    optax, eqx = pytest.importorskip("optax"), pytest.importorskip("equinox")
    model = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    assert set(flat(model)) == {("weight",), ("bias",)}  # the sizes and flags are static
    double = map_tree(lambda path, leaf: 2 * leaf, model)
    assert double.in_features == 2
    assert (double.bias == 2 * model.bias).all()
    state = optax.adam(1e-3).init({"w": model.weight})
    assert set(flat(state)) == {(0, "count"), (0, "mu", "w"), (0, "nu", "w")}
    assert type(map_tree(lambda path, leaf: leaf + 1, state)[0]) is type(state[0])
    for leaf in (model.weight, jax.random.key(1), None, Pair, object()):
        assert branch(leaf) is None


def test_mappings_that_jax_knows_stay_of_their_kind() -> None:
    """As Flax's FrozenDict does; others become dicts."""
    jax = pytest.importorskip("jax")

    class Kept(UserDict):
        pass

    jax.tree_util.register_pytree_with_keys(
        Kept,
        lambda m: ([(jax.tree_util.DictKey(key), m[key]) for key in m], tuple(m)),
        lambda keys, values: Kept(zip(keys, values, strict=True)),
    )
    assert flat(Kept(a=1, b=[2])) == {("a",): 1, ("b", 0): 2}
    for kind, found in ((Kept, Kept), (UserDict, dict)):
        made = map_tree(lambda path, leaf: leaf + 1, kind(a=1, b=[2]))
        assert type(made) is found
        assert made == {"a": 2, "b": [3]}


class Tagged(tuple[int, ...]):
    """A tuple with an attribute."""

    tag = ""


def test_attributes_of_containers_stay() -> None:
    counts: dict[str, Any] = defaultdict(list, a=1)
    values = Tagged((1, 2))
    values.tag = "kept"
    found = map_tree(lambda path, leaf: leaf + 1, {"counts": counts, "values": values})
    assert found == {"counts": {"a": 2}, "values": (2, 3)}
    assert found["counts"].default_factory is list
    assert (type(found["values"]), found["values"].tag) == (Tagged, "kept")
    assert counts == {"a": 1}
