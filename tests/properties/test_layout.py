"""The flat layout against a buffer of labels that is cut up element by element."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.layout import FlatLayout, ParamRange, Piece

Label = tuple[str, int]

_shape = st.lists(st.integers(0, 6), max_size=3).map(tuple)
_shapes = st.lists(_shape, max_size=8).map(
    lambda shapes: {f"p{i}": s for i, s in enumerate(shapes)}
)
_world_size = st.integers(1, 17)


def _labels(shapes: dict[str, tuple[int, ...]]) -> list[Label]:
    """Name every element of the unpadded buffer by its parameter and its place in it."""
    labels: list[Label] = []
    for name, shape in shapes.items():
        indices = itertools.product(*(range(extent) for extent in shape))
        labels.extend((name, i) for i, _ in enumerate(indices))
    return labels


def _expand(layout: FlatLayout, rank: int) -> list[Label]:
    """Write out a rank's pieces as labels, checking that each lies right behind the last."""
    labels: list[Label] = []
    for piece in layout.pieces(rank):
        assert piece.shard_start == len(labels)
        assert piece.param_start < piece.param_stop
        labels.extend((piece.name, i) for i in range(piece.param_start, piece.param_stop))
        assert piece.shard_stop == len(labels)
        assert piece.size == piece.param_stop - piece.param_start
    return labels


