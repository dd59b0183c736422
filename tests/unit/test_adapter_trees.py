"""Nested values: what is gone into, what comes back, and what is copied."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, defaultdict
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from fsdpcore.adapters.trees import detached_from, leaves, map_leaves, overlaps


class Pair(NamedTuple):
    first: object
    second: object


class Named(tuple):
    """A tuple that is made of other arguments, and has attributes."""

    def __new__(cls, name, *items):
        made = super().__new__(cls, items)
        made.name = name
        return made


class Rows(list):
    pass


def rows(*items):
    made = Rows(items)
    made.label = "rows"
    return made


def counted(factory, **items):
    made = defaultdict(factory)
    made.update(items)
    return made


CONTAINERS = [
    (1, 2),
    [1, [2]],
    {"a": 1, "b": {"c": 2}},
    Pair(1, Pair(2, ())),
    Named("it", 1, 2),
    rows(1, rows(2)),
    OrderedDict(b=1, a=2),
    counted(list, b=1, a=(2,)),
    (Counter(a=1), [], {"x": 2}),
    [OrderedDict(x=Pair(1, 2))],
]


@pytest.mark.parametrize("tree", CONTAINERS, ids=lambda tree: type(tree).__name__)
def test_containers_stay_of_their_kinds_and_leaves_in_their_order(tree):
    before = repr(tree)
    assert list(leaves(tree)) == [1, 2]
    calls = []

    def change(leaf):
        calls.append(leaf)
        return leaf + 10

    found = map_leaves(change, tree)
    assert calls == [1, 2]
    assert type(found) is type(tree)
    assert repr(found) == before.replace("1", "11").replace("2", "12")
    assert getattr(found, "__dict__", {}) == getattr(tree, "__dict__", {})
    assert repr(tree) == before


@pytest.mark.parametrize("tree", CONTAINERS, ids=lambda tree: type(tree).__name__)
def test_where_nothing_changes_the_container_itself_comes_back(tree):
    assert map_leaves(lambda leaf: leaf, tree) is tree


def test_mappings_that_are_no_dicts_become_dicts():
    shown = MappingProxyType({"a": 1, "b": MappingProxyType({"c": 2})})
    assert list(leaves(shown)) == [1, 2]
    found = map_leaves(str, shown)
    assert found == {"a": "1", "b": {"c": "2"}}
    assert {type(found), type(found["b"])} == {dict}


def test_a_default_stays_that_of_the_dict():
    found = map_leaves(str, counted(list, a=1))
    assert found["a"] == "1"
    assert found["missing"] == []


def test_structures_of_c_are_made_of_their_items():
    """As ``torch.return_types.max`` is."""
    found = map_leaves(lambda leaf: leaf + 1, time.gmtime(0))
    assert type(found) is time.struct_time
    assert found.tm_year == 1971


@pytest.mark.parametrize("leaf", [3, None, "text", range(3), {1, 2}, SimpleNamespace(a=1)])
def test_all_else_is_a_leaf(leaf):
    assert list(leaves([leaf])) == [leaf]
    assert map_leaves(lambda each: (each,), leaf) == (leaf,)


def test_leaves_may_be_looked_for_down_to_some_depth():
    tree = [1, [2, [3, {"x": 4}]]]
    tree.append(tree)  # which goes on for ever
    assert list(leaves(tree[:-1], depth=3)) == [1, 2, 3]
    assert list(leaves(tree, depth=1)) == [1]
    assert list(leaves(5, depth=0)) == [5]
    assert list(leaves([5], depth=0)) == []


def test_what_lies_in_lent_memory_is_copied_and_nothing_else():
    lent, own = np.arange(12.0).reshape(3, 4), np.arange(3)
    tree = {"views": Pair(lent[1:, ::2], [lent.T, "text"]), "own": (own,), "number": lent[0, 0]}
    found = detached_from(tree, iter([np.ones(2), lent]))
    first, (second, text) = found["views"]
    before = first.copy(), second.copy()
    lent[...] = -1
    assert_array_equal(first, before[0])
    assert_array_equal(second, before[1])
    assert_array_equal(second, np.arange(12.0).reshape(3, 4).T)
    assert type(found["views"]) is Pair
    assert text == "text"
    assert found["own"] is tree["own"]
    assert found["number"] is tree["number"]
    assert detached_from(tree, []) is tree


def test_on_a_gpu_arrays_are_compared_with_arrays_of_it(cupy):
    lent = cupy.arange(6)
    found = detached_from([lent[2:], cupy.ones(2), np.ones(2)], [lent])
    lent[...] = 0
    assert found[0].tolist() == [2, 3, 4, 5]
    assert overlaps(lent[1:], [lent])
    assert not overlaps(np.zeros(6), [lent])
    assert not overlaps([lent], [lent])
