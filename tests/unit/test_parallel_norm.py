"""Norms, and stretches that are cut along the sequence, compute what they do on whole sequences."""

from __future__ import annotations

import autograd.numpy as anp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import transformer_oracle
from support.parallel_cases import Case, check, check_ranks
from support.spmd import run
from support.tensor_parallel import random_values

import fsdpcore as fc
from fsdpcore.parallel import GatherSequence, LayerNorm, RMSNorm, ScatterSequence

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def layer_norm(params, x):
    centred = x - anp.mean(x, axis=-1, keepdims=True)
    unit = centred / anp.sqrt(anp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)
    return unit * params["gain"] + params["bias"]


def rms_norm(params, x):
    return x / anp.sqrt(anp.mean(x**2, axis=-1, keepdims=True) + 1e-5) * params["gain"]


FUNCTIONS = {LayerNorm: layer_norm, RMSNorm: rms_norm}
KINDS = list(FUNCTIONS)


def norm(kind, shape, along):
    def build(group, dtype):
        return kind(shape[-1], group, sequence_parallel=along, dtype=dtype)

    axis = -2 if along else None
    return Case(build, FUNCTIONS[kind], shape, axis, axis)


@pytest.mark.parametrize("along", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 8, 6), (2, 1, 4), (9, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_norm_of_whole_sequences(kind, shape, along):
    check_ranks(norm(kind, shape, along), (0, 1) if along else (0, 0))


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=4).map(tuple),
    st.sampled_from(KINDS),
    st.integers(2, 4),
)
def test_it_is_the_norm_of_whole_sequences_for_any_sizes(shape, kind, ranks):
    check(norm(kind, (*shape, 5), True), (ranks,))


def passed(layer, params, x, dy, grads):
    y, saved = layer.forward(params, x)
    return y, layer.backward(params, saved, dy, grads)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_group_it_is_an_ordinary_layer(kind):
    rng = np.random.default_rng(0)
    layer = kind(5, eps=1e-5, dtype=np.float64)
    initial = layer.init(rng)
    assert (initial["gain"] == 1).all()
    assert not initial.get("bias", np.zeros(1)).any()
    assert all(value.dtype == np.float64 for value in initial.values())
    params = random_values(dict.fromkeys(initial, (5,)), rng)
    x, dy = rng.standard_normal((2, 5)), rng.standard_normal((2, 5))
    grads = {name: np.full(5, np.nan) for name in params}
    y, dx = passed(layer, params, x, dy, grads)
    wanted = transformer_oracle.passes(FUNCTIONS[kind], params, x, dy)
    for got, want in zip((y, dx), wanted, strict=False):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)
    for name, want in wanted[2].items():
        np.testing.assert_allclose(grads[name], want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_of_sixteen_bits_are_computed_in_32(kind):
    """Squares of these overflow in float16, and their mean is lost in bfloat16."""
    rng = np.random.default_rng(0)
    for dtype in (np.dtype(np.float16), BFLOAT16):
        layer = kind(64, dtype=dtype)
        params = layer.init(rng)
        x = (300.0 + 3.0 * rng.standard_normal((10, 64))).astype(dtype)
        dy = rng.standard_normal((10, 64)).astype(dtype)
        grads = {name: np.zeros(64, np.float32) for name in params}
        y, dx = passed(layer, params, x, dy, grads)
        assert y.dtype == dx.dtype == dtype
        as_64 = {name: value.astype(np.float64) for name, value in params.items()}
        wanted = transformer_oracle.passes(
            FUNCTIONS[kind], as_64, x.astype(np.float64), dy.astype(np.float64)
        )
        eps = float(ml_dtypes.finfo(dtype).eps)
        for got, want in [(y, wanted[0]), (dx, wanted[1]), (grads["gain"], wanted[2]["gain"])]:
            error = np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want)
            assert error < eps


def _frozen(backend, kind, left):
    layer = kind(4, backend, sequence_parallel=True)
    params = layer.init(np.random.default_rng(0))
    x = np.random.default_rng(backend.rank).standard_normal((3, 4), dtype=np.float32)
    whole = {name: np.zeros(4, np.float32) for name in params}
    before = backend.order.issued
    passed(layer, params, x, x, whole)
    used = backend.order.issued - before
    grads = {name: np.zeros(4, np.float32) for name in left}
    passed(layer, params, x, x, grads)
    for name in left:
        np.testing.assert_array_equal(grads[name], whole[name])
    return used, backend.order.issued - before - used


@pytest.mark.parametrize("left", [["gain"], ["bias"], []])
def test_frozen_parameters_have_no_gradients(left):
    counts = run(_frozen, transport="sim", world_size=2, args=(LayerNorm, left))
    assert counts == [(1, 1 if left else 0)] * 2


def identity(params, x):
    return x + 0.0


def scatter(shape):
    return Case(lambda group, dtype: ScatterSequence(group), identity, shape, None, -2)


def join(shape):
    return Case(lambda group, dtype: GatherSequence(group), identity, shape, -2, None)


@pytest.mark.parametrize("shape", [(3, 5, 4), (1, 9, 2), (2, 1, 3), (8, 2), (2, 3, 4, 5)])
def test_a_stretch_along_the_sequence_begins_and_ends(shape):
    check_ranks(scatter(shape), (0, 1))
    check_ranks(join(shape), (2, 0))


def _kept(backend):
    x = np.zeros((2, 6, 4))
    part, _ = ScatterSequence(backend).forward({}, x)
    assert not np.shares_memory(part, x), "the part would keep the whole sequence in memory"
    assert not ScatterSequence(backend).init(np.random.default_rng(0))


def test_a_part_of_the_sequence_does_not_keep_the_rest_in_memory():
    run(_kept, transport="sim", world_size=2)


def _wrong(backend):
    with pytest.raises(fc.ArgumentError, match="pass them as group"):
        LayerNorm(4, sequence_parallel=True)
    with pytest.raises(fc.ArgumentError, match="width must be at least 1"):
        RMSNorm(0)
    with pytest.raises(fc.ArgumentError, match="eps must be at least 0"):
        LayerNorm(4, eps=-1.0)
    layer = RMSNorm(4, backend)
    with pytest.raises(fc.ArgumentError, match=r"shape \(\.\.\., 4\), got \(2, 5\)"):
        layer.forward(layer.init(np.random.default_rng(0)), np.zeros((2, 5), np.float32))
    for kind in (ScatterSequence, GatherSequence):
        with pytest.raises(fc.ArgumentError, match=r"\(\.\.\., sequence, features\), got \(4,\)"):
            kind(backend).forward({}, np.zeros(4))
        with pytest.raises(fc.ArgumentError, match="the group must be a Backend, such as"):
            kind("tensor")


def test_what_does_not_fit_is_refused():
    run(_wrong, transport="sim", world_size=2)