@settings(deadline=None)
@given(_shapes, _world_size)
@example({}, 3)
@example({"scalar": ()}, 17)
@example({"empty": (0, 5)}, 4)
@example({"a": (2,), "empty": (3, 0), "b": (), "c": (2, 2)}, 5)
def test_pieces_of_all_ranks_are_the_buffer_in_order(
    shapes: dict[str, tuple[int, ...]], world_size: int
) -> None:
    labels = _labels(shapes)
    layout = FlatLayout.build(shapes, np.float32, world_size)
    shard_size = -(-len(labels) // world_size)
    for rank in range(world_size):
        held = labels[rank * shard_size : (rank + 1) * shard_size]
        assert _expand(layout, rank) == held
        assert layout.valid_size(rank) == len(held)
        assert layout.shard_bounds(rank) == (rank * shard_size, (rank + 1) * shard_size)


@settings(deadline=None)
@given(_shapes, _world_size)
def test_every_element_of_every_parameter_is_held_once(
    shapes: dict[str, tuple[int, ...]], world_size: int
) -> None:
    layout = FlatLayout.build(shapes, np.float32, world_size)
    times = {name: np.zeros(shape).ravel() for name, shape in shapes.items()}
    for rank in range(world_size):
        for piece in layout.pieces(rank):
            times[piece.name][piece.param_start : piece.param_stop] += 1
    for name in shapes:
        np.testing.assert_array_equal(times[name], 1)


@settings(deadline=None)
@given(_shapes, _world_size)
def test_sizes(shapes: dict[str, tuple[int, ...]], world_size: int) -> None:
    layout = FlatLayout.build(shapes, np.float16, world_size)
    size = sum(np.zeros(shape).size for shape in shapes.values())
    assert layout.size == size
    # The smallest equal shards that hold everything.
    assert layout.shard_size * world_size >= size
    assert layout.shard_size == 0 if size == 0 else (layout.shard_size - 1) * world_size < size
    assert layout.padded_size == layout.shard_size * world_size
    assert layout.padding == layout.padded_size - size
    assert 0 <= layout.padding < max(1, world_size)
    assert sum(layout.valid_size(rank) for rank in range(world_size)) == size
    assert [p.name for p in layout.params] == list(shapes)
    assert [p.shape for p in layout.params] == list(shapes.values())


@settings(deadline=None)
@given(_shapes, _world_size)
def test_parameters_lie_tightly_in_declaration_order(
    shapes: dict[str, tuple[int, ...]], world_size: int
) -> None:
    stop = 0
    for param in FlatLayout.build(shapes, np.float32, world_size).params:
        assert param.offset == stop
        stop += np.zeros(param.shape).size
        assert param.stop == stop
        assert param.size == param.stop - param.offset


@settings(deadline=None)
@given(_shapes, _world_size)
def test_a_flat_buffer_is_rebuilt_from_the_pieces_alone(
    shapes: dict[str, tuple[int, ...]], world_size: int
) -> None:
    rng = np.random.default_rng(0)
    params = {name: rng.integers(1, 99, size=shape) for name, shape in shapes.items()}
    layout = FlatLayout.build(shapes, np.int64, world_size)
    shards = np.zeros((world_size, layout.shard_size), np.int64)
    for rank in range(world_size):
        for piece in layout.pieces(rank):
            source = np.ravel(params[piece.name])[piece.param_start : piece.param_stop]
            shards[rank, piece.shard_start : piece.shard_stop] = source
    flat = shards.reshape(-1)
    parts = [np.ravel(value) for value in params.values()]
    np.testing.assert_array_equal(flat[: layout.size], np.concatenate([[], *parts]))
    np.testing.assert_array_equal(flat[layout.size :], 0)


def test_example_of_the_module_docstring() -> None:
    layout = FlatLayout.build({"a": (2, 3), "b": (), "c": (3,)}, np.float32, 3)
    assert (layout.size, layout.shard_size, layout.padded_size, layout.padding) == (10, 4, 12, 2)
    assert layout.pieces(0) == (Piece("a", 0, 4, 0),)
    assert layout.pieces(1) == (Piece("a", 4, 6, 0), Piece("b", 0, 1, 2), Piece("c", 0, 1, 3))
    assert layout.pieces(2) == (Piece("c", 1, 3, 0),)
    assert layout.valid_size(2) == 2


def test_fewer_elements_than_ranks_leaves_the_last_ranks_only_padding() -> None:
    layout = FlatLayout.build({"w": (2,)}, np.float32, 5)
    assert layout.shard_size == 1
    assert [layout.valid_size(rank) for rank in range(5)] == [1, 1, 0, 0, 0]
    assert layout.pieces(4) == ()
    assert layout.shard_bounds(4) == (4, 5)


def test_sizes_beyond_32_bits_are_exact() -> None:
    layout = FlatLayout.build({"w": (np.int32(2**30), np.int32(2**30)), "b": (1,)}, np.int8, 2)
    assert layout.size == 2**60 + 1
    assert layout.shard_size == 2**59 + 1
    assert layout.pieces(1)[-1] == Piece("b", 0, 1, 2**59 - 1)


def test_layouts_are_values() -> None:
    first = FlatLayout.build({"w": [2, np.int64(3)]}, "float32", 2)
    second = FlatLayout.build({"w": (2, 3)}, np.float32, 2)
    assert first == second
    assert hash(first) == hash(second)
    assert first != FlatLayout.build({"w": (2, 3)}, np.float32, 3)
    assert first.dtype == np.dtype(np.float32)
    assert FlatLayout.build({"w": 3}, ml_dtypes.bfloat16, 2).dtype.itemsize == 2


@pytest.mark.parametrize(
    ("shapes", "dtype", "world_size", "message"),
    [
        ({"w": (2, -1)}, "f4", 2, "extent 1 of the shape of parameter 'w' must be at least 0"),
        ({"w": (2.0,)}, "f4", 2, "extent 0 of the shape of parameter 'w' must be an integer"),
        ({"w": "23"}, "f4", 2, "must be a tuple of integers, got '23'"),
        ({"w": None}, "f4", 2, "must be a tuple of integers, got None"),
        ({"": (2,)}, "f4", 2, "non-empty string"),
        ({3: (2,)}, "f4", 2, "non-empty string, got 3"),
        ({"w": (2,)}, "O", 2, "only numbers and bools can be sharded"),
        ({"w": (2,)}, "U3", 2, "only numbers and bools can be sharded"),
        ({"w": (2,)}, [("x", "f4")], 2, "only numbers and bools can be sharded"),
        ({"w": (2,)}, ">f4", 2, "byte order"),
        ({"w": (2,)}, "flaot", 2, "which NumPy does not know"),
        ({"w": (2,)}, None, 2, "needs a dtype"),
        ({"w": (2,)}, "f4", 0, "world_size must be at least 1, got 0"),
        ({"w": (2,)}, "f4", 2.0, "world_size must be an integer, got 2.0"),
        ({"w": (2,)}, "f4", True, "world_size must be an integer, got True"),
    ],
)
def test_build_refuses(shapes: Any, dtype: Any, world_size: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        FlatLayout.build(shapes, dtype, world_size)


@pytest.mark.parametrize("rank", [-1, 3, 1.0, None])
def test_rank_out_of_range_is_refused(rank: Any) -> None:
    layout = FlatLayout.build({"w": (4,)}, np.float32, 3)
    for method in (layout.shard_bounds, layout.valid_size, layout.pieces):
        with pytest.raises(ArgumentError, match="rank"):
            method(rank)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ((ParamRange("a", (2,), 0), ParamRange("b", (2,), 3)), "tightly"),
        ((ParamRange("a", (2,), 0), ParamRange("b", (2,), 1)), "tightly"),
        ((ParamRange("a", (2,), 1),), "tightly"),
        ((ParamRange("a", (2,), 0), ParamRange("a", (2,), 2)), "two parameters are named 'a'"),
    ],
)
def test_constructor_refuses(params: tuple[ParamRange, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        FlatLayout(params, np.dtype(np.float32), 2)
