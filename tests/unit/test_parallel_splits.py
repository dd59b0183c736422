"""How an axis is cut over ranks: as numpy.array_split does."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fsdpcore as fc
from fsdpcore.parallel import Scope, bounds, prefixed, split
from fsdpcore.parallel.splits import own_range, own_size


@given(st.integers(0, 200), st.integers(1, 20))
def test_parts_are_those_of_array_split(size, parts):
    wanted = np.array_split(np.arange(size), parts)
    assert len(bounds(size, parts)) == parts + 1
    for index, part in enumerate(wanted):
        start, stop = split(size, parts, index)
        assert np.array_equal(np.arange(start, stop), part)
        assert (start, stop) == tuple(bounds(size, parts)[index : index + 2])
        group = SimpleNamespace(world_size=parts, rank=index)
        assert own_range(size, group) == (start, stop)
        assert own_size(size, group) == len(part)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 2, 0), "at least 0"),
        ((3, 0, 0), "at least 1"),
        ((3, 2, 2), "no part 2 of 2"),
        ((3, 2, -1), "at least 0"),
        ((3.5, 2, 0), "must be an integer"),
    ],
)
def test_what_is_no_part_is_refused(arguments, message):
    with pytest.raises(fc.ArgumentError, match=message):
        split(*arguments)


def test_a_scope_shows_the_names_with_its_prefix():
    arrays = {name: np.full(1, i) for i, name in enumerate(["a.w", "a.b.w", "ab", "c.w"])}
    scope = Scope(arrays, "a.")
    assert list(scope) == ["w", "b.w"]
    assert len(scope) == 2
    assert scope["w"] is arrays["a.w"]
    assert "w" in scope
    assert "ab" not in scope
    assert list(Scope(scope, "b.")) == ["w"]
    assert Scope(scope, "b.")["w"] is arrays["a.b.w"]
    with pytest.raises(KeyError, match=r"a\.missing"):
        scope["missing"]


def test_what_is_assigned_to_a_scope_is_in_the_mapping():
    arrays = {"a.w": np.zeros(1), "w": np.zeros(1)}
    new = np.ones(1)
    Scope(arrays, "a.")["w"] = new
    assert arrays["a.w"] is new
    assert arrays["w"][0] == 0
    del Scope(arrays, "a.")["w"]
    assert list(arrays) == ["w"]


def test_a_scope_asks_its_mapping_for_memory_to_be_written_whole():
    class Gradients(dict):
        def empty(self, name):
            return f"empty {name}"

    assert Scope(Gradients(), "a.").empty("w") == "empty a.w"
    assert Scope({"a.w": 1}, "a.").empty("w") == 1
    assert Scope(Scope(Gradients(), "a."), "b.").empty("w") == "empty a.b.w"


def test_prefixed_names_are_those_that_a_scope_finds():
    entries = {"w": 1, "b": 2}
    assert prefixed("norm.", entries) == {"norm.w": 1, "norm.b": 2}
    assert dict(Scope(prefixed("norm.", entries), "norm.")) == entries
