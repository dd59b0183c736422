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


def check(case, ranks, dtype=np.float64):
    """Compare the layer with its function on each of these numbers of ranks.

    Returns:
        For each of them the counts of collectives of a forward and of a backward pass.
    """
    expected, dy = wanted(case, dtype)
    build, whole, x = (
        functools.partial(case.build, dtype=dtype),
        values(case, dtype),
        case.input(dtype),
    )
    counts = []
    for world_size in ranks:
        *found, issued = passes_cut(build, whole, x, dy, world_size, case.x_axis, case.y_axis)
        assert_passes_equal(found, expected, dtype)
        counts.append(issued)
    return counts


def check_ranks(case, collectives):
    """Compare so in float64 on 1 to 4 ranks, and in float32 on 3.

    The types have the same code but for what is rounded. ``collectives`` are those of the two
    passes where there are several ranks.
    """
    assert check(case, (1, 2, 3, 4)) == [(0, 0), *[collectives] * 3]
    assert check(case, (3,), np.float32) == [collectives]


class Alone(fc.SubBackend):
    """A group of one that cannot communicate."""

    def __init__(self):
        self.rank, self.world_size = 0, 1
