"""Attention with its heads cut over ranks, against the unsharded formula and its derivative."""

from __future__ import annotations

import functools

import autograd
import autograd.numpy as anp
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
from fsdpcore.parallel.attention import ParallelAttention
from fsdpcore.parallel.heads import attend, attend_backward

WIDTH, HEADS, BATCH, LENGTH = 15, 5, 2, 7


def shapes(width=WIDTH, heads=HEADS):
    size = width // heads
    return {
        "qkv.w": (width, 3, heads, size),
        "qkv.b": (3, heads, size),
        "proj.w": (heads, size, width),
        "proj.b": (width,),
    }


def case(dtype, width=WIDTH, heads=HEADS, batch=BATCH, length=LENGTH):
    rng = np.random.default_rng(7)
    x, dy = rng.standard_normal((2, batch, length, width)).astype(dtype)
    return random_values(shapes(width, heads), rng, dtype), x, dy


def build(group, *, width=WIDTH, heads=HEADS, **options):
    return ParallelAttention(width, heads, group, **options)


@pytest.mark.parametrize("along_sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(
    ("world_size", "dtype"), [*((n, np.float64) for n in (1, 2, 3, 4)), (3, np.float32)]
)
def test_it_is_the_unsharded_attention(world_size, dtype, along_sequence):
    params, x, dy = case(dtype)
    got = passes(
        functools.partial(build, sequence_parallel=along_sequence),
        params,
        x,
        dy,
        world_size,
        along_sequence=along_sequence,
    )
    assert_passes_equal(got, oracle.passes(oracle.attention, *case(np.float64)), dtype)


@pytest.mark.parametrize(
    ("width", "heads", "batch", "length"), [(1, 1, 1, 1), (6, 6, 1, 3), (8, 1, 3, 1)]
)
def test_extents_may_be_one(width, heads, batch, length):
    sizes = {"width": width, "heads": heads, "batch": batch, "length": length}
    wanted = oracle.passes(oracle.attention, *case(np.float64, **sizes))
    for world_size in range(1, min(heads, 3) + 1):
        for along_sequence in (False, True):
            got = passes(
                functools.partial(
                    build, width=width, heads=heads, sequence_parallel=along_sequence
                ),
                *case(np.float64, **sizes),
                world_size,
                along_sequence=along_sequence,
            )
            assert_passes_equal(got, wanted, np.float64)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("batch", "length"), [(2, 0), (0, 3)])
def test_there_may_be_no_positions(batch, length, causal):
    saved = attend(np.ones((batch, length, 3, 2, 4), np.float32), causal=causal)
    assert saved.mixed.shape == (batch, length, 2, 4)
    assert attend_backward(saved, saved.mixed).shape == (batch, length, 3, 2, 4)


def test_without_a_mask_positions_see_all_others():
    got = passes(functools.partial(build, causal=False), *case(np.float64), 2)
    wanted = oracle.passes(functools.partial(oracle.attention, causal=False), *case(np.float64))
    assert_passes_equal(got, wanted, np.float64)


def test_large_scores_do_not_overflow():
    params, x, dy = case(np.float32)
    for name in ("qkv.w", "qkv.b"):
        params[name] = params[name] * np.float32(1e3)
    y, dx, grads = passes(build, params, x, dy, 2)
    assert all(np.isfinite(array).all() for array in (y, dx, *grads.values()))


def softmax_of_positions(qkv):
    query, key, value = (qkv[:, :, i] for i in range(3))
    scores = anp.einsum("bthd,bshd->bhts", query, key) / anp.sqrt(qkv.shape[-1])
    scores = scores - anp.max(scores, axis=-1, keepdims=True)
    weights = anp.exp(scores) / anp.sum(anp.exp(scores), axis=-1, keepdims=True)
    return anp.einsum("bhts,bshd->bthd", weights, value)


