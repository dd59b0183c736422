"""Engines on random meshes with random cuts, against whole arrays in plain NumPy."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support.fsdp_steps import launch
from support.fsdp_tensor import Grid, Model, PlainAdamW, assert_state, engine_on, train

import fsdpcore as fc
from fsdpcore.core.device import HOST
from fsdpcore.core.geometry.boxes import ArrayBox
from fsdpcore.fsdp.optim.blocks import Matrices, blocks, placed
from fsdpcore.fsdp.units.filling import fill

GRIDS = st.builds(
    Grid,
    tensor=st.integers(1, 3),
    shard=st.integers(1, 2),
    replicate=st.integers(1, 2),
    strategy=st.sampled_from(
        ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard", "hybrid_shard"]
    ),
)
SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def models(draw):
    """Units of parameters of any shape, some of them cut along an axis wherever it may be."""
    shapes, axes, cuts = {}, {}, {}
    for number in range(draw(st.integers(1, 3))):
        named = shapes[f"u{number}"] = {}
        for place in range(draw(st.integers(1, 3))):
            name, shape = f"p{place}", draw(SHAPES)
            named[name] = shape
            if shape and draw(st.booleans()):
                full = f"u{number}.{name}"
                axis = axes[full] = draw(st.integers(0, len(shape) - 1))
                cuts[full] = draw(st.lists(st.integers(0, shape[axis]), min_size=2, max_size=2))

    def bounds(name, extent, tensor):
        return [0, *sorted(cuts[name])[: tensor - 1], extent]

    return Model(shapes, axes, bounds=bounds)


CASES = {"grid": GRIDS, "model": models(), "clip": st.sampled_from([None, 0.5])}


@settings(max_examples=16, deadline=None)
@given(**CASES)
def test_training_on_any_mesh(grid, model, clip):
    check(grid, model, clip)


@pytest.mark.campaign
def test_training_on_any_mesh_at_length():
    settings(max_examples=2000, deadline=None)(given(**CASES)(check))()


def check(grid, model, clip):
    """Norms, states and what is dealt out again are those of whole arrays."""

    def body(backend):
        engine = engine_on(grid, backend, model)
        norms = train(engine, model, range(2), clip=clip)
        state = engine.state_dict(full=True)
        fresh = engine_on(grid, backend, model)
        fresh.load_state_dict(state if backend.rank == 0 else None, src=0)
        return norms, state.arrays, fresh.state_dict(full=True).arrays

    expected = PlainAdamW(model.params)
    norms = [expected.step(model.mean_gradients(step, grid.data), clip) for step in range(2)]
    for found, arrays, loaded in launch(body, grid.ranks):
        if clip is not None:
            assert_allclose(found, norms, rtol=1e-12)
        assert_state(arrays, expected.state(), 1e-12)
        assert_state(loaded, arrays, 0.0)


@st.composite
def cut_boxes(draw, extents, least_axes):
    """A box that is not empty."""
    whole = draw(st.lists(extents, min_size=least_axes, max_size=4))
    start = [draw(st.integers(0, extent - 1)) for extent in whole]
    shape = [draw(st.integers(1, extent - s)) for extent, s in zip(whole, start, strict=True)]
    return ArrayBox(tuple(whole), tuple(start), tuple(shape))


# Some of them have more elements than are drawn at a time.
LARGE = st.one_of(st.integers(1, 9), st.integers(40, 90))


@settings(max_examples=50, deadline=None)
@given(box=cut_boxes(LARGE, 0), data=st.data())
def test_elements_of_a_deferred_box_are_those_of_the_whole(box, data):
    spec = fc.Spec(box.whole, np.float32, fc.initializers.uniform())
    if spec.size > 1 << 19:
        spec = fc.Spec(box.whole, np.float32, fc.initializers.constant(2.0))
    whole = np.empty(spec.size, np.float32)
    spec.init.fill(whole, 0, seed=5, name="u.w")
    expected = whole.reshape(box.whole)[box.slices].reshape(-1)
    start = data.draw(st.integers(0, box.size))
    stop = data.draw(st.integers(start, box.size))
    for dtype in (np.float32, np.float64):
        found = np.empty(stop - start, dtype)
        fill(HOST, found, spec[box.slices], start, seed=5, name="u.w")
        assert_array_equal(found, expected[start:stop])


@settings(max_examples=200, deadline=None)
@given(box=cut_boxes(st.integers(1, 4), 0))
def test_a_box_is_a_run_if_it_has_no_gaps(box):
    whole = np.arange(math.prod(box.whole)).reshape(box.whole)
    elements = whole[box.slices].reshape(-1)
    first, stop = int(elements[0]), int(elements[-1]) + 1
    assert box.run == ((first, stop) if stop - first == elements.size else None)


def test_an_empty_box_is_an_empty_run():
    assert ArrayBox((3, 4), (1, 4), (2, 0)).run == (0, 0)
    assert ArrayBox((0, 4), (0, 1), (0, 2)).run == (0, 0)
    assert ArrayBox((), (), ()).run == (0, 1)


def test_a_deferred_box_takes_memory_for_blocks_only():
    spec = fc.Spec((2048, 4096), init=fc.initializers.normal(std=0.1))[:, 1000:1100]  # of 32 MiB
    out = np.empty(spec.size, np.float32)
    tracemalloc.start()
    try:
        fill(HOST, out, spec, 0, seed=0, name="u.w")
        assert tracemalloc.get_traced_memory()[1] < 6 * 2**20
    finally:
        tracemalloc.stop()


@settings(max_examples=100, deadline=None)
@given(box=cut_boxes(st.integers(1, 5), 2), limit=st.integers(1, 60), data=st.data())
def test_blocks_of_a_box_are_blocks_of_the_whole(box, limit, data):
    whole = np.arange(math.prod(box.whole)).reshape(box.whole)
    own = whole[box.slices].reshape(-1)
    start = data.draw(st.integers(0, box.size))
    stop = data.draw(st.integers(start, box.size))
    matrices, at = whole.reshape(Matrices.of(box.whole)), start
    for found in blocks(start, stop, Matrices.of(box.shape), limit):
        for each in placed(found, box):
            inside = matrices[each.batches, each.rows, each.columns]
            assert each.start == at
            assert inside.shape == each.shape
            assert_array_equal(inside.reshape(-1), own[at : each.stop])
            at = each.stop
    assert at == stop
