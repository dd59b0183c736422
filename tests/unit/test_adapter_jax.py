"""Functions of JAX as layers and losses, held against JAX's own gradients."""

from __future__ import annotations

import functools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.fsdp_steps import launch
from support.jax_bits import with_64_bits

import fsdpcore as fc
from fsdpcore.adapters import jax as adapter

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# The same in most tests: JAX does not compile again what it has compiled.
SHAPES = {"w": (16, 16), "b": (16,)}
BATCH = {"x": (5, 16), "dy": (5, 16)}

WAYS = {
    "compiled": {},
    "compiled-record": {"recompute": False},
    "step-by-step": {"jit": False},
    "step-by-step-record": {"recompute": False, "jit": False},
}
each_way = pytest.mark.parametrize("how", list(WAYS.values()), ids=list(WAYS))
compiled = pytest.mark.parametrize("how", [{}, {"recompute": False}], ids=["anew", "record"])


def arrays(dtype=np.float32, **shapes):
    rng = np.random.default_rng(7)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def zeros_like(params):
    return {name: np.zeros_like(array) for name, array in params.items()}


def passes(layer, params, x, dy, grads):
    """Output, and the gradient of the input."""
    y, saved = layer.forward(params, x)
    return y, layer.backward(params, saved, dy, grads)


