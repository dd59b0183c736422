"""A tensor-parallel transformer block against the unsharded formula and its derivative."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import transformer_oracle as oracle
from support.spmd import run
from support.tensor_parallel import (
    assert_close,
    assert_passes_equal,
    initial_values,
    passes,
    random_values,
)

import fsdpcore as fc
from fsdpcore.parallel.block import ParallelBlock
from fsdpcore.parallel.positions import PositionEmbedding

WIDTH, HEADS, HIDDEN, BATCH, LENGTH = 10, 5, 13, 3, 6
SHAPES = oracle.block_shapes(WIDTH, HEADS, HIDDEN)


def case(dtype, width=WIDTH, heads=HEADS, hidden=HIDDEN, batch=BATCH, length=LENGTH):
    rng = np.random.default_rng(9)
    x, dy = rng.standard_normal((2, batch, length, width)).astype(dtype)
    return random_values(oracle.block_shapes(width, heads, hidden), rng, dtype), x, dy


def build(group, *, width=WIDTH, heads=HEADS, hidden=HIDDEN, **options):
    return ParallelBlock(width, heads, hidden, group, **options)


@functools.cache
def wanted():
    return oracle.passes(oracle.block, *case(np.float64))


@pytest.mark.parametrize("along_sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(
    ("world_size", "dtype"), [*((n, np.float64) for n in (1, 2, 3, 4)), (3, np.float32)]
)
def test_it_is_the_unsharded_block(world_size, dtype, along_sequence):
    got = passes(
        functools.partial(build, sequence_parallel=along_sequence),
        *case(dtype),
        world_size,
        along_sequence=along_sequence,
    )
    assert_passes_equal(got, wanted(), dtype)


@pytest.mark.parametrize("along_sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients_are_slopes(world_size, along_sequence):
    """Along random directions through all parameters and the input, by central differences."""
    go = functools.partial(
        passes,
        functools.partial(build, sequence_parallel=along_sequence),
        world_size=world_size,
        along_sequence=along_sequence,
    )
    params, x, dy = case(np.float64)
    _, dx, grads = go(params, x, dy)
    rng = np.random.default_rng(1)
    for _ in range(3):
        step = 1e-4
        along = {name: rng.standard_normal(value.shape) for name, value in params.items()}
        along_x = rng.standard_normal(x.shape)
        ends = []
        for h in (step, -step, 2 * step, -2 * step):
            moved = {name: value + h * along[name] for name, value in params.items()}
            ends.append(float(np.sum(dy * go(moved, x + h * along_x, dy)[0])))
        slope = (8 * (ends[0] - ends[1]) - (ends[2] - ends[3])) / (12 * step)
        found = np.sum(dx * along_x) + sum(np.sum(grads[n] * along[n]) for n in grads)
        assert float(found) == pytest.approx(slope, rel=1e-7)


@given(
    world_size=st.integers(1, 4),
    more_heads=st.integers(0, 3),
    size=st.integers(1, 4),
    hidden=st.integers(1, 9),
    batch=st.integers(0, 3),
    length=st.integers(1, 6),
    along_sequence=st.booleans(),
    causal=st.booleans(),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_so_it_is_at_any_size(
    world_size, more_heads, size, hidden, batch, length, along_sequence, causal
):
    heads = world_size + more_heads
    sizes = {
        "width": heads * size,
        "heads": heads,
        "hidden": hidden,
    }
    params, x, dy = case(np.float64, batch=batch, length=length, **sizes)
    got = passes(
        functools.partial(build, causal=causal, sequence_parallel=along_sequence, **sizes),
        params,
        x,
        dy,
        world_size,
        along_sequence=along_sequence,
    )
    function = functools.partial(oracle.block, causal=causal)
    assert_passes_equal(got, oracle.passes(function, params, x, dy), np.float64)


@pytest.mark.parametrize("along_sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_16_bits_differ_by_their_rounding(dtype, along_sequence):
    params, x, dy = case(np.float64)
    got = passes(
        functools.partial(build, sequence_parallel=along_sequence, dtype=dtype),
        {name: value.astype(dtype) for name, value in params.items()},
        x.astype(dtype),
        dy.astype(dtype),
        3,
        along_sequence=along_sequence,
    )
    exact = wanted()
    for array, right in zip(got[:2], exact[:2], strict=True):
        assert array.dtype == dtype
        wide = array.astype(np.float64)
        limit = 8 * float(ml_dtypes.finfo(dtype).eps) * np.abs(right).max()
        assert np.abs(wide - right).max() <= limit


def test_initial_values_do_not_depend_on_the_number_of_ranks():
    few = functools.partial(build, residual_scale=0.5, dtype=np.float64)
    alone = initial_values(few, 1)
    assert {name: value.shape for name, value in alone.items()} == SHAPES
    for name, value in initial_values(few, 3).items():
        np.testing.assert_array_equal(value, alone[name])


def test_what_ends_in_the_residual_stream_starts_smaller():
    half = initial_values(functools.partial(build, residual_scale=0.5), 2)
    for name, value in initial_values(build, 2).items():
        scale = 0.5 if name in ("attention.proj.w", "mlp.down.w") else 1.0
        assert_close(half[name], value * np.float32(scale), np.float32, name)


def test_deviations_may_be_given():
    given_ones = initial_values(functools.partial(build, init=0.5, out_init=0.02), 2)
    for name, value in initial_values(build, 2).items():
        if name.endswith(".w"):
            inputs = HIDDEN if name == "mlp.down.w" else WIDTH
            std = 0.02 if name in ("attention.proj.w", "mlp.down.w") else 0.5
            scale = np.float32(std * np.sqrt(inputs))
            assert_close(given_ones[name], value * scale, np.float32, name)


def scaled_twice(backend):
    with pytest.raises(fc.ArgumentError, match="residual_scale is that of the default out_init"):
        build(backend, residual_scale=0.5, out_init=0.1)


def test_what_is_given_is_not_scaled():
    run(scaled_twice, transport="sim", world_size=1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_positions_are_added(dtype):
    rng = np.random.default_rng(4)
    table = rng.standard_normal((7, 3)).astype(dtype)
    x, dy = rng.standard_normal((2, 2, 5, 3)).astype(dtype)
    layer = PositionEmbedding(7, 3, dtype=dtype)
    y, saved = layer.forward({"w": table}, x)
    assert_close(y, x + table[None, :5], dtype)
    grads = {"w": np.full((7, 3), np.nan, dtype)}
    np.testing.assert_array_equal(layer.backward({"w": table}, saved, dy, grads), dy)
    assert_close(grads["w"], np.concatenate([dy[0] + dy[1], np.zeros((2, 3))]), dtype)
    assert layer.init(rng)["w"].shape == (7, 3)


@pytest.mark.parametrize("shape", [(2, 8, 3), (2, 5, 4), (5, 3)])
def test_no_positions_for_other_shapes(shape):
    layer = PositionEmbedding(7, 3)
    with pytest.raises(fc.ArgumentError, match=r"\(B, T, 3\) with T at most 7"):
        layer.forward({"w": np.zeros((7, 3), np.float32)}, np.zeros(shape, np.float32))


def deferred(backend, tensor):
    mesh = fc.Mesh(backend, {"shard": -1, "tensor": tensor})
    normal = fc.initializers.normal
    initial = {"init": normal(std=0.2), "out_init": normal(std=0.1)}
    block = ParallelBlock(36, 3, 50, mesh["tensor"], **initial)
    positions = PositionEmbedding(7, 36, init=normal(std=2.0))
    rng = np.random.default_rng(0)
    units = [fc.Unit("block", block.init(rng)), fc.Unit("positions", positions.init(rng))]
    assert rng.integers(2**32) == np.random.default_rng(0).integers(2**32)  # nothing was drawn
    engine = fc.FSDP(units, mesh["shard"], tensor=mesh["tensor"])
    return engine.state_dict(full=True)


def test_deferred_values_do_not_depend_on_the_mesh():
    (alone,) = run(deferred, transport="sim", world_size=1, args=(1,))
    shapes = {f"block.{n}": s for n, s in oracle.block_shapes(36, 3, 50).items()}
    assert {name: alone[name].shape for name in shapes} == shapes
    for name, std in {
        "block.attention.qkv.w": 0.2,
        "block.attention.proj.w": 0.1,
        "block.mlp.up.w": 0.2,
        "block.mlp.down.w": 0.1,
        "positions.w": 2.0,
    }.items():
        assert alone[name].std() == pytest.approx(std, rel=0.1)
    for state in run(deferred, transport="sim", world_size=6, args=(3,)):
        for name in (*shapes, "positions.w"):
            np.testing.assert_array_equal(state[name], alone[name])
