"""``LayerStack`` and ``Chain``: what layers give and save, where parameters are lent only."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support import mlp

import fsdpcore as fc
from fsdpcore.adapters.layers import Chain, LayerStack


class Row:
    """Gives a view of its parameter, as a table of positions does."""

    def init(self, rng):
        return {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}

    def forward(self, params, x):
        return (params["w"][0], {"x": x}), x

    def backward(self, params, saved, dy, grads):
        grads["w"] = np.ones((2, 3), np.float32)
        return params["w"].T, grads["w"][1]


class Seven:
    """Has other values of the same sizes, and leaves its input as it is."""

    def init(self, rng):
        return {"w": np.full((2, 3), -7, np.float32)}

    def forward(self, params, x):
        return x, None

    def backward(self, params, saved, dy, grads):
        return dy


@pytest.mark.parametrize("window", [True, False])
@pytest.mark.parametrize("chained", [True, False])
def test_what_comes_out_of_a_pass_never_lies_in_parameters_or_gradients(window, chained):
    def body(backend):
        row = Chain([("row", Row())]) if chained else Row()
        stack = LayerStack([(f"a{i}", Seven()) for i in range(3)])
        stack = LayerStack([*stack.layers, ("row", row), *((f"b{i}", Seven()) for i in range(4))])
        options = {"optimizer": fc.optim.SGD(lr=1.0), "window": window}
        engine = fc.FSDP(stack.units(np.random.default_rng(0)), backend, **options)
        with engine.step() as step:
            (y, also), saved = stack.forward(step, np.ones(2, np.float32))
            dx, dw = stack.backward(step, saved, None)
            step.update()
        return y, also["x"], dx, dw

    for y, x, dx, dw in fc.launch(body, world_size=2, transport="sim"):
        assert_array_equal(y, [0, 1, 2])
        assert_array_equal(x, [1, 1])
        assert_array_equal(dx, np.arange(6).reshape(2, 3).T)
        assert_array_equal(dw, [1, 1, 1])


class Keeps(mlp.Dense):
    """Saves a view of its parameters, too."""

    def forward(self, params, x):
        y, saved = super().forward(params, x)
        return y, (saved, {"w": params["w"].T})

    def backward(self, params, saved, dy, grads):
        return super().backward(params, saved[0], dy, grads)


@pytest.mark.parametrize("options", [{}, {"window": False}, {"strategy": "no_shard"}], ids=str)
@pytest.mark.parametrize("chained", [True, False])
def test_a_layer_that_saves_parameters_without_saying_so_is_refused(options, chained):
    def body(backend):
        layer = Keeps(3, 3, True)
        named = Chain([("in", layer)]) if chained else layer
        stack = LayerStack([("a", mlp.Dense(3, 3, True)), ("b", named)])
        engine = fc.FSDP(stack.units(np.random.default_rng(0)), backend, **options)
        x = np.ones((2, 3), np.float32)
        with engine.evaluation() as step:
            stack.forward(step, x)  # nobody uses what was saved
        message = rf"layer 'b', a \w+, has kept parameter '{'in.' if chained else ''}w'"
        with pytest.raises(fc.StateError, match=message), engine.step() as step:
            stack.forward(step, x)
        named.holds_params = True
        if options.get("window", True):  # or the strategy keeps them
            with engine.step() as step:
                stack.forward(step, x)

    fc.launch(body, world_size=2, transport="sim")


def test_ignored_arrays_and_what_is_passed_on_may_be_saved():
    class Masks(Row):
        def forward(self, params, x):
            return x, params["w"]

        def backward(self, params, saved, dy, grads):
            assert_array_equal(saved, params["w"])
            return dy

    class After(Seven):
        def forward(self, params, x):
            return x, x  # in a chain, what the layer before has given: a view of its parameter

    def body(backend):
        chain = Chain([("row", Row()), ("after", After())])
        stack = LayerStack([("mask", Masks()), ("chain", chain)])
        mask, rest = stack.units(np.random.default_rng(0))
        mask = fc.Unit("mask", Masks().init(None), ignored="w")
        engine = fc.FSDP([mask, rest], backend, optimizer=fc.optim.SGD(lr=1.0))
        with engine.step() as step:
            _, saved = stack.forward(step, np.ones(2, np.float32))
            stack.backward(step, saved, None)
            step.update()

    fc.launch(body, world_size=1, transport="sim")


@pytest.mark.parametrize("given", [mlp.Dense(1, 1, False), [mlp.Dense(1, 1, False)], ["ab"]])
@pytest.mark.parametrize("kind", [Chain, LayerStack])
def test_layers_without_names_are_refused(kind, given):
    with pytest.raises(fc.ArgumentError, match="pairs of a name and a layer"):
        kind(given)


def test_a_tensor_that_begins_in_a_parameter_is_seen_in_what_is_saved():
    class Tensors(Seven):
        def forward(self, params, x):
            begins = params["w"][1].ctypes.data
            return x, [SimpleNamespace(data_ptr=lambda: begins)]  # as PyTorch's tensors tell it

    def body(backend):
        stack = LayerStack([("a", Tensors())])
        engine = fc.FSDP(stack.units(np.random.default_rng(0)), backend)
        with pytest.raises(fc.StateError, match="kept parameter 'w'"), engine.step() as step:
            stack.forward(step, np.ones(2, np.float32))

    fc.launch(body, world_size=1, transport="sim")
