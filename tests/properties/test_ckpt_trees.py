"""Random trees of arrays and plain values come back as they were, type for type and bit for bit."""

from __future__ import annotations

import tempfile
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fsdpcore as fc

DTYPES = (np.bool_, np.int8, np.uint64, np.float32, np.complex128, ml_dtypes.bfloat16)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 256, size, np.uint8)
    array = (data & 1 if dtype == np.bool_ else data).view(dtype).reshape(shape)
    return np.asfortranarray(array) if draw(st.booleans()) else array


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**5000), 2**5000)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
)
KEYS = st.text("ab.\n/é", min_size=1, max_size=2) | st.integers(-1, 3)
TREES = st.recursive(
    PLAIN | arrays() | arrays().map(lambda array: array.dtype.type(array.size)),
    lambda below: (
        st.lists(below, max_size=3)
        | st.lists(below, max_size=3).map(tuple)
        | st.dictionaries(KEYS, below, max_size=3)
    ),
    max_leaves=8,
)


def words(value: Any) -> Any:
    """Say all that a value is."""
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value).__name__, str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {f"{type(key).__name__} {key}": words(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [words(each) for each in value]
    return type(value).__name__, repr(value) if not isinstance(value, int) else value


def emptied(value: Any) -> Any:
    """Return the same structure with other values of the same kinds."""
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    if isinstance(value, np.generic):
        return value.dtype.type(0)
    if isinstance(value, dict):
        return {key: emptied(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(emptied(each) for each in value)
    return None if value is None else "other"


def clashes(value: Any, path: str, seen: set[str]) -> bool:
    """Whether two arrays would have one name, such as "a/b" and "b" in "a"."""
    if isinstance(value, np.ndarray):
        there = path in seen
        seen.add(path)
        return there
    pairs = value.items() if isinstance(value, dict) else ()
    pairs = enumerate(value) if isinstance(value, (list, tuple)) else pairs
    found = [clashes(each, f"{path}/{key}", seen) for key, each in pairs]
    return any(found)


@given(st.dictionaries(st.text("ab/", min_size=1, max_size=2), TREES, max_size=3), st.booleans())
def test_trees_come_back(tree: dict[str, Any], own: bool) -> None:
    given_tree = {"tree": fc.checkpoint.PerRank(tree)} if own else tree
    clash = clashes(tree, "", set())

    def main(backend: fc.Backend) -> None:
        with tempfile.TemporaryDirectory() as folder:
            if clash:
                with pytest.raises(fc.ArgumentError, match="two arrays"):
                    fc.checkpoint.save(folder, given_tree, backend, step=1)
                return
            fc.checkpoint.save(folder, given_tree, backend, step=1)
            for target in (dict.fromkeys(tree), emptied(tree)):
                wanted: Any = target
                if own:
                    wanted = {"tree": fc.checkpoint.PerRank(target if tree else None)}
                state = fc.checkpoint.load(folder, wanted, backend).state
                assert words(state["tree"] if own else state) == words(tree)

    fc.launch(main, world_size=1, transport="sim")