def lying(array, offset):
    """A read-only array of the same values as the engine shows them, and what it is a view of.

    It begins ``offset`` bytes behind a multiple of 64.
    """
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    memory = memory[start : start + array.nbytes]
    memory[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    shown = np.asarray(memory.data.toreadonly()).view(array.dtype).reshape(array.shape)
    assert shown.ctypes.data % 64 == offset
    return shown, memory


def scaled_tanh(params, x):
    """With every kind of use: broadcast, twice, a single row, a mean."""
    y = jnp.tanh(x @ params["w"] + params["b"]) * params["w"][0]
    return y + jnp.mean(x, axis=1, keepdims=True)


@functools.cache
def tanh_layer(**how):
    """A layer has no state, so one serves all tests, and is compiled once."""
    return adapter.layer(scaled_tanh, {}, **how)


@functools.cache
def differentiated(dtype):
    """Output, gradients and input's gradient of ``scaled_tanh``, by JAX alone."""
    params, given = arrays(dtype, **SHAPES), arrays(dtype, **BATCH)

    @jax.jit
    def compute(params, x, dy):
        y, vjp = jax.vjp(scaled_tanh, params, x)
        return y, *vjp(dy)

    return compute(params, *given.values())


@pytest.mark.parametrize(
    ("dtype", "how"),
    [
        *((np.dtype(np.float32), how) for how in WAYS.values()),
        (np.dtype(np.float16), {}),
        (BFLOAT16, {"recompute": False}),
    ],
    ids=[*WAYS, "float16", "bfloat16"],
)
def test_a_layer_has_jaxs_gradients_in_the_dtypes_of_its_arrays(dtype, how):
    params = arrays(dtype, **SHAPES)
    x, dy = arrays(dtype, **BATCH).values()
    layer = tanh_layer(**how)
    grads = zeros_like(params)
    y, dx = passes(layer, params, x, dy, grads)

    value, want_grads, want_dx = differentiated(dtype)
    tolerance = 8 * float(jnp.finfo(dtype).eps)

    def assert_close(found, want):
        assert type(found) is np.ndarray
        assert found.dtype == dtype
        found, want = found.astype(np.float64), np.asarray(want, np.float64)
        assert_allclose(found, want, rtol=tolerance, atol=4 * tolerance)

    assert_close(y, value)
    assert_close(dx, want_dx)
    for name, gradient in grads.items():
        assert_close(gradient, want_grads[name])


@compiled
def test_gradients_of_an_output_are_taken_in_its_dtype(how):
    """As of a loss in float32 that follows layers in 16 bits."""
    params = arrays(np.float16, **SHAPES)
    x, dy = arrays(np.float16, **BATCH).values()
    layer, results = tanh_layer(**how), []
    for given in (dy, dy.astype(np.float32)):
        grads = zeros_like(params)
        results.append((*passes(layer, params, x, given, grads), *grads.values()))
    for narrow, wide in zip(*results, strict=True):
        assert narrow.dtype == wide.dtype == np.float16
        assert_allclose(narrow, wide, rtol=1e-2, atol=1e-2)  # JAX may round once less


@compiled
def test_what_is_frozen_or_of_integers_gets_no_gradient(how):
    def look_up(params, x):
        return (params["table"][x] + params["offset"])[:, params["order"]]

    params = {**arrays(table=(6, 3), offset=(3,)), "order": np.array([2, 0, 1])}
    x = np.array([5, 0, 5, 2])
    dy = arrays(dy=(4, 3))["dy"]
    grads = {"table": np.zeros((6, 3), np.float32)}  # as an engine has it: the others are frozen
    y, dx = passes(adapter.layer(look_up, params, **how), params, x, dy, grads)
    assert dx is None
    assert list(grads) == ["table"]
    want = np.zeros((6, 3))
    np.add.at(want, x, dy[:, [1, 2, 0]])
    assert_allclose(grads["table"], want, rtol=1e-6)
    assert_array_equal(y, look_up(params, x))


@each_way
def test_functions_see_parameters_in_the_order_of_their_declaration(how):
    """Of themselves, dicts that are passed to what JAX has compiled are sorted."""
    seen = []

    def product(params, x):
        seen.append(list(params))
        return x * params["a"] * params["c"] * params["b"]

    params = arrays(c=(2,), a=(2,), b=(2,))
    x = np.ones(2, np.float32)
    grads = {"a": np.zeros(2, np.float32), "c": np.zeros(2, np.float32)}
    _, dx = passes(adapter.layer(product, {}, **how), params, x, x, grads)
    assert seen
    assert_allclose(dx, np.prod(list(params.values()), axis=0), rtol=1e-6)
    assert_allclose(grads["c"], params["a"] * params["b"], rtol=1e-6)

    def units(whole):
        seen.append([name for named in whole.values() for name in named])
        return sum(jnp.sum(array) for named in whole.values() for array in named.values())

    jit = how.get("jit", True)
    whole = {"z": {"c": params["c"], "a": params["a"]}, "y": {"b": params["b"]}}
    _, found = adapter.loss_and_grads(units, jit=jit)(whole)
    assert list(found) == ["z", "y"]
    assert [names for names in seen if names != ["c", "a", "b"]] == []


class Two(NamedTuple):
    """What a layer hands on to the next one."""

    rows: np.ndarray
    mask: np.ndarray


@compiled
def test_inputs_and_outputs_may_be_trees(how):
    def halves(params, x):
        rows, (mask, nothing) = x
        kept = rows * params["gain"] * mask
        assert nothing is None
        return Two(kept, mask), {"sum": jnp.sum(kept), "rows": rows}

    params = arrays(gain=(3,))
    rows, mask = arrays(rows=(2, 3))["rows"], np.array([[1, 0, 1], [1, 1, 0]])
    layer = adapter.layer(halves, params, **how)
    grads = zeros_like(params)
    d_kept = arrays(d=(2, 3))["d"]
    dy = (Two(d_kept, None), {"sum": np.float32(2), "rows": np.ones((2, 3), np.float32)})
    y, dx = passes(layer, params, [rows, (mask, None)], dy, grads)
    assert isinstance(y[0], Two)
    assert_array_equal(y[0].rows, rows * params["gain"] * mask)
    d_rows, (d_mask, d_nothing) = dx
    assert (d_mask, d_nothing) == (None, None)
    assert_allclose(d_rows, (d_kept + 2) * params["gain"] * mask + 1, rtol=1e-6)
    assert_allclose(grads["gain"], ((d_kept + 2) * rows * mask).sum(axis=0), rtol=1e-5)

    y, dx = passes(layer, params, [rows, (mask, None)], None, grads)  # nobody looks at the output
    assert_array_equal(dx[0], np.zeros_like(rows))
    assert_array_equal(grads["gain"], np.zeros(3))


@each_way
def test_a_number_is_an_output_without_dimensions(how):
    params, x = arrays(**SHAPES), arrays(**BATCH)["x"]
    layer = adapter.layer(lambda params, x: (x * params["b"][0], 2.5, 3), {}, **how)
    (y, number, whole), saved = layer.forward(params, x)
    assert (number, number.dtype, number.shape) == (2.5, np.float32, ())
    assert (whole, whole.shape) == (3, ())
    grads = {name: np.zeros_like(array) for name, array in params.items()}
    dx = layer.backward(params, saved, (np.ones_like(y), np.float32(1), None), grads)
    assert_allclose(dx, np.broadcast_to(params["b"][0], x.shape), rtol=1e-6)


@compiled
def test_random_keys_go_through(how):
    def scale(params, x):
        rows, key = x
        return rows * params["gain"], key

    params, rows = arrays(gain=(8,)), np.ones((4, 8), np.float32)
    key = jax.random.wrap_key_data(np.arange(2, dtype=np.uint32))
    grads = zeros_like(params)
    layer = adapter.layer(scale, params, **how)
    (y, same), (d_rows, nothing) = passes(layer, params, (rows, key), (rows, None), grads)
    assert_array_equal(np.asarray(y), rows * params["gain"])
    assert_array_equal(jax.random.key_data(same), [0, 1])
    assert_array_equal(np.asarray(d_rows), rows * params["gain"])
    assert_array_equal(grads["gain"], np.full(8, 4))
    assert nothing is None


@compiled
def test_what_goes_in_decides_which_arrays_come_out(how):
    params = arrays(**SHAPES)
    x, dy = arrays(**BATCH).values()
    layer = tanh_layer(**how)
    for make, kind in ((np.asarray, np.ndarray), (jnp.asarray, jax.Array)):
        y, dx = passes(layer, params, make(x), make(dy), zeros_like(params))
        assert isinstance(y, kind)
        assert isinstance(dx, kind)
        loss, d_loss = adapter.loss(lambda y: jnp.sum(y * y))(make(x))
        assert isinstance(d_loss, kind)
        assert isinstance(loss, np.float32)


# The memory of the parameters.


def pointer(array):
    return array.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_jax_sees_the_engines_memory_where_it_is_aligned(dtype):
    seen = {}

    def look(params, x):
        seen.update({name: pointer(array) for name, array in params.items()})
        return x * params["aligned"].sum()

    values = arrays(dtype, aligned=(40, 3), not_aligned=(5,))
    aligned, _ = lying(values["aligned"], 0)
    other, _ = lying(values["not_aligned"], 4)
    layer = adapter.layer(look, {}, jit=False)
    layer.forward({"aligned": aligned, "not_aligned": other}, np.ones(3, dtype))
    assert seen["aligned"] == aligned.ctypes.data
    assert seen["not_aligned"] != other.ctypes.data


@pytest.mark.parametrize("offset", [0, 4])
def test_compiled_functions_see_it_too(offset):
    """Something writes to the memory in the middle of the function, which reads it after that."""
    shown, memory = lying(np.arange(50, dtype=np.float32), offset)

    def write(place):
        memory.view(np.float32)[int(place)] = -1
        return place

    def late(params, x):
        place = jax.pure_callback(write, jax.ShapeDtypeStruct((), np.int32), x)
        return params["w"][place]

    y, _ = adapter.layer(late, {}).forward({"w": shown}, np.int32(7))
    assert y == (-1 if offset == 0 else 7)


def everything(params, x):
    """All that can lie in the memory of a parameter, or be it."""
    w = params["w"]
    return w, w.reshape(-1), jnp.asarray(w), w[:], w.T, {"x": x, "w": (params["w"],)}


def through_numpy(params, x):
    """What only a function that is not compiled can do."""
    shown = np.asarray(params["w"])
    return shown, shown[1:], jax.device_put(shown[1:]), x


@pytest.mark.parametrize(
    ("function", "how"),
    [
        (everything, {}),
        (everything, {"recompute": False}),
        (everything, {"jit": False, "recompute": False}),
        (through_numpy, {"jit": False}),
    ],
)
@pytest.mark.parametrize(
    ("kind", "offset"),
    [(np.asarray, 0), (jnp.asarray, 0), (jnp.asarray, 4)],
    ids=["numpy", "jax", "jax, apart"],
)
def test_outputs_are_apart_from_the_memory_of_the_parameters(function, how, kind, offset):
    """It is soon another unit's."""
    values = np.arange(64, dtype=np.float32).reshape(16, 4)  # a row is 16 bytes
    shown, memory = lying(values, offset)
    layer = adapter.layer(function, {}, **how)
    y, _ = layer.forward({"w": shown}, kind(np.ones(3, np.float32)))
    leaves = jax.tree_util.tree_leaves(y)
    before = [np.array(leaf) for leaf in leaves]
    memory[:] = 255
    for leaf, copy in zip(leaves, before, strict=True):
        assert_array_equal(np.asarray(leaf), copy)
    assert_array_equal(before[0], values)


@each_way
def test_nothing_that_is_kept_lies_in_the_memory_of_the_parameters(how):
    """Not from one pass to the other either, so that any strategy may free them in between."""
    values = arrays(**SHAPES)
    x, dy = arrays(**BATCH).values()
    layer = tanh_layer(**how)
    want = zeros_like(values)
    want_y, want_dx = passes(layer, values, x, dy, want)

    first = {name: lying(array, 0) for name, array in values.items()}
    y, saved = layer.forward({name: shown for name, (shown, _) in first.items()}, x)
    for _, memory in first.values():
        memory[:] = 255
    second = {name: lying(array, 0) for name, array in values.items()}
    grads = zeros_like(values)
    dx = layer.backward({name: shown for name, (shown, _) in second.items()}, saved, dy, grads)
    for _, memory in second.values():
        memory[:] = 255
    assert_array_equal(y, want_y)
    assert_array_equal(dx, want_dx)
    for name, gradient in grads.items():
        assert_array_equal(gradient, want[name])


def test_what_is_kept_instead_of_recomputing_is_no_copy_of_parameters():
    def dense(params, x):
        return jnp.tanh(x @ params["w"]) @ params["v"]

    params = arrays(w=(32, 48), v=(48, 32))
    _, saved = adapter.layer(dense, {}, recompute=False).forward(params, arrays(x=(5, 32))["x"])
    sizes = {leaf.size for leaf in jax.tree_util.tree_leaves(saved)}
    assert sizes <= {5 * 32, 5 * 48}


def test_a_parameter_that_a_function_has_kept_cannot_be_read_later():
    kept = []

    def keep(params, x):
        kept.append(params["w"])
        return x

    params = {"w": lying(np.ones((4, 4), np.float32), 0)[0]}
    adapter.layer(keep, {}, jit=False).forward(params, np.ones(2, np.float32))
    with pytest.raises(RuntimeError, match="deleted"):
        kept[0].sum()

    def fail(params, x):
        kept.append(params["w"])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        adapter.layer(fail, {}, jit=False).forward(params, np.ones(2, np.float32))
    with pytest.raises(RuntimeError, match="deleted"):
        kept[1].sum()


def test_where_jax_has_found_a_gpu_it_computes_on_the_host_nevertheless(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    devices = []

    def look(params, x):
        devices.append(jax.config.jax_default_device)
        return x * params["w"]

    x = np.ones(2, np.float32)
    params = {"w": x}
    passes(adapter.layer(look, {}), params, x, x, zeros_like(params))
    adapter.loss(lambda y: jnp.sum(look(params, y)))(x)
    adapter.loss_and_grads(lambda params: jnp.sum(look(params["a"], x)))({"a": params})
    assert [device.platform for device in devices] == ["cpu"] * 4
    assert jax.config.jax_default_device is None


# Compiling.


def test_layers_of_one_function_share_what_is_compiled():
    traced = []

    def dense(params, x):
        traced.append(x.shape)
        return jnp.tanh(x @ params["w"])

    for recompute, times in ((True, 2), (False, 1)):  # the forward pass and the backward pass
        traced.clear()
        layers = [adapter.layer(dense, {}, recompute=recompute) for _ in range(3)]
        for seed in range(4):
            x = np.random.default_rng(seed).normal(size=(5, 6)).astype(np.float32)
            for layer in layers:
                params = arrays(w=(6, 6))
                passes(layer, params, x, x, zeros_like(params))
        assert traced == [(5, 6)] * times


def test_losses_are_compiled_once_for_a_shape():
    traced = []

    def squares(params, x, factor):
        traced.append(x.shape)
        return jnp.sum((x * params["a"]["w"]) ** 2) * factor

    compute = adapter.loss_and_grads(squares)
    for factor in (1.0, 2.0, 3.0):
        compute({"a": arrays(w=(3,))}, np.ones(3, np.float32), factor)
    assert traced == [(3,)]


# Losses.


def test_a_loss_gives_the_gradient_of_what_it_judges():
    y, targets = arrays(y=(4, 3), targets=(4, 3)).values()
    for jit in (True, False):
        compute = adapter.loss(lambda y, targets: jnp.mean((y - targets) ** 2), jit=jit)
        value, dy = compute(y, targets)
        assert value == pytest.approx(np.mean((y - targets) ** 2))
        assert dy.dtype == np.float32
        assert_allclose(dy, (y - targets) / 6, rtol=1e-6)
    value, dy = adapter.loss(lambda y: jnp.sum(y[0] * y[1]))((y, np.arange(3)))
    assert_array_equal(dy[0], np.tile(np.arange(3), (4, 1)))
    assert dy[1] is None


@pytest.mark.parametrize("jit", [True, False])
def test_loss_and_grads_are_nested_like_the_parameters(jit):
    params = {
        "a": {**arrays(w=(2, 3)), "order": np.array([1, 0])},
        "b": arrays(np.float16, unused=(2,)),
    }
    x = arrays(x=(4, 3))["x"]

    def loss(params, x):
        assert type(params["a"]) is dict
        return jnp.sum((x @ params["a"]["w"].T)[:, params["a"]["order"]] ** 2)

    value, grads = adapter.loss_and_grads(loss, jit=jit)(params, x)
    y = x @ params["a"]["w"].T
    assert value == pytest.approx(np.sum(y * y))
    assert {unit: list(named) for unit, named in grads.items()} == {"a": ["w"], "b": ["unused"]}
    assert_allclose(grads["a"]["w"], 2 * y.T @ x, rtol=1e-5)
    assert grads["a"]["w"].dtype == np.float32
    assert_array_equal(grads["b"]["unused"], np.zeros(2))
    assert grads["b"]["unused"].dtype == np.float16


@pytest.mark.parametrize("jit", [True, False])
def test_gradients_of_the_whole_model_are_apart_from_its_memory(jit):
    """The gradient of each is the other one."""
    values = arrays(w=(16, 4), v=(16, 4))
    (w, first), (v, second) = (lying(array, 0) for array in values.values())
    compute = adapter.loss_and_grads(
        lambda params: jnp.sum(params["a"]["w"] * params["b"]["v"]), jit=jit
    )
    _, grads = compute({"a": {"w": w}, "b": {"v": v}})
    first[:] = second[:] = 255
    assert_array_equal(grads["a"]["w"], values["v"])
    assert_array_equal(grads["b"]["v"], values["w"])


def test_initial_parameters_are_a_mapping_or_made_by_the_generator():
    fixed = {"w": fc.Spec(3), "b": np.ones(2, np.float32)}
    assert adapter.layer(scaled_tanh, fixed).init(np.random.default_rng(0)) == fixed
    drawn = adapter.layer(scaled_tanh, lambda rng: {"w": jnp.asarray(rng.integers(9, size=3))})
    found = drawn.init(np.random.default_rng(4))
    assert type(found["w"]) is np.ndarray
    assert_array_equal(found["w"], np.random.default_rng(4).integers(9, size=3))


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


@pytest.mark.parametrize(
    "value", [np.ones(3), (np.float32(1), 2), None, "loss", jnp.zeros((), int)]
)
def test_a_loss_that_is_no_number_is_refused(value):
    for compute in (adapter.loss(lambda y: value), adapter.loss_and_grads(lambda y: value)):
        params = {"u": {"w": np.ones(3, np.float32)}}
        assert "single real number" in complaint(fc.ArgumentError, compute, params)


def test_a_forgotten_has_aux_is_named():
    params = {"u": {"w": np.ones(3, np.float32)}}
    compute = adapter.loss_and_grads(lambda params: (params["u"]["w"].sum(), 1))
    assert "say has_aux=True" in complaint(fc.ArgumentError, compute, params)


def test_keys_are_folded_with_whole_numbers_only():
    key = jax.random.key(3)
    rows = jax.vmap(lambda row: jax.random.key_data(adapter.fold_in(key, row)))(jnp.arange(2))
    want = jax.random.key_data(jax.random.fold_in(key, 1))
    assert_array_equal(rows[1], want)
    assert_array_equal(jax.random.key_data(adapter.fold_in(key, np.int64(1))), want)
    for number in (-1, 0.5, 2**32, "1", None, np.float32(1)):
        assert "fold_in(key, *nu" in complaint(fc.ArgumentError, adapter.fold_in, key, number)
    for wrong in (3, None, jnp.ones(2)):
        assert "a key such as jax" in complaint(fc.ArgumentError, adapter.fold_in, wrong, 1)
    assert "an integer" in complaint(fc.ArgumentError, adapter.fold_in, key, jnp.ones(()))
    assert "integers such as" in complaint(fc.ArgumentError, adapter.fold_in, key, jnp.arange(2))


def test_nothing_is_sent_from_inside_of_what_jax_traces():
    def body(backend):
        engine = fc.FSDP({"w": np.ones(3, np.float32)}, backend, optimizer=fc.optim.SGD(1.0))
        value = adapter.loss_and_grads(lambda params, x: (params["w"] * x).sum())

        def closed_over(x):
            fc.train_step(engine, lambda params: (0.0, {"w": x}))

        calls = {
            "all_reduce": lambda x: fc.all_reduce(x, backend),
            "send": lambda x: backend.send(x, 1 - backend.rank),
            "metrics": lambda x: fc.average_metrics({"loss": x}, backend),
            "step": lambda x: fc.train_step(engine, value, x),
            "gradients": closed_over,
        }
        for name, call in calls.items():
            for inside in (jax.jit(call), jax.grad(lambda x, call=call: call(x).sum())):
                with pytest.raises(
                    fc.ArgumentError, match=r"do not go inside of jax\.jit"
                ) as caught:
                    inside(np.ones(3, np.float32))
                assert "return the value as aux" in str(caught.value), name
        assert engine.steps == 0
        assert fc.all_reduce(1, backend) == 2
        step = jax.jit(jax.value_and_grad(lambda params, x: (params["w"] * x).sum()))
        assert fc.train_step(engine, step, np.float32(2)) == 6  # without an adapter it goes
        assert_array_equal(engine.full_tree()["w"], -np.ones(3))

    launch(body, 2)


@compiled
def test_gradients_of_another_shape_than_the_output_are_refused(how):
    params, x = arrays(**SHAPES), arrays(**BATCH)["x"]
    layer = tanh_layer(**how)
    grads = zeros_like(params)
    text = complaint(fc.ArgumentError, passes, layer, params, x, np.ones((1, 3), np.float32), grads)
    assert "(5, 16)" in text
    assert "(1, 3)" in text
    pairs = adapter.layer(lambda params, x: (x, x), params, **how)
    text = complaint(fc.ArgumentError, passes, pairs, params, x, (x, x, x), grads)
    assert "not nested like the output" in text


def test_parameters_of_64_bits_need_a_jax_of_64_bits():
    params = arrays(np.float64, **SHAPES)
    x, dy = arrays(np.float64, **BATCH).values()
    layer = tanh_layer()
    text = complaint(fc.ArgumentError, layer.forward, params, x)
    assert 'jax.config.update("jax_enable_x64", True)' in text
    compute = adapter.loss_and_grads(lambda params: jnp.sum(params["a"]["w"]))
    assert "float64" in complaint(fc.ArgumentError, compute, {"a": params})

    with with_64_bits():
        grads = zeros_like(params)
        y, dx = passes(layer, params, x, dy, grads)
        value, want_grads, want_dx = differentiated(np.dtype(np.float64))
        assert_allclose(y, value, rtol=1e-14)
        assert_allclose(dx, want_dx, rtol=1e-12)
        assert dx.dtype == grads["w"].dtype == np.float64
        assert_allclose(grads["w"], want_grads["w"], rtol=1e-12)


@each_way
def test_arrays_of_a_gpu_are_refused(how, cupy):
    layer = tanh_layer(**how)
    params = {name: cupy.asarray(array) for name, array in arrays(**SHAPES).items()}
    x = np.ones((5, 16), np.float32)
    assert "computes on the host" in complaint(fc.UnsupportedError, layer.forward, params, x)


def test_without_jax_there_is_a_command_that_helps(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    for make in (lambda: adapter.layer(scaled_tanh, {}), lambda: adapter.loss(scaled_tanh)):
        assert "pip install -e '.[jax]'" in complaint(fc.MissingDependencyError, make)
    with pytest.raises(fc.MissingDependencyError):
        adapter.loss_and_grads(scaled_tanh)