def check_heads(qkv):
    """The result is rounded once, by half an eps; scores and sums are not rounded to 16 bits.

    In the gradient are weights and results that were, and dot products of rows of 16 of these.
    (d is a power of 4 here, so that scaling the queries rounds nothing.)
    """
    dtype, exact = qkv.dtype, qkv.astype(np.float64)
    dout = np.random.default_rng(2).standard_normal((*qkv.shape[:2], *qkv.shape[3:])).astype(dtype)
    back, wanted = autograd.make_vjp(softmax_of_positions)(exact)
    saved = attend(qkv.copy(), causal=False)
    gradient = attend_backward(saved, dout)
    assert saved.mixed.dtype == gradient.dtype == dtype
    gradients = gradient, back(dout.astype(np.float64))
    for got, right, roundings in ((saved.mixed, wanted, 0.51), (*gradients, 4)):
        error = np.abs(got.astype(np.float64) - right).max()
        assert error <= roundings * float(ml_dtypes.finfo(dtype).eps) * np.abs(right).max()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_scores_of_sixteen_bits_are_in_float32(dtype):
    """In bfloat16 a score of 50 is off by up to 1/8, and its exponential as much."""
    qkv = 4.0 * np.random.default_rng(1).standard_normal((2, 8, 3, 2, 16))
    scores = np.einsum("bthd,bshd->bhts", qkv[:, :, 0], qkv[:, :, 1]) / 4
    assert np.abs(scores).max() > 50
    check_heads(qkv.astype(dtype))


def test_scores_and_sums_may_be_larger_than_float16_holds():
    qkv = np.random.default_rng(1).standard_normal((1, 8, 3, 2, 16))
    qkv[:, :, :2] *= 300.0
    assert np.einsum("bthd,bshd->bhts", qkv[:, :, 0], qkv[:, :, 1]).max() / 4 > 65504
    check_heads(qkv.astype(np.float16))
    alike = np.zeros((1, 128, 3, 1, 4), np.float16)
    alike[:, :, 2] = 1000.0  # 128 of them are added up before they are divided by 128
    check_heads(alike)


def test_initial_values_do_not_depend_on_the_number_of_ranks():
    alone = initial_values(build, 1)
    assert {name: value.shape for name, value in alone.items()} == shapes()
    for world_size in (2, 3):
        for name, value in initial_values(build, world_size).items():
            assert value.dtype == np.float32
            np.testing.assert_array_equal(value, alone[name])


def test_initial_values_have_the_deviations_that_are_asked_for():
    wide = functools.partial(build, width=60, init=0.25, out_init=2.0, dtype=np.float64)
    values = initial_values(wide, 2)
    assert values["qkv.w"].std() == pytest.approx(0.25, rel=0.05)
    assert values["proj.w"].std() == pytest.approx(2.0, rel=0.05)
    assert not values["qkv.b"].any()
    assert not values["proj.b"].any()


def frozen(backend, params, x, dy):
    layer = build(backend)
    grads = {"proj.w": np.zeros_like(params["proj.w"])}
    _, saved = layer.forward(params, x)
    layer.backward(params, saved, dy, grads)
    return grads


def test_frozen_parameters_have_no_gradients():
    params, x, dy = case(np.float64)
    (grads,) = run(frozen, transport="sim", world_size=1, args=(params, x, dy))
    wanted = oracle.passes(oracle.attention, params, x, dy)[2]
    assert list(grads) == ["proj.w"]
    np.testing.assert_allclose(grads["proj.w"], wanted["proj.w"], rtol=1e-12)


def refused(backend, sizes, words):
    with pytest.raises(fc.ArgumentError, match=words):
        build(backend, **sizes)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"width": 16, "heads": 5}, "width of 16 does not split into 5 heads"),
        ({"width": 15, "heads": 1}, "1 heads are not enough for the 2 ranks"),
        ({"width": 0, "heads": 1}, "width of an attention"),
        ({"init": -1.0}, "init as a standard deviation must be at least 0"),
    ],
)
def test_what_does_not_split_is_refused(sizes, words):
    run(refused, transport="sim", world_size=2, args=(sizes, words))


def wrong_shape(backend):
    layer = build(backend)
    for shape in ((LENGTH, WIDTH), (BATCH, LENGTH, WIDTH + 1)):
        with pytest.raises(fc.ArgumentError, match=r"\(B, T, 15\)"):
            layer.forward({}, np.zeros(shape, np.float32))


def test_input_of_another_shape_is_refused():
    run(wrong_shape, transport="sim", world_size=1)
