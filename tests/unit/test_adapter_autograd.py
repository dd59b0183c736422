"""Functions of HIPS autograd as layers and losses, held against autograd's own gradients."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from typing import NamedTuple

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import fsdpcore as fc
from fsdpcore.adapters import autograd as adapter
from fsdpcore.adapters.autograd_tape import Tape

both_ways = pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "record"])


def arrays(dtype=np.float32, **shapes):
    rng = np.random.default_rng(7)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def zeros_like(params):
    return {name: np.zeros_like(array) for name, array in params.items()}


def passes(layer, params, x, dy, grads):
    """Output, and the gradient of the input."""
    y, saved = layer.forward(params, x)
    return y, layer.backward(params, saved, dy, grads)


def scaled_tanh(params, x):
    """With every kind of use: broadcast, twice, a single row, a mean (which autograd widens)."""
    y = anp.tanh(x @ params["w"] + params["b"]) * params["w"][0]
    return y + anp.mean(x, axis=1, keepdims=True)


@both_ways
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_a_layer_has_autograds_gradients_in_the_dtypes_of_its_arrays(recompute, dtype):
    params = arrays(dtype, w=(4, 3), b=(3,))
    given = arrays(dtype, x=(5, 4), dy=(5, 3))
    x, dy = given["x"], given["dy"]
    layer = adapter.layer(scaled_tanh, params, recompute=recompute)
    grads = zeros_like(params)
    y, dx = passes(layer, params, x, dy, grads)

    vjp, value = autograd.make_vjp(lambda both: scaled_tanh(*both))((params, x))
    want_grads, want_dx = vjp(dy)
    assert_array_equal(y, value)
    tolerance = 8 * float(np.finfo(dtype).eps)
    assert dx.dtype == dtype
    assert_allclose(dx, want_dx, rtol=tolerance, atol=tolerance)
    for name, gradient in grads.items():
        assert gradient.dtype == dtype
        assert_allclose(gradient, want_grads[name], rtol=tolerance, atol=4 * tolerance)


@both_ways
def test_gradients_have_the_dtypes_of_their_arrays_where_these_are_mixed(recompute):
    params = arrays(np.float32, w=(4, 3), b=(3,))
    given = arrays(np.float64, x=(5, 4), dy=(5, 3))
    layer = adapter.layer(scaled_tanh, params, recompute=recompute)
    grads = zeros_like(params)
    y, dx = passes(layer, params, given["x"], given["dy"], grads)
    assert y.dtype == dx.dtype == np.float64
    for name, gradient in grads.items():
        assert gradient.dtype == np.float32, name
        assert gradient.any()


@both_ways
def test_what_is_frozen_or_of_integers_gets_no_gradient(recompute):
    def look_up(params, x):
        return (params["table"][x] + params["offset"])[:, params["order"]]

    params = {**arrays(table=(6, 3), offset=(3,)), "order": np.array([2, 0, 1])}
    x = np.array([5, 0, 5, 2])
    dy = arrays(dy=(4, 3))["dy"]
    grads = {"table": np.zeros((6, 3), np.float32)}  # as an engine has it: the others are frozen
    layer = adapter.layer(look_up, params, recompute=recompute)
    y, dx = passes(layer, params, x, dy, grads)
    assert dx is None
    assert list(grads) == ["table"]
    want = np.zeros((6, 3))
    np.add.at(want, x, dy[:, [1, 2, 0]])
    assert_allclose(grads["table"], want, rtol=1e-6)
    assert_array_equal(y, look_up(params, x))


class Two(NamedTuple):
    """What a layer hands on to the next one."""

    rows: np.ndarray
    mask: np.ndarray


@both_ways
def test_inputs_and_outputs_may_be_nested(recompute):
    def halves(params, x):
        rows, (mask, labels) = x
        kept = rows * params["gain"] * mask
        assert labels == "labels"
        return Two(kept, mask), {"sum": anp.sum(kept), "rows": rows}

    params = arrays(gain=(3,))
    rows, mask = arrays(rows=(2, 3))["rows"], np.array([[1, 0, 1], [1, 1, 0]])
    layer = adapter.layer(halves, params, recompute=recompute)
    grads = zeros_like(params)
    d_kept = arrays(d=(2, 3))["d"]
    dy = (Two(d_kept, None), {"sum": np.float32(2), "rows": np.ones((2, 3), np.float32)})
    y, dx = passes(layer, params, [rows, (mask, "labels")], dy, grads)
    assert isinstance(y[0], Two)
    assert_array_equal(y[0].rows, rows * params["gain"] * mask)
    d_rows, (d_mask, d_labels) = dx
    assert (d_mask, d_labels) == (None, None)
    assert_allclose(d_rows, (d_kept + 2) * params["gain"] * mask + 1, rtol=1e-6)
    assert_allclose(grads["gain"], ((d_kept + 2) * rows * mask).sum(axis=0), rtol=1e-5)


@both_ways
def test_what_leads_nowhere_has_a_gradient_of_zeros(recompute):
    params = arrays(used=(3,), unused=(2,))
    x = arrays(x=(4, 3))["x"]
    layer = adapter.layer(lambda params, x: params["used"] * 2, params, recompute=recompute)
    grads = zeros_like(params)
    _, dx = passes(layer, params, x, np.ones(3, np.float32), grads)
    assert_array_equal(dx, np.zeros_like(x))
    assert_array_equal(grads["used"], [2, 2, 2])
    assert_array_equal(grads["unused"], [0, 0])
    _, dx = passes(layer, params, x, None, grads)  # what follows does not look at the output
    assert_array_equal(dx, np.zeros_like(x))


@both_ways
def test_outputs_are_apart_from_the_memory_of_the_parameters(recompute):
    """It is soon another unit's."""

    def constant(params, x):
        return params["table"][1:], params["table"].T, x

    params = arrays(table=(3, 2))
    x = np.ones(2, np.float32)
    y, _ = adapter.layer(constant, params, recompute=recompute).forward(params, x)
    assert_array_equal(y[0], params["table"][1:])
    assert_array_equal(y[1], params["table"].T)
    assert not any(np.may_share_memory(leaf, params["table"]) for leaf in y[:2])
    assert y[2] is x  # what needs no copy is not copied


