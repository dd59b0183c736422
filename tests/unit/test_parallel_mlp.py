"""An MLP with its hidden features cut over ranks, against the unsharded formula."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest
from support import transformer_oracle as oracle
from support.spmd import run
from support.tensor_parallel import (
    assert_passes_equal,
    initial_values,
    passes,
    random_values,
)

import fsdpcore as fc
from fsdpcore.parallel.activations import ACTIVATIONS
from fsdpcore.parallel.mlp import ParallelMLP

WIDTH, HIDDEN, BATCH, LENGTH = 6, 11, 2, 5


def shapes(hidden=HIDDEN):
    return {
        "up.w": (WIDTH, hidden),
        "up.b": (hidden,),
        "down.w": (hidden, WIDTH),
        "down.b": (WIDTH,),
    }


def case(dtype, hidden=HIDDEN):
    rng = np.random.default_rng(8)
    x, dy = rng.standard_normal((2, BATCH, LENGTH, WIDTH)).astype(dtype)
    return random_values(shapes(hidden), rng, dtype), x, dy


def build(group, *, hidden=HIDDEN, **options):
    return ParallelMLP(WIDTH, hidden, group, **options)


@pytest.mark.parametrize("along_sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(
    ("world_size", "dtype"), [*((n, np.float64) for n in (1, 2, 3, 4)), (3, np.float32)]
)
def test_it_is_the_unsharded_mlp(world_size, dtype, along_sequence):
    got = passes(
        functools.partial(build, sequence_parallel=along_sequence),
        *case(dtype),
        world_size,
        along_sequence=along_sequence,
    )
    assert_passes_equal(got, oracle.passes(oracle.mlp, *case(np.float64)), dtype)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("hidden", [3, 11])
def test_every_activation_has_its_derivative(activation, hidden):
    function = functools.partial(oracle.mlp, activation=activation)
    wanted = oracle.passes(function, *case(np.float64, hidden))
    for world_size in (1, 4):  # with fewer features than ranks one has none
        got = passes(
            functools.partial(build, hidden=hidden, activation=activation),
            *case(np.float64, hidden),
            world_size,
        )
        assert_passes_equal(got, wanted, np.float64)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_activations_have_the_dtype_of_their_input_and_bear_any_value(activation, dtype):
    function = ACTIVATIONS[activation]
    x = np.array([-200.0, -100.0, -1.0, 0.0, 1.0, 100.0, 200.0], dtype)
    before = x.copy()
    y, saved = function.forward(x)
    dx = function.backward(saved, np.ones(x.shape, np.float32))
    np.testing.assert_array_equal(x, before)
    assert y.dtype == dx.dtype == dtype
    limit = 2 * float(ml_dtypes.finfo(dtype).eps)
    finite = np.array([-1.0, 0.0, 1.0])
    np.testing.assert_allclose(
        y[2:5].astype(float), oracle.FUNCTIONS[activation](finite), atol=limit
    )
    np.testing.assert_allclose(y[[0, 1, 5, 6]].astype(float), [0, 0, 100, 200], atol=1e-6)
    np.testing.assert_allclose(dx[[0, 1, 5, 6]].astype(float), [0, 0, 1, 1], atol=1e-6)


def test_initial_values_do_not_depend_on_the_number_of_ranks():
    alone = initial_values(build, 1)
    assert {name: value.shape for name, value in alone.items()} == shapes()
    for name, value in initial_values(build, 3).items():
        np.testing.assert_array_equal(value, alone[name])


def refused(backend):
    with pytest.raises(fc.ArgumentError, match="no activation 'tanh'; choose one of gelu, relu"):
        build(backend, activation="tanh")


def test_an_unknown_activation_is_refused():
    run(refused, transport="sim", world_size=1)
