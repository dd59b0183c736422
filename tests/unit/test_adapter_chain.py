"""Several layers as one unit."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support import mlp
from support.fsdp_steps import is_clean, values_of
from support.spmd import run

import fsdpcore as fc
from fsdpcore.adapters.layers import Chain, LayerStack
from fsdpcore.parallel.scope import Scope, prefixed

STEPS = 20


def chained():
    """The first layer alone, the other two as one unit."""
    (first, layer), *others = mlp.layers()
    return LayerStack([(first, layer), ("rest", Chain(others))])


def flat(params):
    """Parameters by the names that ``chained`` has for them."""
    return {
        "dense0": params["dense0"],
        "rest": {
            f"{u}.{n}": a for u, named in params.items() if u != "dense0" for n, a in named.items()
        },
    }


def train(backend):
    stack = chained()
    engine = fc.FSDP(
        stack.units(np.random.default_rng(5)),
        backend,
        optimizer=fc.optim.SGD(lr=mlp.LR, momentum=mlp.MOMENTUM),
    )
    rows = mlp.rows_of(backend)
    losses = []
    for number in range(STEPS):
        x, wanted = mlp.batch(number)
        with engine.step(divisor=mlp.BATCH) as step:
            y, saved = stack.forward(step, x[rows])
            loss, dy = mlp.square_loss(y, wanted[rows])
            stack.backward(step, saved, dy)
            step.update()
        losses.append(float(fc.all_reduce(np.float64(loss), backend)) / mlp.BATCH)
    return losses, values_of(engine), is_clean(engine)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_chain_trains_as_its_layers_do_unsharded(world_size):
    want_losses, want = mlp.trained(STEPS)
    assert want_losses[-1] < want_losses[0] / 2  # it learns, so the comparison means something
    for losses, params, clean in run(train, transport="sim", world_size=world_size):
        assert clean
        assert_allclose(losses, want_losses, rtol=2e-5)
        for unit, named in flat(want).items():
            assert list(params[unit]) == list(named)
            for name, array in named.items():
                assert_allclose(params[unit][name], array, atol=2e-5)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_no_more_units_are_gathered_than_one_and_those_ahead(prefetch):
    def body(backend):
        square = mlp.Dense(6, 6, True)
        stack = LayerStack([(f"u{i}", Chain([("a", square), ("b", square)])) for i in range(5)])
        engine = fc.FSDP(
            stack.units(np.random.default_rng(0)),
            backend,
            optimizer=fc.optim.SGD(lr=0.1),
            prefetch=prefetch,
            window=False,
        )
        x = np.ones((2, 6), np.float32)
        peaks = []
        with engine.evaluation() as step:
            stack.forward(step, x)
        peaks.append(engine.gathered_peak)
        with engine.step() as step:
            y, saved = stack.forward(step, x)
            stack.backward(step, saved, y)
            step.update()
        peaks.append(engine.gathered_peak)
        unit = engine.units[0].layout.padded_size * 4
        return [peak / unit for peak in peaks]

    ahead = prefetch + 1
    # A backward pass has the gradients of its unit besides.
    assert fc.launch(body, world_size=2, transport="sim") == [[ahead, ahead + 1]] * 2


def test_the_generator_is_drawn_from_in_the_order_of_the_layers():
    rng = np.random.default_rng(5)
    found = {name: layer.init(rng) for name, layer in chained().layers}
    for unit, named in flat(mlp.initial()).items():
        assert list(found[unit]) == list(named)
        for name, array in named.items():
            assert_array_equal(found[unit][name], array)


def test_a_chain_of_chains_names_its_parameters_by_all_of_them():
    chain = Chain([("a", Chain([("b", mlp.Dense(2, 3, True))])), ("c", mlp.Dense(3, 1, False))])
    params = chain.init(np.random.default_rng(0))
    assert list(params) == ["a.b.w", "a.b.b", "c.w", "c.b"]
    grads = {name: np.zeros_like(array) for name, array in params.items()}
    x = np.ones((4, 2), np.float32)
    y, saved = chain.forward(params, x)
    assert_allclose(
        y, np.tanh(x @ params["a.b.w"] + params["a.b.b"]) @ params["c.w"] + params["c.b"]
    )
    chain.backward(params, saved, np.ones_like(y), grads)
    assert_array_equal(grads["c.b"], [4])
    again = {name: np.zeros_like(array) for name, array in params.items()}
    chain.backward(params, saved, np.ones_like(y), again)  # nothing was consumed
    assert all(np.array_equal(grads[name], again[name]) for name in grads)


@pytest.mark.parametrize(
    ("names", "message"),
    [("aa", "must be unique"), (("a", "b", "a.x"), "layer 'a.x' would be among")],
)
def test_names_that_cannot_be_told_apart_are_refused(names, message):
    with pytest.raises(fc.ArgumentError, match=message):
        Chain([(name, mlp.Dense(1, 1, False)) for name in names])


def test_a_chain_holds_parameters_if_one_of_its_layers_does():
    holding = mlp.Dense(1, 1, False)
    holding.holds_params = True
    assert not Chain([("a", mlp.Dense(1, 1, False))]).holds_params
    assert Chain([("a", Chain([("b", holding)]))]).holds_params


class Shift:
    """Adds a parameter; the gradient of its input lies in that of the parameter."""

    def init(self, rng):
        return {"b": np.ones(3)}

    def forward(self, params, x):
        return x + params["b"], None

    def backward(self, params, saved, dy, grads):
        grads["b"][...] = dy
        return grads["b"]


def test_the_gradient_of_the_input_is_apart_from_those_of_the_parameters():
    chain = Chain([("shift", Shift())])
    params = chain.init(np.random.default_rng(0))
    grads = {"shift.b": np.zeros(3)}
    _, saved = chain.forward(params, np.zeros(3))
    dx = chain.backward(params, saved, np.arange(3.0), grads)
    assert not np.shares_memory(dx, grads["shift.b"])
    assert_array_equal(dx, [0, 1, 2])


def test_a_scope_shows_and_writes_the_names_of_its_prefix():
    arrays = {"a.w": np.zeros(2), "ab.w": np.ones(2), "a.b.w": np.ones(3)}
    scope = Scope(arrays, "a.")
    assert list(scope) == ["w", "b.w"]
    assert len(scope) == 2
    assert scope["w"] is arrays["a.w"]
    assert scope.empty("w") is arrays["a.w"]
    assert "w" in scope
    assert "ab.w" not in scope
    assert list(Scope(scope, "b.")) == ["w"]
    scope["w"] = np.full(2, 7.0)
    assert_array_equal(arrays["a.w"], [7, 7])
    del scope["w"]
    assert "a.w" not in arrays
    assert prefixed("a.", {"w": 1}) == {"a.w": 1}
    with pytest.raises(KeyError):
        scope["w"]


def test_a_scope_of_what_is_read_only_is_read_only():
    def body(backend):
        engine = fc.FSDP([fc.Unit("u", {"a.w": np.zeros(2, np.float32)})], backend)
        with engine.evaluation() as step, step.forward("u") as params:
            scope = Scope(params, "a.")
            with pytest.raises(TypeError):
                scope["w"] = np.ones(2, np.float32)
            return scope["w"].flags.writeable

    assert fc.launch(body, world_size=1, transport="sim") == [False]