@both_ways
def test_nothing_holds_the_parameters_after_the_passes(recompute):
    """Not until garbage is collected, either: their memory is used again at once."""
    layer = adapter.layer(scaled_tanh, {}, recompute=recompute)
    x, dy = arrays(x=(5, 4), dy=(5, 3)).values()
    gc.disable()
    try:
        params = arrays(w=(4, 3), b=(3,))
        seen = [weakref.ref(array) for array in params.values()]
        grads = zeros_like(params)
        y, saved = layer.forward(params, x)
        if recompute:
            del params
            assert [ref() for ref in seen] == [None, None]
            params = arrays(w=(4, 3), b=(3,))
            seen = [weakref.ref(array) for array in params.values()]
        dx = layer.backward(params, saved, dy, grads)
        del params, saved
        assert [ref() for ref in seen] == [None, None]
        assert dx.shape == x.shape
        assert y.shape == dy.shape
    finally:
        gc.enable()


def test_the_record_frees_what_it_has_gone_through():
    """What was computed on the way goes while gradients are taken, not after all of them."""
    alive = []
    values = []

    @autograd.extend.primitive
    def double(x):
        y = x * 2
        values.append(weakref.ref(y))
        return y

    def vjp_of_double(y, x):
        def vjp(g):
            alive.append(sum(ref() is not None for ref in values))
            return g * 2 + 0 * y

        return vjp

    autograd.extend.defvjp(double, vjp_of_double)
    tape = Tape(lambda x: anp.sum(double(double(double(x)))), np.ones(3))
    (gradient,) = tape.gradients(1.0)
    assert_array_equal(gradient, [8, 8, 8])
    assert alive == [3, 2, 1]


def test_a_function_may_differentiate_inside_while_other_threads_do_so():
    """autograd numbers nested differentiations by how many are open, whichever thread they are of.

    Here another one ends between the beginnings of ours and of the one inside of it, which would
    give both the same number, and a wrong result.
    """
    begun, go_on = threading.Event(), threading.Event()

    def slow(x):
        begun.set()
        assert go_on.wait(30)
        return x * x

    other = threading.Thread(target=autograd.grad(slow), args=(1.0,))
    other.start()
    assert begun.wait(30)

    def slopes(params, x):
        go_on.set()
        other.join(30)
        return autograd.elementwise_grad(lambda x: anp.sin(x * params["w"]))(x)

    x, w = np.array([0.3, 0.5, 0.7]), np.array([1.0, 2.0, 3.0])
    grads = {"w": np.zeros(3)}
    y, dx = passes(adapter.layer(slopes, {}, recompute=False), {"w": w}, x, np.ones(3), grads)
    assert not other.is_alive()
    assert_allclose(y, w * np.cos(w * x))
    assert_allclose(dx, -w * w * np.sin(w * x))
    assert_allclose(grads["w"], np.cos(w * x) - w * x * np.sin(w * x))


def test_a_loss_gives_the_gradient_of_what_it_judges():
    y, targets = arrays(y=(4, 3), targets=(4, 3)).values()
    compute = adapter.loss(lambda y, targets: anp.mean((y - targets) ** 2))
    value, dy = compute(y, targets)
    assert value == pytest.approx(np.mean((y - targets) ** 2))
    assert dy.dtype == np.float32
    assert_allclose(dy, (y - targets) / 6, rtol=1e-6)


