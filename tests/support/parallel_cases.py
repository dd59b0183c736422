"""One layer on the ranks of a group, its input and output cut along axes that the test says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from support import transformer_oracle
from support.spmd import run
from support.tensor_parallel import assert_passes_equal, joined, own_values, random_values

import fsdpcore as fc

SEED = 5


@dataclass(frozen=True)
class Case:
    """A layer and what it has to be.

    Attributes:
        build: the layer of a group, computing with a dtype.
        function: ``(params, x) -> y`` unsharded, which autograd can differentiate.
        x: shape of the whole input, or the input itself if it is one of integers.
        x_axis, y_axis: what the input and output, and their gradients, are cut along; None for
            nothing, so that they are the same on all ranks.
    """

    build: Callable[[Any, Any], Any]
    function: Callable[[Any, Any], Any]
    x: Any
    x_axis: int | None = None
    y_axis: int | None = None

    def input(self, dtype: Any) -> Any:
        if isinstance(self.x, np.ndarray):
            return self.x
        return np.random.default_rng(SEED).standard_normal(self.x).astype(dtype)


def parts(array, backend, axis):
    """This rank's part of an array that may be cut, in memory of its own."""
    if axis is None:
        return array.copy()
    return np.array_split(array, backend.world_size, axis=axis)[backend.rank].copy()


def whole_shapes(initial):
    return {name: tuple(value.shape) for name, value in initial.items()}


def _passes(backend, case, dtype, dy):
    layer = case.build(backend, dtype)
    initial = layer.init(np.random.default_rng(SEED))
    whole = random_values(whole_shapes(initial), np.random.default_rng(SEED), dtype)
    params = own_values(initial, whole)
    grads = {name: np.zeros_like(value) for name, value in params.items()}
    x, dy = parts(case.input(dtype), backend, case.x_axis), parts(dy, backend, case.y_axis)
    given = x.copy(), dy.copy()
    before = backend.issued
    y, saved = layer.forward(params, x)
    between = backend.issued
    dx = layer.backward(params, saved, dy, grads)
    after = backend.issued
    assert np.array_equal(x, given[0]), "the input was changed"
    assert np.array_equal(dy, given[1]), "the gradient of the output was changed"
    boxes = {
        name: fc.BoxShard(value.shape, value.start, grads[name])
        if isinstance(value, fc.BoxShard)
        else grads[name]
        for name, value in initial.items()
    }
    return y, dx, boxes, (between - before, after - between)


def ran(case, world_size, dtype, dy, *, transport="sim"):
    """Output, input's and parameters' gradients as whole arrays, and the collectives of a pass."""
    args = (case, dtype, dy)
    ranks = run(_passes, transport=transport, world_size=world_size, args=args)
    y, dx = (
        _whole([rank[i] for rank in ranks], axis)
        for i, axis in enumerate((case.y_axis, case.x_axis))
    )
    issued = {rank[3] for rank in ranks}
    assert len(issued) == 1
    return y, dx, joined([rank[2] for rank in ranks]), issued.pop()


def _whole(arrays, axis):
    if axis is not None:
        return np.concatenate(arrays, axis)
    assert all(np.array_equal(array, arrays[0]) for array in arrays), "not the same on all ranks"
    return arrays[0]


def wanted(case, dtype):
    """What ``ran`` has to return, from float64; and the gradient of the output to run it with."""
    layer = case.build(Alone(), dtype)
    shapes = whole_shapes(layer.init(np.random.default_rng(SEED)))
    whole = random_values(shapes, np.random.default_rng(SEED), dtype)
    params = {name: value.astype(np.float64) for name, value in whole.items()}
    x = case.input(dtype)
    rng = np.random.default_rng(SEED + 1)
    if x.dtype.kind in "iu":
        dy = rng.standard_normal(case.function(params, x).shape).astype(dtype)
        y, _, grads = transformer_oracle.passes(
            lambda values, _: case.function(values, x), params, 0.0, dy.astype(np.float64)
        )
        return (y, np.zeros(x.shape), grads), dy
    x = x.astype(np.float64)
    dy = rng.standard_normal(case.function(params, x).shape).astype(dtype)
    return transformer_oracle.passes(case.function, params, x, dy.astype(np.float64)), dy


def check(case, world_size, *, transport="sim", dtypes=(np.float64, np.float32)):
    """Compare the layer on so many ranks with its function; return its counts of collectives."""
    for dtype in dtypes:
        expected, dy = wanted(case, dtype)
        *found, issued = ran(case, world_size, dtype, dy, transport=transport)
        assert_passes_equal(found, expected, dtype)
    return issued


class Alone(fc.SubBackend):
    """A group of one that cannot communicate."""

    def __init__(self):
        self.rank, self.world_size = 0, 1
