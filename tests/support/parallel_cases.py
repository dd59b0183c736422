"""One layer on the ranks of a group, its input and output cut along axes that the test says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from support import transformer_oracle
from support.tensor_parallel import assert_passes_equal, passes_cut, random_values

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


def values(case, dtype):
    """Whole parameters of the layer."""
    initial = case.build(Alone(), dtype).init(np.random.default_rng(SEED))
    shapes = {name: tuple(value.shape) for name, value in initial.items()}
    return random_values(shapes, np.random.default_rng(SEED), dtype)


def wanted(case, dtype):
    """What the passes have to return, from float64; and the gradient of the output for them."""
    params = {name: value.astype(np.float64) for name, value in values(case, dtype).items()}
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


def check(case, world_size, *, dtypes=(np.float64, np.float32)):
    """Compare the layer on so many ranks with its function; return its counts of collectives."""
    for dtype in dtypes:
        expected, dy = wanted(case, dtype)
        *found, issued = passes_cut(
            functools.partial(case.build, dtype=dtype),
            values(case, dtype),
            case.input(dtype),
            dy,
            world_size,
            case.x_axis,
            case.y_axis,
        )
        assert_passes_equal(found, expected, dtype)
    return issued


class Alone(fc.SubBackend):
    """A group of one that cannot communicate."""

    def __init__(self):
        self.rank, self.world_size = 0, 1