def test_loss_and_grads_are_nested_like_the_parameters():
    params = {
        "a": {**arrays(w=(2, 3)), "order": np.array([1, 0])},
        "b": arrays(np.float64, unused=(2,)),
    }
    x = arrays(x=(4, 3))["x"]

    def loss(params, x):
        assert type(params) is dict
        return anp.sum((x @ params["a"]["w"].T)[:, params["a"]["order"]] ** 2)

    value, grads = adapter.loss_and_grads(loss)(params, x)
    y = x @ params["a"]["w"].T
    assert value == pytest.approx(np.sum(y * y))
    assert {unit: list(named) for unit, named in grads.items()} == {"a": ["w"], "b": ["unused"]}
    assert_allclose(grads["a"]["w"], 2 * y.T @ x, rtol=1e-5)
    assert grads["a"]["w"].dtype == np.float32
    assert_array_equal(grads["b"]["unused"], np.zeros(2))


def test_a_loss_that_is_a_view_of_a_parameter_outlives_it():
    params = {"u": {"w": np.ones((1, 1))}}
    value, _ = adapter.loss_and_grads(lambda params: params["u"]["w"].reshape(()))(params)
    params["u"]["w"][...] = 5
    assert value == 1


def test_initial_parameters_are_a_mapping_or_made_by_the_generator():
    fixed = {"w": fc.Spec(3), "b": np.ones(2, np.float32)}
    assert adapter.layer(scaled_tanh, fixed).init(np.random.default_rng(0)) is fixed
    drawn = adapter.layer(scaled_tanh, lambda rng: {"w": rng.normal(size=3)})
    found = drawn.init(np.random.default_rng(4))
    assert_array_equal(found["w"], np.random.default_rng(4).normal(size=3))


# What is refused.


def complaint(error, function, *args, **kwargs):
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def test_arguments_of_another_kind_are_refused():
    assert "function of (params, x)" in complaint(fc.ArgumentError, adapter.layer, 3, {})
    assert "got list" in complaint(fc.ArgumentError, adapter.layer, scaled_tanh, [])
    assert "loss(loss_fn)" in complaint(fc.ArgumentError, adapter.loss, None)
    assert "(params, *batch)" in complaint(fc.ArgumentError, adapter.loss_and_grads, "loss")


@pytest.mark.parametrize("value", [np.ones(3), (np.float64(1), 2), None, "loss", 1j])
def test_a_loss_that_is_no_number_is_refused(value):
    for compute in (adapter.loss(lambda y: value), adapter.loss_and_grads(lambda y: value)):
        assert "single number" in complaint(fc.ArgumentError, compute, {"u": {"w": np.ones(3)}})


def test_gradients_of_another_shape_than_the_output_are_refused():
    params, x = arrays(w=(4, 3), b=(3,)), arrays(x=(5, 4))["x"]
    layer = adapter.layer(scaled_tanh, params)
    text = complaint(fc.ArgumentError, passes, layer, params, x, np.ones((1, 3)), {})
    assert "(5, 3)" in text
    assert "(1, 3)" in text
    text = complaint(fc.ArgumentError, passes, layer, params, x, (x, x), {})
    assert "returned 1 values, and got gradients of 2" in text


@both_ways
def test_containers_of_autograds_own_are_refused(recompute):
    layer = adapter.layer(
        lambda params, x: anp.linalg.slogdet(x * params["w"]), {}, recompute=recompute
    )
    x = np.eye(2) + 1
    text = complaint(
        fc.ArgumentError, passes, layer, {"w": np.ones(1)}, x, (None, np.ones(())), {"w": x}
    )
    assert "plain tuple" in text


def test_a_record_is_used_once_and_where_the_parameters_still_are():
    params, x = arrays(w=(4, 3), b=(3,)), arrays(x=(5, 4))["x"]
    layer = adapter.layer(scaled_tanh, params, recompute=False)
    assert layer.holds_params
    assert not adapter.layer(scaled_tanh, params).holds_params
    y, saved = layer.forward(params, x)
    moved = {**params, "w": params["w"].copy()}
    text = complaint(fc.StateError, layer.backward, moved, saved, y, {})
    assert "['w']" in text
    assert "recompute=True" in text
    layer.backward(params, saved, y, zeros_like(params))
    assert "taken once" in complaint(fc.StateError, layer.backward, params, saved, y, {})


@both_ways
def test_arrays_of_a_gpu_are_refused(recompute, cupy):
    layer = adapter.layer(scaled_tanh, {}, recompute=recompute)
    params = {name: cupy.asarray(array) for name, array in arrays(w=(4, 3), b=(3,)).items()}
    x = np.ones((5, 4), np.float32)
    assert "computes with NumPy" in complaint(fc.UnsupportedError, layer.forward, params, x)


def test_without_autograd_there_is_a_command_that_helps(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "autograd"]:
        monkeypatch.setitem(sys.modules, name, None)
    for make in (lambda: adapter.layer(scaled_tanh, {}), lambda: adapter.loss(scaled_tanh)):
        assert "pip install -e '.[autograd]'" in complaint(fc.MissingDependencyError, make)
    with pytest.raises(fc.MissingDependencyError):
        adapter.loss_and_grads(scaled_tanh)
